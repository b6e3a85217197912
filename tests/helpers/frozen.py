"""Imported last by the servers that ranks fork from.

What they have imported is never garbage: a collection in a rank would walk all of it, and copy its
pages while it counts.
"""

import gc

gc.collect()
gc.freeze()

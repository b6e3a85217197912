"""`python -m moecore`."""

import sys

from moecore.cli import main

sys.exit(main())

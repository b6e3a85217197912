"""Makes the golden record of this platform: all paths, or those that are named.

python -m tests.golden.make [paths...]
"""

import sys

from tests.golden.paths import PATHS
from tests.golden.records import run_all, why_not, write


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in PATHS]
    if unknown:
        sys.exit(f"path ({unknown[0]}) must be one of {', '.join(PATHS)}")
    missing = {name: why_not(PATHS[name]) for name in names or PATHS}
    for name, reason in missing.items():
        if reason:
            print(f"{name} is left out: {reason}")
    results = run_all(name for name, reason in missing.items() if not reason)
    print(f"{', '.join(results)} -> {write(results)}")


if __name__ == "__main__":
    main(sys.argv[1:])

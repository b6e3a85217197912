"""Kill all ranks at random moments of saving, and load what is left.

    python -m tests.io.checkpoint.kill_many     60 moments: 4 ranks, three sizes, sync and
                                                background; 60 more: one of three jobs that
                                                contend for one run

It prints, for each kill of a job, 0 where the save before is left and 1 where the newer one is.
"""

import argparse
import tempfile
from pathlib import Path

from tests.io.checkpoint.kills import kill_at_random, kill_contenders

WIDTHS = {64: "0.2 MB", 384: "7 MB", 1024: "50 MB"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="for each of the six combinations")
    kills = parser.parse_args().kills
    for seed, (width, wait) in enumerate((w, s) for w in WIDTHS for s in (True, False)):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "root"
            left = kill_at_random(root, kills, world=4, width=width, wait=wait, seed=seed)
        kind = "sync" if wait else "background"
        print(f"{WIDTHS[width]}, {kind}: {len(left)} of {kills} loaded whole, {left}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        reads, saves = kill_contenders(Path(folder) / "root", 6 * kills, jobs=3, seed=0)
    print(f"3 jobs: {6 * kills} kills, {saves} saves, none lost; {reads} reads, all whole")


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# Runs the CPU tests in an environment of exact versions: locks/LANE.txt.
#   tools/test_lane.sh oldest|newest|peers [arguments of pytest]
# The first run of a lane downloads its packages, gigabytes with CUDA, into .venv/lanes/LANE. A lock
# is written again by the command in locks/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
lane=${1:?"usage: tools/test_lane.sh oldest|newest|peers [arguments of pytest]"}
shift
lock=locks/$lane.txt
[ -f "$lock" ] || { echo "test_lane: no $lock: choose oldest, newest or peers" >&2; exit 1; }
[ -f .venv/.ready ] || { echo "test_lane: no .venv: run 'make venv' first" >&2; exit 1; }

venv=$PWD/.venv/lanes/$lane
py=$venv/bin/python
if ! cmp -s "$lock" "$venv/lock.txt"; then
    .venv/bin/python -m venv --clear "$venv"
    "$py" -m pip install -q --no-input --no-deps -r "$lock"
    cp "$lock" "$venv/lock.txt"
fi
workers=(-n auto --maxprocesses 4 --dist loadfile)
CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 PYTHONPATH=$PWD/src:$PWD "$py" -m pytest -q "${workers[@]}" "$@"

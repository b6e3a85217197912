#!/usr/bin/env bash
# Runs the CPU tests with another torch than .venv's, and .venv's other packages.
#   tools/test_torch.sh 2.11.0 [arguments of pytest]
# The first run of a version downloads it, gigabytes with CUDA, into .venv/torch-VERSION. From 2.14
# on torchtitan is 0.3, whose tests run then in place of those of 0.2.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=${1:?"usage: tools/test_torch.sh VERSION [arguments of pytest]"}
shift
[ -f .venv/.ready ] || { echo "test_torch: no .venv: run 'make venv' first" >&2; exit 1; }

venv=$PWD/.venv/torch-$version
py=$venv/bin/python
site_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

if [ ! -f "$venv/.ready" ]; then
    packages=("torch==$version")
    if [ "$(printf '%s\n' 2.14 "$version" | sort -V | head -n 1)" = 2.14 ]; then
        packages+=("torchtitan>=0.3,<0.4")
    fi
    .venv/bin/python -m venv "$venv"
    "$py" -m pip install -q --no-input "${packages[@]}"
    site_of .venv/bin/python >"$(site_of "$py")/rest.pth" # behind its own packages
    touch "$venv/.ready"
fi
workers=(-n auto --maxprocesses 4 --dist loadfile)
CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 PYTHONPATH=$PWD/src:$PWD "$py" -m pytest -q "${workers[@]}" "$@"

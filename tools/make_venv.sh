#!/usr/bin/env bash
# Creates or updates .venv with moecore and its test and demo packages, then stamps .venv/.ready.
#   PYTHON=...  base interpreter, 3.11 or newer (default: the one .venv started from, else python3)
# A torch that the base already imports is reused, never replaced: a .pth file puts the base's
# package folders behind .venv's own, and the pins of packages found there are dropped.
# Without an index (offline host), src is linked and what is already importable has to do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

NEEDED="torch numpy pytest"
OPTIONAL="transformers safetensors hypothesis xdist torchtitan ruff mypy triton matplotlib tqdm accelerate peft trl"

venv=$PWD/.venv
py=$venv/bin/python
log=$venv/pip.log
known=$(cat "$venv/.base" 2>/dev/null || echo python3)
base=${PYTHON:-$known}

say() { echo "make_venv: $*"; }
die() { say "$*" >&2; exit 1; }
minor_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

STILL_S=10
progress() { # what pip takes time for, one line each with the seconds so far, and one every STILL_S while it is silent
    local line="" part doing="resolving packages" code
    while :; do
        code=0; IFS= read -r -t "$STILL_S" part || code=$?
        line+=$part
        if [ "$code" -gt 128 ]; then # no line yet
            say "$SECONDS s: still ${doing:0:72}"
            continue
        fi
        line=${line#"${line%%[![:space:]]*}"} # without the spaces in front
        case $line in
        *.metadata*) ;;
        "Downloading "*|"Using cached "*|"Building wheel"*|"Installing "*)
            doing=${line,}
            say "$SECONDS s: ${line:0:80}" ;;
        esac
        [ "$code" -eq 0 ] || break
        line=""
    done
}

missing() { # of the named packages, those that .venv cannot import
    "$py" - "$@" <<'PY'
import sys
from importlib.util import find_spec

print(*(name for name in sys.argv[1:] if find_spec(name) is None))
PY
}

base_folders() { # the base's package folders, one a line; none where torch is absent or too old
    "$base" - <<'PY'
import os, re, sys
from importlib.metadata import version

try:
    import torch
    found = re.findall(r"\d+", version("torch"))[:2]
except Exception:  # a broken torch raises OSError and worse: then it is not one to reuse
    sys.exit()
floor = re.search(r'"torch>=(\d+)\.(\d+)"', open("pyproject.toml").read()).groups()
if [int(x) for x in found] < [int(x) for x in floor]:
    print("make_venv: the base's torch", version("torch"), "is too old to reuse", file=sys.stderr)
    sys.exit()
# sys.path rather than sysconfig alone: it also names the user's and the distribution's folders.
folders = [os.path.dirname(os.path.dirname(torch.__file__))]
folders += [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages")]
print(*dict.fromkeys(map(os.path.abspath, folders)), sep="\n")
PY
}

constraints_beside_base() { # constraints.txt less what the base has, its torch pinned as it is
    "$base" - <<'PY'
import re
from importlib.metadata import distributions, version

def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()

have = {normal(d.metadata["Name"]) for d in distributions() if d.metadata["Name"]}
print("torch==" + version("torch"))
for line in open("constraints.txt"):
    if line.startswith("#") or normal(line.split("==")[0]) not in have:
        print(line, end="")
PY
}

# 1. The base interpreter.
command -v "$base" >/dev/null || die "no interpreter '$base': set PYTHON to Python 3.11 or newer"
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$base is $("$base" --version 2>&1), moecore needs 3.11 or newer: set PYTHON"
if [ "$("$base" -c 'import sys; print(sys.prefix)')" = "$venv" ]; then # .venv itself is activated
    base=$known
    [ "$base" != python3 ] || base=$("$py" -c 'import sys; print(sys._base_executable)')
fi

# 2. The environment.
if [ -x "$py" ] && "$py" -c '' 2>/dev/null; then
    had=$(minor_of "$py") now=$(minor_of "$base")
    [ "$had" = "$now" ] || die ".venv has Python $had but $base is $now: remove .venv or set PYTHON"
else
    say "creating .venv with $base"
    # Some distributions split ensurepip off; the base's own pip may still be reachable
    "$base" -m venv "$venv" >/dev/null 2>&1 || "$base" -m venv --without-pip "$venv" ||
        die "$base cannot create a venv"
fi
site=$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
base_link=$site/moecore_base.pth
src_link=$site/moecore_src.pth
rm -f "$venv/.ready" "$base_link" "$src_link"
"$base" -c 'import sys; print(sys.executable)' >"$venv/.base"

# 3. The base's torch, where there is one.
constraints=constraints.txt
say "$SECONDS s: looking for a torch of $base"
folders=$(base_folders)
if [ -n "$folders" ]; then
    echo "$folders" >"$base_link"
    constraints=$venv/constraints.txt
    constraints_beside_base >"$constraints"
    say "reusing $(grep '^torch==' "$constraints") of $base"
fi

# 4. Everything else.
say "installing moecore[test,demo] into .venv (the first time takes about 5 minutes)"
if ! "$py" -m pip install --no-input --retries 2 --progress-bar off --no-color \
    -c "$constraints" -e ".[test,demo]" 2>"$log" | progress; then
    reason=$(grep -m1 'ERROR: ' "$log" || tail -n1 "$log")
    absent=$(missing $NEEDED)
    [ -z "$absent" ] || die "pip cannot install (${reason#*ERROR: }) and these are missing: $absent"
    echo "$PWD/src" >"$src_link"
    absent=$(missing $OPTIONAL)
    say "pip cannot install (${reason#*ERROR: }): src linked, going on with the packages found here"
    [ -z "$absent" ] || say "optional packages missing, tests that need them skip: $absent"
    say "to try pip again: rm .venv/.ready"
fi
touch "$venv/.ready"

#!/usr/bin/env bash
# environment.sh [PYTHON]: prints the folder of a Python environment with a real SGLang that computes on a CPU, after making
# it where that was not done yet (some minutes, 2 GB). It lies outside the clone, named by what is in it, so that clones
# share it and a new pin makes a new one.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${1:-python3}"
version="$(sed -n 's/^sglang==//p' "$here/requirements.txt")"
key="$( (cat "$here/requirements.txt" "$here/environment.sh" "$here/stand_in.py"; "$python" -V) | sha256sum | cut -c1-8)"
place="${XDG_CACHE_HOME:-$HOME/.cache}/deltawire/sglang-$version-$key"
pip=("$place/bin/python" -m pip install -qq --disable-pip-version-check)

mkdir -p "$place"
exec 9>"$place/.lock"
flock 9
if [ ! -e "$place/.ready" ]; then
    echo "making $place (once; some minutes)" >&2
    "$python" -m venv "$place"
    # torch first and alone: resolved together with others, pip may choose a build of several GB
    "${pip[@]}" torch==2.13.0 >&2
    # without dependencies: the list is complete, and the rest of SGLang's are kernels for GPUs
    "${pip[@]}" --no-deps -r "$here/requirements.txt" >&2
    # two packages that SGLang imports everywhere and needs on a GPU or for pictures only
    site="$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    for package in sgl_kernel torchvision; do
        mkdir -p "$site/$package"
        cp "$here/stand_in.py" "$site/$package/__init__.py"
    done
    touch "$place/.ready"
fi
echo "$place"

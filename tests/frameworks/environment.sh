#!/usr/bin/env bash
# environment.sh FRAMEWORK [PYTHON [VERSION]]: prints the folder of a Python environment with a training framework for CPUs, after
# making it where that was not done yet (some minutes, 2 GB). FRAMEWORK is a folder beside this file.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../engines/environment.sh"
framework="$1"
requirements="$here/$framework/requirements.txt"
version="${3:-$(sed -En "s/^(ms_)?$framework(-core)?==//p" "$requirements")}"

install() {
    # without dependencies: the list is complete
    "${pip[@]}" --no-deps -r <(sed -E "s/^((ms_)?$framework(-core)?)==.*/\\1==$version/" "$requirements") >&2
    # verl's wheel installs its own tests under the name that ours have
    rm -rf "$site/tests"
}

make_environment "$framework-$version" "${2:-python3}" "$requirements" "$here/environment.sh"

# Sourced by vllm/environment.sh and sglang/environment.sh: makes a Python environment outside the clone, named by what is in
# it, so that clones share it and a new pin makes a new one.

# make_environment NAME PYTHON FILE...: prints the folder, after making it where that was not done yet. FILEs are what it
# depends on; `install` is called to fill it, with `pip` and `place` set.
make_environment() {
    local name="$1" python="$2" key
    shift 2
    key="$( (cat "$@" "${BASH_SOURCE[0]}"; "$python" -V) | sha256sum | cut -c1-8)"
    place="${XDG_CACHE_HOME:-$HOME/.cache}/deltawire/$name-$key"
    pip=("$place/bin/python" -m pip install -qq --disable-pip-version-check)
    mkdir -p "$place"
    exec 9>"$place/.lock"
    flock 9
    if [ ! -e "$place/.ready" ]; then
        echo "making $place (once; some minutes)" >&2
        "$python" -m venv "$place"
        # torch first and alone: resolved together with others, pip may choose a build of several GB
        "${pip[@]}" torch==2.13.0 >&2
        site="$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        install
        touch "$place/.ready"
    fi
    echo "$place"
}

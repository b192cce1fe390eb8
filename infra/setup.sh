#!/usr/bin/env bash
# Set up .venv: everything the project needs, at the versions pinned under requirements/.
#
# Says one line for each step and keeps the details in .venv/setup.log. Does nothing when the environment already
# matches the requirements. Variables:
#   GPU          1: builds for NVIDIA GPUs, requirements/cuda.txt; 0: builds for CPUs, requirements/cpu.txt
#                (default: 1 where nvidia-smi lists a GPU)
#   PYTHON       interpreter to build .venv with (default: the first of python3.11, python3.12, ... that works)
#   TORCH_INDEX  package index with CPU builds of torch (default: PyTorch's own; empty: none beside pip's own settings)
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_INDEX=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
LOG=.venv/setup.log
STAMP=.venv/setup.sha256
TICKER=
trap '[[ -z $TICKER ]] || kill "$TICKER" 2>/dev/null' EXIT

say() { printf '%s\n' "$*"; }

fail() {
    printf '\n%s\n' "$1" >&2
    exit 1
}

tick() {
    local seconds=0
    while sleep 1; do printf '\r  %-34s %3d s ' "$1" $((++seconds)); done
}

# step LABEL REMEDY COMMAND...: run COMMAND with its output in the log; on failure show the log's end and REMEDY.
step() {
    local label=$1 remedy=$2 start=$SECONDS status=0
    shift 2
    if [[ -t 1 ]]; then
        tick "$label" &
        TICKER=$!
    fi
    printf '\n== %s: %s\n' "$label" "$*" >>"$LOG"
    "$@" >>"$LOG" 2>&1 </dev/null || status=$?
    if [[ -n $TICKER ]]; then
        kill "$TICKER" && wait "$TICKER" 2>/dev/null || true
        TICKER=
        printf '\r'
    fi
    if ((status)); then
        printf '  %-34s failed, the end of %s:\n' "$label" "$LOG"
        grep -v 'is ignored' "$LOG" | tail -n 20 | sed 's/^/    /'
        fail "$remedy"
    fi
    printf '  %-34s %3d s \n' "$label" $((SECONDS - start))
}

# choose_build: which builds to install, cuda or cpu; also the name of their file under requirements/.
choose_build() {
    case ${GPU:-auto} in
        1) say cuda ;;
        0) say cpu ;;
        auto) if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then say cuda; else say cpu; fi ;;
        *) fail "GPU=$GPU: 1 installs builds for NVIDIA GPUs, 0 builds for CPUs; without it nvidia-smi decides" ;;
    esac
}

# digest BUILD: what the environment was made from, and where.
digest() {
    { pwd && cat infra/setup.sh requirements/{"$1",services,dev,ray}.txt && sed '/^\[tool.ruff\]/,$d' pyproject.toml; } |
        sha256sum
}

# is_whole: whether .venv can be installed into: its interpreter is there, it has pip, and it was made in this place,
# because its scripts name their interpreter by its path.
is_whole() { works .venv/bin/python && [[ $(.venv/bin/pip --version 2>/dev/null) == *" from $PWD/.venv/"* ]]; }

works() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if works "$candidate"; then
            say "$candidate"
            return
        fi
    done
    fail "No usable Python. The project needs Python 3.11 or newer; 3.11 is what it is tested with.
Debian, Ubuntu: sudo apt-get install python3 python3-venv     then run this again, or name one: make setup PYTHON=/path/to/python3.11"
}

as_root() {
    if ((EUID == 0)); then "$@"; else sudo -n "$@"; fi
}

can_apt() { command -v apt-get >/dev/null && as_root true 2>/dev/null; }

apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    as_root apt-get install -y -q --no-install-recommends "$@" ||
        { as_root apt-get update -q && as_root apt-get install -y -q --no-install-recommends "$@"; }
}

ensure_bubblewrap() {
    command -v bwrap >/dev/null && return
    if can_apt && apt_install bubblewrap >>"$LOG" 2>&1; then
        say "  installed Debian's bubblewrap"
        return
    fi
    say "  bubblewrap is missing and could not be installed from here. Generated programs then run at the isolation level"
    say "  landlock, which is weaker and needs a kernel with Landlock (5.13); see docs/sandbox.md. For the strongest level:"
    say "      sudo apt-get install bubblewrap       (Fedora: sudo dnf install bubblewrap)"
    say "  The package of that name on PyPI is something else."
}

make_venv() {
    local python=$1
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        apt_install python3-venv || say "$python has no ensurepip"
    fi
    "$python" -m venv .venv
}

main() {
    local build other disk
    build=$(choose_build)
    if [[ -f $STAMP && $(<"$STAMP") == "$(digest "$build")" ]] && works .venv/bin/python; then
        ensure_bubblewrap
        return
    fi
    [[ $(uname -s) == Linux ]] || fail "Linux is needed: the sandbox and the kernels have no other platform. On macOS or Windows use a Linux container or WSL 2."
    if [[ $build == cuda ]]; then other=cpu disk=9; else other=cuda disk=4; fi
    # Both builds install the same modules: a change from one to the other starts from an empty environment.
    if compgen -G ".venv/lib/python3*/site-packages/vllm$([[ $other == cpu ]] && say _cpu)-*.dist-info" >/dev/null; then
        say "Removing .venv: it holds builds for $other, this is a set-up for $build (GPU=0 or GPU=1 decides)"
        rm -rf .venv
    elif [[ -d .venv/bin ]] && ! is_whole; then
        say "Removing .venv: its Python or pip does not work, or it was made in another folder"
        rm -rf .venv
    fi
    say "Setting up .venv with builds for $build (once; about $disk GB and some minutes, details in $LOG)"
    mkdir -p .venv
    : >"$LOG"
    ensure_bubblewrap
    if [[ ! -d .venv/bin ]]; then
        local python
        python=$(find_python)
        step "virtual environment" "Could not make a virtual environment. Debian, Ubuntu: sudo apt-get install python3-venv" \
            make_venv "$python"
    fi
    # Not compiled here: Python compiles what is imported when it is, and most of these packages' modules never are.
    local pip=(.venv/bin/python -m pip install --no-deps --no-compile --no-input --disable-pip-version-check --progress-bar off)
    local online="Is the package index reachable? Run the command again to continue where it stopped."
    if [[ $build == cpu ]]; then
        step "torch, CPU build" \
            "Could not get the CPU build of torch. It comes from https://download.pytorch.org/whl/cpu; set TORCH_INDEX=<url> to take it from a mirror." \
            "${pip[@]}" --retries 0 --timeout 20 ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$(grep '^torch==' requirements/cpu.txt)"
    fi
    step "$(cat requirements/{"$build",services,dev,ray}.txt | grep -c ==) pinned packages" "$online" \
        "${pip[@]}" -r "requirements/$build.txt" -r requirements/services.txt -r requirements/dev.txt -r requirements/ray.txt
    step "magrpo itself" "$online" "${pip[@]}" --no-build-isolation -e .
    step "check that everything loads" \
        "The packages are installed but do not load; delete .venv and run this again. If it stays: open an issue with $LOG." \
        .venv/bin/python -c 'import torch, triton, transformers, peft, vllm, prefect, mlflow'
    digest "$build" >"$STAMP"
}

[[ ${BASH_SOURCE[0]} != "$0" ]] || main

# Sourced by scripts/quickstart and scripts/test. Makes the virtual environment if there is none, installs the
# checkout into it if pyproject.toml or constraints.txt changed, and leaves its folder in $venv.
#
#   SSDTRAIN_VENV   the folder; default: .venv in the checkout
#   PYTHON          the interpreter that makes it; default: the first of python3, python3.14, ... that is new enough

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SSDTRAIN_VENV:-$root/.venv}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate found candidates=(python3 python3.14 python3.13 python3.12 python3.11)
    [[ -n ${PYTHON:-} ]] && candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    found=$("${candidates[0]}" --version 2>/dev/null) || found="not there"
    echo "error: ssdtrain needs Python 3.11 or newer, and ${candidates[0]} is $found;" \
        "install one and name it: PYTHON=/path/to/python3.12 $0" >&2
    return 1
}

make_venv() {
    local python clear=()
    # An interpreter that was updated or removed leaves an environment that cannot start.
    if [[ -e $venv/pyvenv.cfg ]] && new_enough "$venv/bin/python"; then
        return
    fi
    python=$(find_python) || return
    echo "making $venv with $("$python" --version)" >&2
    # Clear only what is an environment already: the folder is the user's choice.
    [[ -e $venv/pyvenv.cfg ]] && clear=(--clear)
    if ! "$python" -m venv "${clear[@]}" "$venv"; then
        echo "error: '$python -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2
        return 1
    fi
}

install_checkout() {
    local stamp="$venv/.ssdtrain-installed" state
    state="$root $(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)"
    if [[ -e $stamp && $(<"$stamp") == "$state" ]]; then
        return
    fi
    echo "installing into $venv (a few minutes the first time)" >&2
    # Everything that the tests and examples need; the pins make the same environment every time.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$root/constraints.txt" --editable "$root[test]" || return
    echo "$state" >"$stamp"
}

make_venv && install_checkout || exit 1

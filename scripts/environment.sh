# Sourced by the launchers. Finds Python, setting up .venv if it is missing, and takes `-p NAME`, which names a file of
# scripts/platforms/, out of the arguments.
#
#   root, python       the repository, the interpreter
#   platform_options   options of the platform's file; the user's options come later and so override them
#   passed             the other arguments
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

python=${PYTHON:-$root/.venv/bin/python}
# If the Python under .venv was upgraded or removed, no package can be found any more, not even pip.
ready() { [ -e "$root/.venv/.ready" ] && "$python" -c 'import pip' >/dev/null 2>&1; }
[ -n "${PYTHON:-}" ] || ready || bash "$root/scripts/setup.sh" run || exit
command -v "$python" >/dev/null || fail "there is no Python at $python: correct PYTHON, or unset it for our own environment"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

platform_options=()
passed=()
while [ $# -gt 0 ]; do
    case $1 in
        --platform=*) set -- --platform "${1#*=}" "${@:2}" ;;
        -p|--platform)
            file=$root/scripts/platforms/${2:-}.sh
            [[ -n ${2:-} && $2 != */* && -f $file ]] ||
                fail "there is no platform '${2:-}'; there are: $(cd "$root/scripts/platforms" && ls | sed 's/\.sh$//' | paste -sd ' ')"
            # shellcheck source=/dev/null
            . "$file"
            shift 2 ;;
        *) passed+=("$1"); shift ;;
    esac
done

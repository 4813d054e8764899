#!/usr/bin/env bash
# Train on several GPUs of this machine, or in several processes on a machine without one (Horovod: NCCL or Gloo).
#
#   scripts/dgx1_8gpu.sh [-n PROCESSES] [-b BATCH] [-e EPOCHS] [any option of python -m train]
#
#   -n  processes, one for each GPU                                  (default: 8)
#   -b  images per process in one forward pass, --batch-size         (default: the preset's)
#   -e  epochs, --epochs                                             (default: the preset's)
#   -h  this help; python -m train train --help lists all further options
#
# The learning rate is given for a global batch of 256 images; the program scales it with PROCESSES x BATCH.
# PYTHON=/path/to/python uses that environment instead of .venv. Example, two processes on a CPU:
#
#   scripts/dgx1_8gpu.sh -n 2 -b 16 -e 8 --config cpu_sample
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { printf 'error: %s\n' "$*" >&2; exit 2; }
check_count() { [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1 needs a whole number above 0, not '$2'"; }

processes=8
passed=()
while [ $# -gt 0 ]; do
    case $1 in
        -n|-b|-e)
            [ $# -ge 2 ] || fail "$1 needs a number behind it (scripts/dgx1_8gpu.sh -h)"
            check_count "$1" "$2"
            case $1 in
                -n) processes=$2 ;;
                -b) passed+=(--batch-size "$2") ;;
                -e) passed+=(--epochs "$2") ;;
            esac
            shift 2 ;;
        -h|--help) sed -n '2,/^set /s/^# \?//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) passed+=("$1"); shift ;;
    esac
done

python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || fail "there is no Python at $python: run make setup, or set PYTHON"

cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
for name in OMP_NUM_THREADS PYTHONPATH; do
    printf '%s=%s\n' "$name" "${!name}"
done
printf 'python -m train.launch %s' "$processes"
printf ' %q' ${passed[@]+"${passed[@]}"}
printf '\n'
exec "$python" -m train.launch "$processes" ${passed[@]+"${passed[@]}"}

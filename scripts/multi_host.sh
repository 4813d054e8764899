#!/usr/bin/env bash
# Train on the GPUs of several machines: horovodrun starts the processes over ssh (Gloo to agree, NCCL for the gradients).
#
#   scripts/multi_host.sh -H HOST:GPUS,HOST:GPUS... [-b BATCH] [-e EPOCHS] [-p PLATFORM] [any option of python -m train]
#   scripts/multi_host.sh --host-discovery-script FILE --min-np N [...]      elastic: machines may come and go
#
#   -H        machines and how many processes each gets; inside a SLURM job: its machines, with as many as GPUs
#   -n        processes                                              (default: all of -H)
#   -b, -e    as in scripts/dgx1_8gpu.sh -h
#   --network-interface NAMES, --ssh-port PORT, --max-np N, --blacklist-cooldown-range LOW HIGH: as in horovodrun --help
#
# Needed: this folder and its .venv at the same path on every machine, the data too, and ssh without a password. FILE prints
# one line HOST:GPUS for each machine that is there; Horovod asks it every second.
set -euo pipefail
if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then sed -n '2,/^set /s/^# \?//p' "${BASH_SOURCE[0]}"; exit 0; fi
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

hosts='' processes='' elastic=''
run=()      # options of horovodrun
options=()  # of python -m train
set -- ${platform_options[@]+"${platform_options[@]}"} ${passed[@]+"${passed[@]}"}
while [ $# -gt 0 ]; do
    case $1 in
        -H|-n|--host-discovery-script|--min-np|--max-np|--network-interface|--ssh-port)
            [ $# -ge 2 ] || fail "$1 needs a value behind it (scripts/multi_host.sh -h)" ;;&
        -H) hosts=$2; shift 2 ;;
        -n) processes=$2; shift 2 ;;
        --host-discovery-script) elastic=$2; run+=("$1" "$2"); shift 2 ;;
        --min-np|--max-np|--network-interface|--ssh-port) run+=("$1" "$2"); shift 2 ;;
        --blacklist-cooldown-range)
            [ $# -ge 3 ] || fail "$1 needs two values behind it (scripts/multi_host.sh -h)"
            run+=("$1" "$2" "$3"); shift 3 ;;
        *) options+=("$1"); shift ;;
    esac
done

if [ -z "$elastic" ]; then
    if [ -z "$hosts" ] && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
        hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:${SLURM_GPUS_ON_NODE:-8}/" | paste -sd ,)
    fi
    [ -n "$hosts" ] || fail "which machines? give -H HOST:GPUS,HOST:GPUS or run inside a SLURM job"
    [[ $hosts =~ ^[^:,]+:[1-9][0-9]*(,[^:,]+:[1-9][0-9]*)*$ ]] || fail "-H needs HOST:GPUS,HOST:GPUS..., not '$hosts'"
    : "${processes:=$(tr , '\n' <<<"$hosts" | awk -F: '{ sum += $2 } END { print sum }')}"
    run+=(-H "$hosts")
else
    [ -x "$elastic" ] || fail "the host discovery script $elastic is not there or not executable; make it print HOST:GPUS lines"
    : "${processes:=$("$elastic" | awk -F: '{ sum += $2 } END { print sum }')}"
fi
[[ $processes =~ ^[1-9][0-9]*$ ]] || fail "-n needs a whole number above 0, not '$processes'"

export RESNET_LAUNCHER; RESNET_LAUNCHER="scripts/multi_host.sh$(printf ' %q' -n "$processes" "${run[@]}")"
command=("$(command -v "$python")" -m train.launch ${options[@]+"${options[@]}"})
printf 'horovodrun --gloo -np %s' "$processes"; printf ' %q' "${run[@]}" "${command[@]}"; printf '\n'
exec "$python" -c '
import sys
from horovod.runner.launch import run_commandline
try:
    run_commandline()
except RuntimeError as error:  # a process failed; it has said why
    sys.exit("error: " + " ".join(str(error).split()))' --gloo -np "$processes" "${run[@]}" "${command[@]}"

#!/usr/bin/env bash
# Train on the GPUs of several machines; -h tells more (train/processes/multi_host.py does it all).
#
#   scripts/multi_host.sh -H HOST:GPUS,HOST:GPUS... [-b BATCH] [-e EPOCHS] [-p PLATFORM] [any option of python -m train]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$python" -m train.processes.multi_host ${platform_options[@]+"${platform_options[@]}"} ${passed[@]+"${passed[@]}"}

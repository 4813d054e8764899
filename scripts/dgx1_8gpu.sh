#!/usr/bin/env bash
# Train on 1 to 8 GPUs of this machine, or in several processes without one; -h tells more (train/processes/launch.py does it all).
#
#   scripts/dgx1_8gpu.sh [-n PROCESSES] [-b BATCH] [-e EPOCHS] [-p PLATFORM] [any option of python -m train]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$python" -m train.processes.launch ${platform_options[@]+"${platform_options[@]}"} ${passed[@]+"${passed[@]}"}

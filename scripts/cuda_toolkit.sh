#!/usr/bin/env bash
# Print the folder of the CUDA toolkit of the nvcc on PATH, which may be a link or a wrapper script; it knows best.
set -euo pipefail
command -v nvcc >/dev/null || { printf 'error: there is no nvcc on PATH: install the CUDA toolkit\n' >&2; exit 2; }
realpath "$(nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')"

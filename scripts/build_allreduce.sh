#!/usr/bin/env bash
# Compile train/allreduce.cc against the Horovod that PYTHON imports: build_allreduce.sh PYTHON HOROVOD_SOURCE
#
# HOROVOD_SOURCE is the unpacked source of the same Horovod, whose headers are needed (make setup leaves it in .venv).
# Needs g++, and where Horovod was built for GPUs the headers and the static runtime of CUDA, beside nvcc. make setup does
# this after it has built Horovod.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }
[ $# = 2 ] || fail "usage: scripts/build_allreduce.sh PYTHON HOROVOD_SOURCE"
python=$1 source=$2

mapfile -t found < <(PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$python" -W ignore -c '
import common.mxnet_compat, horovod.mxnet as hvd
print(hvd.__path__[0], int(bool(hvd.nccl_built())), sep="\n")')
[ ${#found[@]} = 2 ] || fail "$python cannot import horovod.mxnet: run make setup"
folder=${found[0]} gpu=${found[1]}
[ -e "$source/horovod/common/operations.h" ] || fail "$source does not hold the source of Horovod"

cuda=()
if [ "$gpu" = 1 ]; then
    top=$(bash "$root/scripts/cuda_toolkit.sh")
    library=$(find -L "$top/lib64" "$top/targets" -name libcudart_static.a 2>/dev/null | head -n1)
    [ -n "$library" ] || fail "there is no libcudart_static.a in $top: install the CUDA toolkit"
    include=$(dirname "$(find -L "$top/include" "$top/targets" -name cuda_runtime.h 2>/dev/null | head -n1)")
    # CUDA's runtime of its own, hidden: MXNet's is another version.
    cuda=(-DHAVE_CUDA=1 -DHAVE_GPU=1 "-I$include" "$library" -Wl,--exclude-libs,ALL -ldl -lrt -lpthread)
fi
library=$(cd "$folder" && ls mpi_lib*.so) || fail "$folder does not hold Horovod's library"
g++ -std=c++17 -O2 -fPIC -shared -s -Wl,-Bsymbolic "$root/train/allreduce.cc" "-I$source" -o "$folder/bucket_allreduce.so" \
    "-L$folder" "-l:$library" '-Wl,-rpath,$ORIGIN' ${cuda[@]+"${cuda[@]}"}
printf '%s\n' "$folder/bucket_allreduce.so"

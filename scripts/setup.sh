#!/usr/bin/env bash
# Set up the environment that everything runs in: setup.sh [VENV]   (default: .venv beside the Makefile)
#
#   1. a virtual environment of Python 3.10 to 3.12
#   2. the project with its dependencies: extras `gpu` where there is an NVIDIA GPU, `cpu` elsewhere, and `dev`
#   3. with a GPU: the CUDA 11 libraries that MXNet links (scripts/link_cuda11.py)
#   4. Horovod, compiled against that MXNet, and train/allreduce.cc against that Horovod (need g++, and nvcc for GPUs;
#      without them one process still does everything)
#
# Each finished step leaves its mark in VENV, so that a second call does nothing and an interrupted one goes on; what its
# programs said is in VENV/setup-STEP.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv}
bin=$venv/bin
horovod=0.28.1
source=$venv/horovod-$horovod

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

find_python() {
    local name
    for name in python3.12 python3.11 python3.10 python3 python; do
        if "$name" -c 'import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
        then command -v "$name"; return; fi
    done
    return 1
}

[[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]] && kind=gpu || kind=cpu
# Where NVIDIA's own installer puts nvcc, which it leaves to the user to add to PATH.
command -v nvcc >/dev/null || export PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin

if ! "$bin/python" -m pip --version >/dev/null 2>&1; then
    # What is removed is an unfinished environment, and nothing else that VENV may name.
    [ ! -e "$venv" ] || [ -e "$venv/pyvenv.cfg" ] || rmdir "$venv" 2>/dev/null ||
        fail "$venv is there and is no virtual environment: remove it, or name another place"
    python=$(find_python) || fail "no Python 3.10, 3.11 or 3.12 with venv and pip on PATH; install one (Debian: apt install python3-venv) and run make again"
    say "new environment in $venv from $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

# step NAME CONTENT COMMAND...: run COMMAND unless the mark NAME says that it was already done for the same CONTENT.
step() {
    local mark=$venv/.done-$1 content=$2
    log=$venv/setup-$1.log
    shift 2
    if [ "$(cat "$mark" 2>/dev/null)" != "$content" ]; then
        "$@" || return
        printf '%s\n' "$content" >"$mark"
    fi
}

# What went wrong, from the log of the last step: its first error, or else its last line.
reason() { printf %.300s "$(grep -m1 -oE 'ERROR: .*|CMake Error.*|[^/ ]+: (fatal )?error: .*' "$log" || tail -n1 "$log")"; }

install_packages() {
    local other
    say "packages for a machine with $([ $kind = gpu ] && echo 'an NVIDIA GPU' || echo 'no GPU') (log: $log)"
    # The CPU and the GPU wheel of MXNet own the same folder: only one of them can be there.
    other=$([ $kind = gpu ] && echo mxnet || echo mxnet-cu117)
    "$bin/pip" uninstall -q -y "$other" >"$log" 2>&1 || true
    # Horovod's build tools: its CMake files need cmake < 4, and it compiles against the MXNet that is installed here.
    "$bin/pip" install -q --disable-pip-version-check 'cmake<4' wheel cloudpickle pyyaml packaging cffi \
        -e ".[$kind,onnx,dev]" >>"$log" 2>&1 || fail "pip could not install the packages: $(reason) (log: $log)"
    [ $kind = cpu ] || "$bin/python" scripts/link_cuda11.py || exit
}

unpack_horovod() {
    "$bin/pip" download -q --disable-pip-version-check --no-deps --no-build-isolation --no-binary horovod -d "$venv" \
        "horovod==$horovod" >"$log" 2>&1 || return
    rm -rf "$source"
    tar -xzf "$venv/horovod-$horovod.tar.gz" -C "$venv" || return
    # Headers that other headers of g++ brought along until 13 (cstdint: until 15), and an assignment to a constant, which
    # g++ overlooked until 14.
    sed -i '1i #include <stdexcept>' "$source/horovod/common/common.h"
    sed -i '1i #include <string>' "$source/horovod/common/group_table.h"
    sed -i '1i #include <cstdint>' "$source/third_party/gloo/gloo/types.h"
    sed -i 's/const size_type count_;/size_type count_;/' "$source/third_party/flatbuffers/include/flatbuffers/stl_emulation.h"
    # A name that is still read after the operation may have ended and freed it: with one process this crashed often.
    sed -i 's/ops_param->op_names\[0\]/std::string(ops_param->op_names[0])/' "$source/horovod/mxnet/mpi_ops.cc"
}

build_horovod() {
    say "Horovod, compiled here: one to four minutes"
    export HOROVOD_WITH_MXNET=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_GLOO=1
    export HOROVOD_CPU_OPERATIONS=GLOO
    # -s drops symbols that would make the library ten times larger.
    export LDFLAGS=-s MAKEFLAGS=-j$(nproc)
    if [ $kind = gpu ]; then
        local nccl
        nccl=$("$bin/python" -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])')
        ln -sf libnccl.so.2 "$nccl/lib/libnccl.so"
        export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_HOME=$nccl HOROVOD_NCCL_LINK=SHARED HOROVOD_WITHOUT_NVTX=1
        export HOROVOD_CUDA_HOME; HOROVOD_CUDA_HOME=$(bash scripts/cuda_toolkit.sh)
    fi
    rm -rf "$source/build"
    PATH=$(realpath "$bin"):$PATH "$bin/pip" install -q --disable-pip-version-check --no-build-isolation --no-deps \
        --force-reinstall "$(realpath "$source")" >"$log" 2>&1 && rm -rf "$source/build"
}

build_allreduce() {
    bash scripts/build_allreduce.sh "$bin/python" "$source" >"$log" 2>&1
}

step packages "$kind $(cksum <pyproject.toml)" install_packages
if ! command -v g++ >/dev/null; then
    say "no g++, so no Horovod: everything but several processes works; install g++ and run make setup for those"
elif [ $kind = gpu ] && ! command -v nvcc >/dev/null; then
    say "no nvcc, so no Horovod: everything but several GPUs works; install the CUDA toolkit and run make setup for those"
else
    version="$kind horovod $horovod $(declare -f unpack_horovod build_horovod | cksum)"
    if step source "$version" unpack_horovod && step horovod "$version" build_horovod; then
        step allreduce "$version $(cksum <train/allreduce.cc)" build_allreduce ||
            say "train/allreduce.cc did not build: $(reason) (log: $log); everything but several GPUs works"
    else
        say "Horovod did not build: $(reason) (log: $log); everything but several processes works"
    fi
fi
touch "$venv/.ready"

#!/bin/sh
# Set up the environment that everything runs in: setup.sh [run|test|horovod|all] [VENV]   (default: all of .venv)
#
#   run       a virtual environment of Python 3.10 to 3.14 with the project and the packages for a single process: extra
#             `cpu`; or, with an NVIDIA GPU, extra `gpu` and the CUDA 11 libraries that MXNet links
#             (scripts/link_cuda11.py, needs g++)
#   test      run, and the extras `onnx` and `dev`
#   horovod   run, and a compiled Horovod for several processes (scripts/build_horovod.py, needs g++)
#
# Each finished step leaves a mark in VENV, so a second call does nothing, and a call after an interruption resumes. The
# output of a step's programs is in VENV/setup-STEP.log.

# These lines work in any shell, because a system without glibc often has no bash. The rest needs bash.
case $(ldd --version 2>&1) in
    *musl*)
        printf 'error: %s\n' "this system's C library is musl (Alpine), for which MXNet and DALI have no packages: take an \
image or a system with glibc, such as Debian 12, or build the container (docker build -t resnet .; docs/setup.md)" >&2
        exit 2 ;;
esac
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set +o posix  # bash is in posix mode if it was called as sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
part=all
case ${1:-} in run|test|horovod|all) part=$1; shift ;; esac
venv=${1:-.venv}
bin=$venv/bin
MIN_DRIVER=525.60      # for CUDA 12
MIN_CAPABILITY=7.5     # as in graph_passes/executors/cuda/device.py
MIN_GLIBC=2.28         # required by DALI's wheel and others
OS_RELEASE=${OS_RELEASE:-/etc/os-release}  # tests override it

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }
at_least() { [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n1)" = "$2" ]; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

is_supported() {
    local version
    version=$(version_of "$1") && at_least "$version" 3.10 && ! at_least "$version" 3.15
}

find_python() {
    local name
    for name in python3.12 python3.11 python3.10 python3.13 python3.14 python3 python; do  # the most tested version first
        if is_supported "$name" && "$name" -c 'import ensurepip, venv' 2>/dev/null
        then command -v "$name"; return; fi
    done
    return 1
}

# Describes the unsuitable Pythons that were found, and how to install a suitable one on this system.
why_no_python() {
    local ID='' ID_LIKE='' VERSION_ID='' found apt="run as root 'apt update && apt install python3-venv'"
    local uv="run 'uv python install 3.12' (https://docs.astral.sh/uv has uv, for any Linux)"
    found=$(python3 --version 2>/dev/null) && found=", only $found" || found=''
    ! is_supported python3 || found+=" without them"
    # shellcheck source=/dev/null
    [ ! -r "$OS_RELEASE" ] || . "$OS_RELEASE"
    printf 'no Python 3.10 to 3.14 with venv and pip on PATH%s: ' "$found"
    case "$ID-$VERSION_ID $ID_LIKE" in
        debian-1[23]*|ubuntu-2[2-5]*|ubuntu-26.04*) echo "$apt" ;;  # their own python3 is 3.10 to 3.14
        fedora-*) echo "run as root 'dnf install python3.14'" ;;    # beside its own python3, of any version
        *rhel*|*centos*) echo "run as root 'dnf install python3.12'" ;;
        *debian*|*ubuntu*) if is_supported python3; then echo "$apt"; else echo "$uv"; fi ;;
        *) echo "$uv" ;;
    esac
}

require_glibc() {
    local version
    version=$(ldd --version 2>/dev/null | sed -nE '1s/.* ([0-9]+\.[0-9]+)$/\1/p') || true
    [ -z "$version" ] || at_least "$version" $MIN_GLIBC ||
        fail "this system's C library is glibc $version, the packages need $MIN_GLIBC or newer: take a newer system" \
            "(Debian 10, Ubuntu 20.04, RHEL 8 or later), or build the container (docker build -t resnet .;" \
            "docs/setup.md)"
}

# Sets `kind` to gpu or cpu, and prints why if a GPU is not used. SETUP_FOR sets the kind if another machine will run
# the environment, as for a container.
find_kind() {
    local found driver capability name query=driver_version,compute_cap,name
    kind=${SETUP_FOR:-cpu}
    case ${SETUP_FOR:-} in
        gpu|cpu) return ;;
        ?*) fail "SETUP_FOR is '$SETUP_FOR': give gpu or cpu, or unset it to let this machine decide" ;;
    esac
    command -v nvidia-smi >/dev/null || return 0
    if ! found=$(nvidia-smi --query-gpu=$query --format=csv,noheader 2>&1) || [[ $found != *,* ]]; then
        say "nvidia-smi finds no GPU ($(printf %.200s "$(tail -n1 <<<"$found")")): packages for the CPU"
        return 0
    fi
    IFS=, read -r driver capability name <<<"$(sort -t, -k2 -Vr <<<"$found" | head -n1)"
    capability=${capability// } name=${name# }
    if ! at_least "$driver" $MIN_DRIVER; then
        say "the NVIDIA driver $driver is too old for CUDA 12: update it to $MIN_DRIVER or newer and run make again" \
            "for the $name; until then packages for the CPU"
    elif ! at_least "$capability" $MIN_CAPABILITY; then
        say "the $name (compute capability $capability) is older than $MIN_CAPABILITY, which cuDNN 9 needs:" \
            "packages for the CPU"
    else
        kind=gpu
    fi
}

# step NAME CONTENT COMMAND...: run COMMAND, unless the mark NAME records that it was done for this CONTENT.
step() {
    local mark=$venv/.done-$1 content=$2
    log=$venv/setup-$1.log
    shift 2
    if [ "$(cat "$mark" 2>/dev/null)" != "$content" ]; then
        rm -f "$mark"
        : >"$log" || fail "$venv cannot be written: $(full_disk || echo "make it writable, or remove it")"
        "$@" || return
        printf '%s\n' "$content" >"$mark"
    fi
}

# follow WHAT COMMAND...: run COMMAND with its output in the log, and show its progress meanwhile: on a terminal in one
# changing line, otherwise every ten seconds.
follow() {
    local what=$1 watcher status=0
    shift
    show_progress "$what" &
    watcher=$!
    "$@" >>"$log" 2>&1 || status=$?
    kill $watcher 2>/dev/null
    wait $watcher 2>/dev/null || true
    [ ! -t 1 ] || printf '\r\033[K'
    return $status
}

show_progress() {
    local begin=$SECONDS every=10 line
    local words='Collecting|Download|Installing|Building|Prepar|download|compil|WARNING: Retry'
    [ ! -t 1 ] || every=1
    while kill -0 $$ 2>/dev/null; do  # Ctrl-C ends the script, but not its background jobs
        read -rt $every <> <(:) || true  # sleeps without a process, so that none is left over if this is killed
        line=$(tail -c 3000 "$log" | grep -aoE "^ *($words).*" | tail -n1 | sed -E \
               's/^ *//; s/-(py[23]|cp3)[^ ]*\.whl//; s/ \(from .*//; s/(Installing collected packages):.*/\1/')
        line=$(printf '%s %d:%02d  %.70s' "$what" $(((SECONDS - begin) / 60)) $(((SECONDS - begin) % 60)) "$line")
        if [ -t 1 ]; then printf '\r\033[Ksetup: %s' "$line"; else say "$line"; fi
    done
}

# Prints the error of the last step from its log, with the remedy.
reason() {
    local line
    if full_disk; then return; fi
    case $(cat "$log" 2>/dev/null) in
        *"No space left on device"*) echo "the disk became full; free some space and run make again" ;;
        *ProxyError*|*"Unable to connect to proxy"*|*"Cannot connect to proxy"*|*"Tunnel connection failed"*)
            echo "the proxy ${HTTPS_PROXY:-${https_proxy:-of the settings}} refuses; correct HTTPS_PROXY and run make" \
                "again" ;;
        *NewConnectionError*|*NameResolutionError*|*ConnectTimeout*|*"is unreachable"*|*"Read timed out"*|\
        *"Connection reset"*)
            echo "the package index cannot be reached; connect to the network (through a proxy: HTTPS_PROXY; to a" \
                "mirror: PIP_INDEX_URL) and run make again" ;;
        *)
            line=$(grep -m1 -oE '^error: .*|ERROR: .*|[^/ ]+: (fatal )?error: .*' "$log") || line=$(tail -n1 "$log")
            printf '%.300s' "${line#error: }" ;;
    esac
}

# Reports if one of the needed disks is full.
full_disk() {
    local folder
    for folder in "$venv" "${TMPDIR:-/tmp}"; do
        if [ "$(free_bytes "$folder")" -lt 10000000 ]; then
            echo "the disk with $folder is full; free some space and run make again"
            return
        fi
    done
    return 1
}

free_bytes() { df -B1 --output=avail "$1" | tail -n1; }

make_environment() {
    local python said
    # Removes only an unfinished environment, not another folder that VENV may name.
    [ ! -e "$venv" ] || [ -e "$venv/pyvenv.cfg" ] || rmdir "$venv" 2>/dev/null ||
        fail "$venv exists and is not a virtual environment: remove it, or name another place"
    python=$(find_python) || fail "$(why_no_python), then make again"
    [ ! -e "$venv/.done-packages" ] || say "the Python of $venv was removed or replaced since it was made"
    { rm -rf "$venv" && mkdir -p "$venv"; } 2>/dev/null ||
        fail "$(realpath -m "$venv") cannot be written: clone the project into a folder of your own, or run" \
            "scripts/setup.sh all FOLDER and then, in a folder of your own, FOLDER/bin/python -m train"
    say "new environment in $venv from $("$python" --version)"
    said=$("$python" -m venv "$venv" 2>&1) || fail "$python -m venv $venv failed: $(full_disk || tail -n1 <<<"$said")"
}

install() {
    # Modules are compiled at their first import, because few of them are ever imported. pip's warning about MXNet's
    # version conflict (see below) is suppressed, because it would be taken for the error.
    follow packages "$bin/pip" install --disable-pip-version-check --retries 3 --no-compile --no-warn-conflicts "$@" ||
        fail "the packages could not be installed: $(reason) (log: $log)"
}

# install_packages EXTRAS: the project with its dependencies.
install_packages() {
    local wanted='no GPU' gigabytes=2 mxnet=mxnet other=mxnet-cu117 free
    [ $kind = cpu ] || { wanted='an NVIDIA GPU' gigabytes=6 mxnet=mxnet-cu117 other=mxnet; }
    say "packages for a machine with $wanted (log: $log)"
    free=$(free_bytes "$venv")
    [ $((free + $(du -sB1 "$venv" | cut -f1))) -gt $((gigabytes * 1000000000)) ] ||
        fail "the disk with $(realpath "$venv") has $((free / 1000000)) MB free, the packages need $gigabytes GB:" \
            "free some space and run make again"
    rm -f "$venv"/.ready*
    # MXNet's CPU and GPU wheels install into one folder, so only one of them can be installed.
    if compgen -G "$venv/lib/python3*/site-packages/${other//-/_}-1*" >/dev/null; then
        "$bin/pip" uninstall -q -y "$other" >>"$log" 2>&1 || true
    fi
    # The project's name before version 1.0; its hook ran any package called `common`.
    if compgen -G "$venv/lib/python3*/site-packages/resnet50_mxnet-*" >/dev/null; then
        "$bin/pip" uninstall -q -y resnet50-mxnet >>"$log" 2>&1 || true
    fi
    install -e ".[$1]"
    # From Python 3.13 on the extras do not include MXNet: it declares numpy<2, which pip would enforce (pyproject.toml).
    ! at_least "$(version_of "$bin/python")" 3.13 || install --no-deps "$mxnet==1.9.1"
    require_libraries
    if [ $kind = gpu ]; then
        follow "CUDA 11" "$bin/python" scripts/link_cuda11.py ||
            fail "MXNet's libraries could not be linked: $(reason) (log: $log)"
    fi
}

# Checks the compiler's runtime libraries, which MXNet's wheel takes from the system. CUDA's libraries come with the
# driver and with pip packages.
require_libraries() {
    local missing
    missing=$(ldd "$venv"/lib/python3*/site-packages/mxnet/libmxnet.so 2>/dev/null |
        sed -nE 's/^\s*(lib(gomp|quadmath|stdc\+\+|gcc_s)\.so\S*) => not found.*/\1/p' | sort -u) || true
    [ -z "$missing" ] || fail "MXNet needs ${missing//$'\n'/ and }, which this machine lacks: install the compiler's" \
        "runtime (Debian, Ubuntu: apt install libgomp1 libquadmath0; Fedora: dnf install libgomp libquadmath) and" \
        "run make again"
}

build_horovod() {
    say "Horovod for several processes, compiled once: one to three minutes (log: $log)"
    follow Horovod "$bin/python" scripts/build_horovod.py "$venv/horovod" ||
        fail "Horovod could not be built: $(reason) (log: $log); everything but several processes works without"
}

trap 'printf "\nerror: interrupted; make resumes where it was\n" >&2; exit 130' INT TERM
find_kind
# Only one setup may run at a time, because creating the environment removes an unfinished one. The lock is on this
# script, which always exists and can be read. If the file system does not support locks, setup runs without one.
if command -v flock >/dev/null; then
    exec {lock}<scripts/setup.sh
    flock -n "$lock" || { say "waiting for another set-up of $venv"; flock "$lock" || true; }
fi
require_glibc
"$bin/python" -m pip --version >/dev/null 2>&1 || make_environment
is_supported "$bin/python" || fail "$venv is of $("$bin/python" --version), the packages need Python 3.10 to 3.14:" \
    "remove it, or name another place, and run make again"

packages="$kind $(cat pyproject.toml common/mxnet_hook.pth common/mxnet_hook.py scripts/link_cuda11.py | cksum)"
if [ $part = test ] || [ $part = all ]; then
    step test "$packages" install_packages "$kind,onnx,dev"
    printf '%s\n' "$packages" >"$venv/.done-packages"
    touch "$venv/.ready-test"
fi
step packages "$packages" install_packages "$kind"
touch "$venv/.ready"
if [ $part = horovod ] || [ $part = all ]; then
    step horovod "$kind $(cat scripts/build_horovod.py train/processes/allreduce.cc | cksum)" build_horovod
    touch "$venv/.ready-horovod"
fi

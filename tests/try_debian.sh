#!/usr/bin/env bash
# Both commands of the README on a Debian where nothing was prepared; run by hand, as root, where debootstrap is installed:
# tests/try_debian.sh SUITE FOLDER [COMMAND...]    (SUITE: bookworm, trixie, ...)
#
# FOLDER/root becomes a Debian with python3, python3-venv, make and g++ alone, once. Each call gives an ordinary user in it
# an empty home with a copy of the last commit, an environment that has only what package clients need to reach their
# registry, and runs COMMANDs there, which are `make train-1gpu` and `make test` where none are given. What they say is in
# FOLDER/COMMAND.log.
set -euo pipefail
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

[ $# -ge 2 ] || fail "usage: tests/try_debian.sh SUITE FOLDER [COMMAND...]"
[ "$(id -u)" = 0 ] || fail "debootstrap and chroot are for root: sudo tests/try_debian.sh $*"
command -v debootstrap >/dev/null || fail "there is no debootstrap: apt install debootstrap"
# What is mounted and started is seen by this script alone, and gone with it, however it ends.
[ -n "${TRY_DEBIAN:-}" ] || TRY_DEBIAN=1 exec unshare --mount --pid --fork --kill-child bash "$0" "$@"

suite=$1 folder=$(realpath -m "$2")
shift 2
[ $# -gt 0 ] || set -- "make train-1gpu" "make test"
root=$folder/root
home=/home/newcomer

if [ ! -e "$folder/.made-$suite" ]; then
    [ ! -e "$root" ] || fail "$root is there and is no finished $suite: remove it, or name another folder"
    mkdir -p "$folder"
    echo "== debootstrap $suite (log: $folder/debootstrap.log)"
    debootstrap --variant=minbase --include=python3,python3-venv,make,g++ "$suite" "$root" >"$folder/debootstrap.log" ||
        fail "debootstrap failed: $(tail -n1 "$folder/debootstrap.log")"
    chroot "$root" useradd "${home##*/}"
    touch "$folder/.made-$suite"
fi

mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"  # of this script's processes
for shared in sys dev; do mount --rbind "/$shared" "$root/$shared"; done
cp -L /etc/resolv.conf "$root/etc/resolv.conf"
echo "127.0.0.1 localhost $(uname -n)" >"$root/etc/hosts"  # as the installer does

rm -rf --one-file-system "${root:?}$home"
mkdir -p "$root$home/project"
git -C "$(dirname "$0")/.." archive HEAD | tar -x -C "$root$home/project"
chroot "$root" chown -R "${home##*/}:" "$home"

clients=()
for name in $(compgen -e); do
    case ${name,,} in
        pip_*|*_proxy|ssl_cert_*|requests_ca_bundle) clients+=("$name=${!name}") ;;
        *) continue ;;
    esac
    if [[ -f ${!name} ]]; then install -D -m 644 "${!name}" "$root${!name}"; fi  # certificates
done

status=0
for command in "$@"; do
    log=${command//[^[:alnum:]-]/_}
    log=$folder/${log:0:60}.log
    echo "== $command (log: $log)"
    begin=$SECONDS code=0
    chroot --userspec="${home##*/}" "$root" /usr/bin/env -i HOME=$home PATH=/usr/bin:/bin "${clients[@]}" \
        /bin/sh -c "cd $home/project && $command" >"$log" 2>&1 </dev/null || code=$? status=1
    tail -n 12 "$log"
    echo "== $command: exit code $code, $((SECONDS - begin)) s"
done
exit $status

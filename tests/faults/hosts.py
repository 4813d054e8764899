"""Hosts on this machine, to break the network between them: each has its own processes, name, address, /etc/hosts,
cores and sshd, and a cable to a common switch. They share this machine's files.

A host is a set of Linux namespaces (net, pid, uts, mount, ipc). The switch is a thread here that passes Ethernet frames
between TAP devices; it loses, delays and slows down frames, which tc's netem would do, but not every kernel has that.
Hosts need root and a few programs: `missing` says which.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

TUN = Path("/dev/net/tun")
PROGRAMS = ("bash", "sshd", "ssh", "ssh-keygen", "ip", "mount", "unshare", "nsenter")
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
LARGEST_FRAME = 65536  # bytes
LONGEST_QUEUE = 1.0  # seconds; a slow cable loses frames that would wait for longer
SUBNET = "10.77.0"
NAMESPACES = ("--net", "--pid", "--uts", "--mount", "--ipc")


def missing() -> str:
    """The reason, in words, why this machine cannot simulate hosts; "" if it can."""
    if os.getuid() != 0:
        return "hosts need root, for namespaces"
    if lacking := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"hosts need {', '.join(lacking)} (Debian: openssh-server, iproute2, util-linux)"
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as error:
        return f"hosts need {TUN}: {error.strerror}"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "--mount-proc", "true"], capture_output=True, text=True)
    return f"hosts need namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Cable:
    """A host's cable to the switch. Its faults act in both directions; no error is reported to either end."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor  # of the TAP device
        self.is_down = False
        self.loss = 0.0  # fraction of frames lost
        self.delay = 0.0  # seconds, each way
        self.rate = float("inf")  # bits per second, each way
        self._free_at = {"out": 0.0, "in": 0.0}

    def impair(self, loss: float = 0.0, delay: float = 0.0, rate: float = float("inf")) -> None:
        self.loss, self.delay, self.rate = loss, delay, rate

    def cross(self, direction: str, num_bytes: int, now: float) -> float | None:
        """The time at which a frame that is sent now arrives; None if it is lost."""
        begin = max(now, self._free_at[direction])
        if self.is_down or random.random() < self.loss or begin - now > LONGEST_QUEUE:
            return None
        self._free_at[direction] = begin + 8 * num_bytes / self.rate
        return self._free_at[direction] + self.delay


class Switch:
    """Passes frames from cable to cable, by the MAC addresses of their hosts."""

    def __init__(self) -> None:
        self.cables: dict[bytes, Cable] = {}
        self.lock = threading.Lock()  # held while cables are used, plugged in or pulled out
        self._is_on = True
        self._thread = threading.Thread(target=self._work, name="switch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_on = False
        self._thread.join()

    def _work(self) -> None:
        due: list[tuple[float, int, bytes, bytes]] = []  # a heap of frames on their way: time, order, target, frame
        order = itertools.count()
        while self._is_on:
            with self.lock:
                sources = {cable.descriptor: cable for cable in self.cables.values()}
            pause = min(0.02, max(0.0, due[0][0] - time.monotonic())) if due else 0.02
            with contextlib.suppress(OSError):  # a cable has just been pulled out
                select.select(sources, [], [], pause)
            with self.lock:
                now = time.monotonic()
                for source in self.cables.values():
                    for frame in _frames(source):
                        sent = source.cross("out", len(frame), now)
                        for mac, target in self.cables.items():
                            is_target = target is not source and (mac == frame[:6] or frame[0] & 1)  # 1: to all
                            if sent is None or not is_target:
                                continue
                            arrives = target.cross("in", len(frame), sent)
                            if arrives is not None:
                                heapq.heappush(due, (arrives, next(order), mac, frame))
                now = time.monotonic()
                while due and due[0][0] <= now:
                    _, _, mac, frame = heapq.heappop(due)
                    if cable := self.cables.get(mac):
                        with contextlib.suppress(OSError):  # the host is not up yet, or its queue is full
                            os.write(cable.descriptor, frame)


def _frames(cable: Cable, most: int = 32) -> Iterator[bytes]:
    """Frames that a host has sent, up to `most`."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(most):
            yield os.read(cable.descriptor, LARGEST_FRAME)


class Host:
    """A host of a `Network`, which creates it. It is off until `boot`."""

    def __init__(self, network: Network, name: str, number: int, cores: Sequence[int]) -> None:
        self.name, self.cores = name, cores
        self.address = f"{SUBNET}.{number}"
        self.covers: dict[Path, Path] = {}  # path -> what only this host finds there, from its next boot on
        self.key = network.key  # the private key of its ssh, from its next boot on
        self.cable: Cable
        self._network, self._mac = network, bytes((2, 0, 0, 0, 0, number))
        self._folder = network.folder / name
        self._folder.mkdir()
        self._holder: subprocess.Popen[str] | None = None  # the parent of `_first`, outside the host
        self._first = 0  # the id of the host's process 1

    def boot(self) -> None:
        """Switch the host on, and start its sshd."""
        assert self._holder is None
        self._write_settings()
        covers = "\n".join(f"mount --bind '{own}' '{path}'" for path, own in self.covers.items())
        # Process 1 is a shell, which reaps what others leave behind. It first waits for its network device.
        script = f"""
            set -e
            echo up; read -r _
            hostname {self.name}
            mount --bind {self._network.folder}/hosts /etc/hosts
            mount --bind {self._folder}/ssh_config /etc/ssh/ssh_config
            mount -t tmpfs none /run; mkdir /run/sshd
            {covers}
            ip link set lo up
            ip link set eth0 address {self._mac.hex(":")} up
            ip address add {self.address}/24 dev eth0
            {self._sshd}
            echo ready
            while read -r _; do :; done"""
        self._holder = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "bash", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, self.cores))
        assert self._holder.stdin and self._holder.stdout
        assert self._holder.stdout.readline() == "up\n"
        holder = self._holder.pid
        self._first = int(Path(f"/proc/{holder}/task/{holder}/children").read_text())
        descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        device = f"{self.name[:5]}{os.getpid()}"
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TAP | IFF_NO_PI))
        subprocess.run(["ip", "link", "set", device, "name", "eth0", "netns", str(self._first)], check=True)
        self._holder.stdin.write("\n")
        self._holder.stdin.flush()
        assert self._holder.stdout.readline() == "ready\n", f"{self.name} does not boot"
        with self._network.switch.lock:
            self.cable = self._network.switch.cables[self._mac] = Cable(descriptor)

    @property
    def _sshd(self) -> str:
        return f"{shutil.which('sshd')} -f {self._folder}/sshd_config -E {self._folder}/sshd.log"

    def _write_settings(self) -> None:
        (self._folder / "ssh_config").write_text(
            f"IdentityFile {self.key}\nIdentitiesOnly yes\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n")
        (self._folder / "sshd_config").write_text(
            f"HostKey {self._network.key}\nAuthorizedKeysFile {self._network.key}.pub\nStrictModes no\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\n")

    def switch_off(self) -> None:
        """End all processes and the network at once, so that nobody gets a last packet, as when the power fails."""
        if self._holder is None:
            return
        with self._network.switch.lock:
            cable = self._network.switch.cables.pop(self._mac, None)
        self._holder.kill()  # the kernel then kills its process 1, and all others with that one
        self._holder.communicate()
        wait_until(lambda: not _namespace(self._first), f"{self.name} is still on")
        if cable:
            os.close(cable.descriptor)
        self._holder = None

    def reboot(self) -> None:
        self.switch_off()
        self.boot()

    def run(self, *command: str | Path, check: bool = True) -> str:
        """The output of a command on this host."""
        done = subprocess.run([*self.enter, *map(str, command)], stdout=subprocess.PIPE, text=True, check=check)
        return done.stdout

    @property
    def enter(self) -> list[str]:
        """A command line to put before another one, which then runs on this host."""
        cores = ",".join(map(str, self.cores))
        return ["nsenter", *NAMESPACES, "--target", str(self._first), f"--wd={Path.cwd()}", "taskset", "--cpu-list",
                cores]

    def processes(self) -> dict[int, str]:
        """The host's processes by their ids outside it, each as its command line, without its process 1 and sshd.
        Empty if the host is off."""
        return {pid: words for pid, words in self._everything().items()
                if pid != self._first and not words.startswith(("sshd", self._sshd.split()[0]))}

    def _everything(self) -> dict[int, str]:
        own = _namespace(self._first)
        found: dict[int, str] = {}
        if not (self._holder and own):
            return found
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if words and _namespace(int(folder.name)) == own:  # those that have ended have no words
                    found[int(folder.name)] = words
        return found

    def kill(self, names: Callable[[str], bool] = lambda words: True) -> None:
        """Kill (SIGKILL) the processes whose command line meets the condition. The host stays on, and so does its
        sshd."""
        _kill(pid for pid, words in self.processes().items() if names(words))

    def kill_sshd(self) -> None:
        """Kill sshd with all its sessions, but not what was started through them."""
        _kill(self._everything().keys() - self.processes().keys() - {self._first})

    def start_sshd(self) -> None:
        self.run(*self._sshd.split())


class Network:
    """Hosts that reach each other by name.

    Args:
        folder: an empty folder for keys and settings.
        cores: the cores of each host, by name.
    """

    def __init__(self, folder: Path, cores: dict[str, Sequence[int]]) -> None:
        self.folder, self.switch = folder, Switch()
        self.key = self.make_key("key")
        self.hosts = [Host(self, name, number, of_host) for number, (name, of_host) in enumerate(cores.items(), 1)]
        self._name_hosts(self.hosts)

    def make_key(self, name: str) -> Path:
        """A new private key, with the public one beside it."""
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        return self.folder / name

    def boot(self) -> None:
        for host in self.hosts:
            host.boot()

    def forget(self, name: str) -> None:
        """No host finds the address of this one any more."""
        self._name_hosts([host for host in self.hosts if host.name != name])

    def _name_hosts(self, named: Sequence[Host]) -> None:
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in named)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def processes(self) -> dict[str, dict[int, str]]:
        """The processes of each host that has any."""
        return {host.name: found for host in self.hosts if (found := host.processes())}

    def close(self) -> None:
        for host in self.hosts:
            host.switch_off()
        self.switch.close()


def wait_until(condition: Callable[[], object], otherwise: str, seconds: float = 20) -> None:
    """Wait until a condition holds; fails with a message if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.02)


def _namespace(pid: int) -> str:
    """The PID namespace of a process; "" if it has ended."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def _kill(pids: Iterator[int] | set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

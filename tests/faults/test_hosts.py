"""Runs over two and three hosts with two processes each, on the CPU: what must be right before a run can start, and
faults of the network and of a host. hosts.py makes the hosts on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import faulty
import hosts
import numpy as np
import pytest
from faulty import FaultyRun, assert_nothing_lost, assert_same_end, assert_sentence, tries
from hosts import Host, Network

CORES = sorted(os.sched_getaffinity(0))
MOMENTS = ("start", "step", "validation", "save")
# docs/reliability.md promises that a run ends within two minutes of a fault for ever; a busy machine may take longer.
AFTER_FAULT = 180  # seconds
LACKING = hosts.missing() or ("" if find_spec("horovod") else "Horovod is not installed (no g++ at set-up)")
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)


class HostsRun(FaultyRun):
    """A run of two processes on each host of a network, with an image each per step.

    Args:
        launcher: the host on which it is started.
        among: the machines that it is told; default: all hosts.
    """

    def __init__(self, network: Network, folder: Path, data: Path, *options: str, launcher: Host | None = None,
                 among: tuple[str, ...] = ()) -> None:
        self.network, self.launcher = network, launcher or network.hosts[0]
        among = among or ("-H", ",".join(f"{host.name}:2" for host in network.hosts))
        super().__init__(folder, data, "--batch-size", "1", *options,
                         command=("-m", "train.processes.multi_host", *among))
        self._command = self.command

    def start(self, **environment: str) -> None:
        self.command = [*self.launcher.enter, *self._command]
        super().start(HOME=str(self.network.folder), **environment)  # Horovod keeps what it found in the home folder

    def start_until(self, moment: str, rng: np.random.Generator) -> None:
        """Start, and wait for a random moment of the run's start, of a step, a validation or a save. The run may have
        ended by then."""
        self.start()
        if moment == "start":
            self.wait_for(lambda: all(host.processes() for host in self.network.hosts))
            time.sleep(rng.uniform(0, 6))  # hits any moment; it waits for nothing
        else:
            last = self.steps_per_epoch
            self.wait_for_step(last if moment == "validation" else int(rng.integers(1, last)))
            if moment == "save":
                self.wait_for(lambda: any((self.folder / "checkpoints").glob("*.partial")))
            time.sleep(rng.uniform(0, 0.05))

    def wait_until_all_are_gone(self, seconds: float = AFTER_FAULT) -> None:
        hosts.wait_until(lambda: not self.network.processes(), f"still there: {self.network.processes()}", seconds)


@pytest.fixture
def new_network(tmp_path: Path) -> Iterator[Callable[..., Network]]:
    """Creates networks; their hosts, all but the last, have all cores. They are booted by the test."""
    made: list[Network] = []

    def make(*names: str) -> Network:
        folder = tmp_path / f"network{len(made)}"
        folder.mkdir()
        made.append(Network(folder, {name: CORES if name != names[-1] else CORES[-1:] for name in names}))
        return made[-1]

    yield make
    for network in made:
        network.close()


@pytest.fixture
def pair(new_network: Callable[..., Network]) -> Network:
    """Hosts alpha and beta; runs are started on alpha."""
    network = new_network("alpha", "beta")
    network.boot()
    return network


@pytest.fixture
def new_run(tmp_path: Path, images: Path) -> Iterator[Callable[..., HostsRun]]:
    """Creates runs in separate folders; at the end, their processes are killed."""
    runs: list[HostsRun] = []

    def make(network: Network, *options: str, data: Path = images, **more: object) -> HostsRun:
        runs.append(HostsRun(network, tmp_path / f"run{len(runs)}", data, *options, **more))  # type: ignore[arg-type]
        return runs[-1]

    yield make
    for run in runs:
        run.kill()


@pytest.fixture(scope="session")
def unbroken_hosts(images: Path, tmp_path_factory: pytest.TempPathFactory) -> HostsRun:
    """An undisturbed run on two hosts."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "network").mkdir()
    network = Network(folder / "network", {"alpha": CORES, "beta": CORES})
    try:
        network.boot()
        run = HostsRun(network, folder / "run", images)
        assert run.finish() == 0, run.err
    finally:
        network.close()
    return run


# --- undisturbed ---


@pytest.mark.parametrize("names", [
    pytest.param(("alpha", "beta"), marks=pytest.mark.long),
    pytest.param(("alpha", "beta", "gamma"), marks=pytest.mark.slow)], ids=len)
def test_runs_validates_and_resumes(names: tuple[str, ...], new_network: Callable[..., Network],
                                    new_run: Callable[..., HostsRun]) -> None:
    """Two and three hosts with different numbers of cores train, validate, report, and go on."""
    network = new_network(*names)
    network.boot()
    run = new_run(network)
    run.start(REPORT="1")
    assert run.end() == 0, run.err
    assert f"{2 * len(names)} processes" in run.out
    assert len(run.events("epoch")) == faulty.EPOCHS
    assert list((run.folder / "report").glob("*.html"))
    run.wait_until_all_are_gone(5)
    resumed = HostsRun(network, run.folder, Path(run.command[run.command.index("--data") + 1]), "--epochs", "3")
    assert resumed.finish() == 0, resumed.err
    assert faulty.checkpoint.load(faulty.checkpoint.find(str(run.folder))).progress.epoch == 3


# --- what must be right before a run can start ---


def wrong_key(network: Network, folder: Path, data: Path) -> None:
    network.hosts[0].key = network.make_key("another")


def unknown_host(network: Network, folder: Path, data: Path) -> None:
    network.forget("beta")


def no_python(network: Network, folder: Path, data: Path) -> None:
    network.hosts[1].covers = {Path(sys.executable).resolve().parent: folder, Path(sys.prefix) / "bin": folder}


def no_checkout(network: Network, folder: Path, data: Path) -> None:
    network.hosts[1].covers = {faulty.REPOSITORY / "train": folder}


def another_version(network: Network, folder: Path, data: Path) -> None:
    own = faulty.REPOSITORY / "train" / "loop.py"
    (folder / "loop.py").write_text(own.read_text() + "\n# another version\n")
    network.hosts[1].covers = {own: folder / "loop.py"}


def no_data(network: Network, folder: Path, data: Path) -> None:
    network.hosts[1].covers = {data: folder}


@pytest.mark.slow
@pytest.mark.parametrize("break_host, words, code", [
    (wrong_key, "machine beta cannot be reached .*Permission denied", 1),
    (unknown_host, "machine beta cannot be reached .*[Rr]esol", 1),
    (no_python, "machine beta cannot start the project .*(No such file|not found)", 1),
    (no_checkout, "machine beta cannot start the project .*Error", 1),
    (another_version, "machine beta has other code in ", 1),
    (no_data, "on beta: data path .* holds nothing", 2),
])
def test_refused(break_host: Callable[[Network, Path, Path], None], words: str, code: int, tmp_path: Path, images: Path,
                 new_network: Callable[..., Network], new_run: Callable[..., HostsRun]) -> None:
    """A fault on one host ends the start with one sentence that names the host."""
    network = new_network("alpha", "beta")
    folder = tmp_path / "cover"
    folder.mkdir()
    break_host(network, folder, images)
    network.boot()
    run = new_run(network)
    run.start()
    assert run.end() == code, run.err
    assert "Traceback" not in run.err, run.err
    errors = [line for line in run.err.splitlines() if "error: " in line]
    assert len(errors) == 1, run.err
    assert faulty.re.search(words, errors[0]), run.err
    run.wait_until_all_are_gone(5)


# --- the cable ---


@tries()
@pytest.mark.parametrize("fault", [{"delay": 0.1}, {"loss": 0.05}, {"rate": 1e6}], ids=str)
def test_bad_cable(fault: dict[str, float], pair: Network, new_run: Callable[..., HostsRun], unbroken_hosts: HostsRun,
                   rng: np.random.Generator, number: int) -> None:
    """A cable that becomes slow or loses packets (100 ms, 5 %, 1 Mbit/s): the run goes on to its end."""
    run = new_run(pair)
    run.start_until(MOMENTS[number % 4], rng)
    pair.hosts[1].cable.impair(**fault)
    assert run.end(2 * faulty.PATIENCE) == 0, run.err
    run.wait_until_all_are_gone(5)
    assert_same_end(run, unbroken_hosts)


@tries()
def test_cable_out_for_a_while(pair: Network, new_run: Callable[..., HostsRun], unbroken_hosts: HostsRun,
                               rng: np.random.Generator, number: int) -> None:
    """A cable out for 5 s: the run goes on to its end."""
    run = new_run(pair)
    run.start_until(MOMENTS[number % 4], rng)
    pair.hosts[1].cable.is_down = True
    time.sleep(5)  # the fault itself
    pair.hosts[1].cable.is_down = False
    assert run.end() == 0, run.err
    run.wait_until_all_are_gone(5)
    assert_same_end(run, unbroken_hosts)


# --- faults for ever ---


def pull_cable(host: Host) -> None:
    host.cable.is_down = True


def check_and_go_on(run: HostsRun, unbroken: HostsRun) -> None:
    """After a fault that has ended a run: no process is left, nothing is lost, and the run goes on when the hosts are
    well again."""
    run.wait_until_all_are_gone()
    assert_nothing_lost(run)
    for host in run.network.hosts:
        host.reboot()
    assert run.finish() == 0, run.err
    assert_same_end(run, unbroken, same_statistics=False)


@tries()
@pytest.mark.parametrize("fault", [pull_cable, Host.kill, Host.kill_sshd, Host.switch_off])
def test_lost_host(fault: Callable[[Host], None], pair: Network, new_run: Callable[..., HostsRun],
                   unbroken_hosts: HostsRun, rng: np.random.Generator, number: int) -> None:
    """A host lost (its cable, its processes, its sshd, its power): the run ends with a sentence that names it."""
    run = new_run(pair)
    run.start_until(MOMENTS[number % 4], rng)
    fault(pair.hosts[1])
    if run.end(AFTER_FAULT):
        assert_sentence(run, "beta")
    check_and_go_on(run, unbroken_hosts)


@tries()
def test_lost_launcher(pair: Network, new_run: Callable[..., HostsRun], unbroken_hosts: HostsRun,
                       rng: np.random.Generator, number: int) -> None:
    """The host of the launcher loses its power: the processes of the other one end."""
    run = new_run(pair)
    run.start_until(MOMENTS[number % 4], rng)
    pair.hosts[0].switch_off()
    run.end(5)
    check_and_go_on(run, unbroken_hosts)


@tries()
def test_killed_launcher(new_network: Callable[..., Network], new_run: Callable[..., HostsRun],
                         unbroken_hosts: HostsRun, rng: np.random.Generator, number: int) -> None:
    """A launcher killed on a host that has no process of the run: all processes end."""
    network = new_network("login", "alpha", "beta")
    network.boot()
    run = new_run(network, among=("-H", "alpha:2,beta:2"))
    run.start_until(MOMENTS[number % 4], rng)
    network.hosts[0].kill(lambda words: " -m train.processes.multi_host " in words)
    run.end(5)
    check_and_go_on(run, unbroken_hosts)


# --- elastic ---


@tries()
@pytest.mark.parametrize("fault", [pull_cable, Host.kill, Host.kill_sshd, Host.switch_off])
def test_elastic(fault: Callable[[Host], None], pair: Network, new_run: Callable[..., HostsRun],
                 rng: np.random.Generator, number: int) -> None:
    """An elastic run loses a host (its cable, its processes, its sshd, its power), and goes on with the other one."""
    run = new_run(pair, "--commit-every", "2", among=("-H", "alpha:2,beta:2", "--min-np", "2"))
    run.start_until(MOMENTS[1 + number % 3], rng)
    fault(pair.hosts[1])
    assert run.end() == 0, run.err
    run.wait_until_all_are_gone()
    assert "Traceback" not in run.err, run.err
    assert_nothing_lost(run)
    assert faulty.checkpoint.load(faulty.checkpoint.find(str(run.folder))).progress.epoch == faulty.EPOCHS


@tries()
def test_elastic_loses_its_launcher(pair: Network, new_run: Callable[..., HostsRun], rng: np.random.Generator,
                                    number: int) -> None:
    """The host of an elastic run's launcher loses its power: the processes of the other one end."""
    run = new_run(pair, "--commit-every", "2", among=("-H", "alpha:2,beta:2", "--min-np", "2"))
    run.start_until(MOMENTS[1 + number % 3], rng)
    pair.hosts[0].switch_off()
    run.end(5)
    run.wait_until_all_are_gone()
    assert_nothing_lost(run)
    pair.hosts[0].boot()
    assert run.finish() == 0, run.err


class GrowingRun(HostsRun):
    """An elastic run of 20 epochs, at first on alpha alone."""

    def __init__(self, network: Network, folder: Path, data: Path) -> None:
        script = folder.with_name("hosts.sh")
        self._list = folder.with_name("hosts.list")
        self._list.write_text("alpha:2\n")
        script.write_text(f"#!/bin/sh\ncat {self._list}\n")
        script.chmod(0o755)
        super().__init__(network, folder, data, "--commit-every", "2", "--epochs", "20", among=(
            "--host-discovery-script", str(script), "--min-np", "2", "--network-interface", "eth0"))

    def add_beta(self) -> None:
        self._list.write_text("alpha:2\nbeta:2\n")

    def assert_whole(self) -> None:
        """Check that the run ends by itself, after all its epochs."""
        assert self.end() == 0, self.err
        self.wait_until_all_are_gone()
        assert faulty.checkpoint.load(faulty.checkpoint.find(str(self.folder))).progress.epoch == 20


@tries()
def test_host_joins(pair: Network, tmp_path: Path, images: Path, rng: np.random.Generator, number: int) -> None:
    """A host that joins an elastic run takes part from the next commit on."""
    run = GrowingRun(pair, tmp_path / "run", images)
    run.start()
    run.wait_for_step(int(rng.integers(1, 6)))
    run.add_beta()
    run.assert_whole()
    assert "4 processes" in run.out, run.out


@pytest.mark.slow
@pytest.mark.parametrize("break_host, words", [
    (wrong_key, "beta: Permission denied"),
    (another_version, "error: on beta: the code in "),
])
def test_unfit_host_joins(break_host: Callable[[Network, Path, Path], None], words: str, tmp_path: Path, images: Path,
                          new_network: Callable[..., Network]) -> None:
    """A host that joins an elastic run and cannot take part is named; the run goes on without it."""
    network = new_network("alpha", "beta")
    folder = tmp_path / "cover"
    folder.mkdir()
    break_host(network, folder, images)
    network.boot()
    run = GrowingRun(network, tmp_path / "run", images)
    run.start()
    run.wait_for_step(3)
    run.add_beta()
    run.assert_whole()
    assert words in run.err, run.err
    assert "Traceback" not in run.err, run.err

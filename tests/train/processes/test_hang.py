"""A process hangs: the launcher finds it, names it and ends it. The run ends, or in elastic mode continues."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from several_processes import COMMIT_EVERY, LIMIT, needs_horovod, run_processes

from common.nvidia_gpus import find_gpus
from train import checkpoint
from train.errors import EXIT_HUNG_PROCESS
from train.processes import watch
from train.processes.pulse import Activity
from train.processes.watch import ONCE, SLOWER, Hang, Watch

SECONDS = 5  # seconds without a sign of life here; a step takes a tenth of a second, and may take ten times the longest


class Clocked:
    """A watch of three processes with a simulated clock; none of them is stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 40) -> None:
        self.now, self.stopped, self.gone = 0.0, set[int](), set[int]()
        monkeypatch.setattr(watch, "is_stopped", lambda pid: pid in self.stopped)
        self.watch = Watch(3, seconds, clock=lambda: self.now)
        self.records = self.watch.records
        for number in range(3):
            self.watch.begin(number)
            self.records[number].keeps_pace, self.records[number].activity = 1, Activity.TOGETHER

        self.after(1)  # seen for the first time

    def after(self, seconds: float, *alive: int) -> Hang | None:
        """The hangs found this much later, if only these processes have shown signs of life."""
        found = None
        for _ in range(round(seconds)):
            self.now += 1
            for number in alive:
                self.records[number].beats += 1
            found = self.watch.look({number: 100 + number for number in range(3) if number not in self.gone})
        return found


@pytest.fixture
def clocked(monkeypatch):
    return Clocked(monkeypatch)


def test_who_is_behind_hangs(clocked):
    """Process 1 hangs: the others have begun an operation that it has not begun."""
    for number, collectives in enumerate((8, 7, 9)):
        clocked.records[number].collectives = collectives
    assert clocked.after(40) is None
    assert clocked.after(1) == Hang((1,), is_certain=True)


def test_who_waits_does_not_hang(clocked):
    """Only process 1 is behind, and it shows signs of life: the other processes wait without a limit."""
    for number, collectives in enumerate((8, 7, 9)):
        clocked.records[number].collectives = collectives
    assert clocked.after(500, 1) is None


def test_equally_far(clocked):
    assert clocked.after(40) is None
    assert clocked.after(1) == Hang((0, 1, 2), is_certain=False)


def test_gpu_that_is_behind(clocked):
    """The GPU of process 2 hangs, although all hosts have launched the next step and wait."""
    for number, passes in enumerate((12, 12, 11)):
        clocked.records[number].device_passes = passes
    assert clocked.after(41) == Hang((2,), is_certain=True)


def test_stopped_process_hangs_wherever_it_is(clocked):
    """A stopped process hangs even if it compiles, or has begun more operations than the others."""
    clocked.records[2].activity, clocked.records[2].collectives = Activity.STARTING, 5
    clocked.stopped = {102}
    assert clocked.after(40, 0, 1) is None
    assert clocked.after(1, 0, 1) == Hang((2,), is_certain=True)


@pytest.mark.parametrize("keeps_pace, activity", [(0, Activity.COMPUTING), (1, Activity.SAVING)])
def test_what_is_done_once_may_take_longer(clocked, keeps_pace, activity):
    clocked.records[1].keeps_pace, clocked.records[1].activity = keeps_pace, activity
    clocked.records[0].collectives = clocked.records[2].collectives = 1
    assert clocked.after(ONCE * 40) is None
    assert clocked.after(1) == Hang((1,), is_certain=True)


def test_long_steps_may_take_longer(clocked):
    """A network on a CPU may take a minute for a step."""
    for number in range(3):
        clocked.records[number].longest = 60
    assert clocked.after(SLOWER * 60) is None
    assert clocked.after(1)


def test_launcher_that_was_stopped_has_seen_nothing(clocked):
    """If the launcher itself was stopped for an hour, as by Ctrl-Z and fg, no process counts as hanging."""
    assert clocked.after(1) is None
    clocked.now += 3600
    assert clocked.after(35) is None
    assert clocked.after(35, 0, 1, 2) is None


def test_who_has_waited_is_not_the_next(clocked):
    """The others were waiting for process 1, which has ended: they get the full time again to notice it."""
    clocked.records[0].collectives = clocked.records[2].collectives = 1
    assert clocked.after(41) == Hang((1,), is_certain=True)
    clocked.gone = {1}
    assert clocked.after(41) is None
    assert clocked.after(1) == Hang((0, 2), is_certain=False)


def test_those_who_come_are_not_waited_for(clocked):
    """Elastic: process 2 was restarted. The training processes wait neither for it nor for a process that is waiting
    to join (AT_DOOR)."""
    clocked.records[0].generation = clocked.records[1].generation = 1
    clocked.records[0].collectives = clocked.records[1].collectives = 7
    assert clocked.after(100, 0, 1, 2) is None
    clocked.records[0].collectives = 8
    clocked.records[2].keeps_pace = 0
    assert clocked.after(41) == Hang((1,), is_certain=True)
    clocked.records[1].activity = clocked.records[0].activity = Activity.AT_DOOR
    assert clocked.after(50, 2) is None


def test_no_patience_given(monkeypatch):
    assert Clocked(monkeypatch, seconds=0).after(100_000) is None


def test_words(clocked):
    clocked.records[1].activity, clocked.records[1].step, clocked.records[1].epoch = Activity.LOADING, 120, 2
    clocked.after(41)
    assert clocked.watch.describe(1, 101).startswith("no sign of life for 41 s, the last one on ")
    assert clocked.watch.describe(1, 101).endswith(": epoch 3, step 120, waiting for a batch of images")
    clocked.stopped = {101}
    assert clocked.watch.describe(1, 101).endswith("; it was stopped (SIGSTOP)")


# --- real processes ---


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()]


def is_there(pid: int) -> bool:
    return watch.status(pid) is not None


def wait_until(condition) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def told(err: str) -> list[str]:
    """The launcher's messages about processes, among the libraries' lines."""
    return [line for line in err.splitlines() if re.match(r"(error: )?process \d", line)]


@pytest.mark.long
@needs_horovod
def test_stopped_process_ends_the_run(start, processes, rng):
    """A stopped process ends the run after the given time; the last message names the process and its activity, and the
    checkpoints are intact."""
    run = start(processes, "--hang-seconds", str(SECONDS))
    run.wait_for(lambda: run.last_step() >= 3)
    run.process.send_signal(signal.SIGUSR1)
    run.wait_for(lambda: run.events("checkpoint"))
    saved, workers, victim = run.events("checkpoint")[0]["step"], run.workers(), int(rng.integers(processes))
    run.wait_for(lambda: run.last_step() >= saved + 3)
    os.kill(workers[victim], signal.SIGSTOP)
    stopped = time.monotonic()
    code, _, err = run.end()
    print(f"ended after {time.monotonic() - stopped:.1f} s")
    assert code == EXIT_HUNG_PROCESS
    last = err.splitlines()[-1]
    *rest, _ = [line for line in err.splitlines() if line.startswith("error: ")]
    assert last.startswith(f"error: process {victim} (")
    quiet = re.search(rf"pid {workers[victim]}\) shows no sign of life for (\d+) s", last)
    assert quiet and int(quiet[1]) >= SECONDS
    assert "; it was stopped (SIGSTOP); it hangs and is killed, so the run ends; its last checkpoint" in last
    assert all("the connection to another process of this run is lost" in line for line in rest), err
    assert "Traceback" not in err
    assert not any(map(is_there, workers.values()))
    assert checkpoint.load(checkpoint.find(str(run.folder))).progress.step == run.events("checkpoint")[-1]["step"]


@pytest.mark.long
@needs_horovod
def test_elastic_run_goes_on_without_a_stopped_process(start, processes, rng):
    run = start(processes, "--min-np", "1", "--hang-seconds", str(SECONDS))
    run.wait_for(lambda: run.last_step() >= COMMIT_EVERY + 1)
    workers, victim, others = run.workers(), int(rng.integers(processes)), processes - 1
    os.kill(workers[victim], signal.SIGSTOP)
    run.wait_for(lambda: len(run.events("session")) == 2)
    assert run.events("session")[-1]["num_processes"] == others
    steps = len(run.events("steps"))
    run.wait_for(lambda: len(run.events("steps")) >= steps + 2)
    run.process.send_signal(signal.SIGTERM)
    code, out, err = run.end()
    assert code == 128 + signal.SIGTERM, err
    (line,) = told(err)
    assert f"pid {workers[victim]}) shows no sign of life for " in line
    go = "process goes" if others == 1 else "processes go"
    assert line.endswith(f"; it hangs and is killed; {others} {go} on from the last commit")
    assert "stopped after step " in out


@pytest.mark.long
@needs_horovod
def test_request_to_stop_survives_a_loss(start):
    """SIGTERM while a process is stopped: it is found, and the others, which restart without it, save and stop."""
    run = start(2, "--min-np", "1", "--hang-seconds", str(SECONDS))
    run.wait_for(lambda: run.last_step() >= COMMIT_EVERY + 1)
    os.kill(run.workers()[1], signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    code, out, err = run.end()
    assert code == 128 + signal.SIGTERM, err
    assert "stopped after step " in out
    assert checkpoint.load(checkpoint.find(str(run.folder))).progress.step >= COMMIT_EVERY


BLOCKED = """
    import ctypes, sys
    from train import __main__ as program
    from train.loop import Trainer

    draws = Trainer._draws

    def blocking_draws(self, number):
        if self.workers.rank == 1 and self.state.progress.step == 4:
            print("half a line", end="", file=sys.stderr, flush=True)
            ctypes.PyDLL(None).sleep(1000)  # with Python's lock: no signal handler and no thread runs
        return draws(self, number)

    Trainer._draws = blocking_draws
    sys.exit(program.main(sys.argv[1:]))
"""


@pytest.mark.long
@needs_horovod
def test_process_blocked_in_c_ends_the_run(tiny_options, tmp_path):
    """Process 1 is blocked in C code, where signal handlers cannot run; it is killed, and the run ends."""
    done = run_processes(BLOCKED, *tiny_options, "--output", tmp_path / "run", light=True,
                         hang_seconds=SECONDS)
    assert done.returncode == EXIT_HUNG_PROCESS, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: process 1 (pid ")
    assert ": epoch 2, step 4, computing; it hangs and is killed, so the run ends; " in last
    assert checkpoint.load(checkpoint.find(str(tmp_path / "run"))).progress.step == 3  # of the first validation


@pytest.mark.long
@needs_horovod
def test_elastic_run_goes_on_without_a_blocked_process(tiny_options, tmp_path, monkeypatch):
    monkeypatch.setenv("REPORT", "yes")
    done = run_processes(BLOCKED, *tiny_options, "--output", tmp_path / "run", "--commit-every", "2", light=True,
                         hang_seconds=SECONDS, min_np=1)
    assert done.returncode == 0, done.stderr
    (line,) = told(done.stderr)
    assert line.startswith("process 1 (pid ")
    assert line.endswith("; it hangs and is killed; 1 process goes on from the last commit")
    assert (tmp_path / "run" / "report" / "report.md").exists()


@pytest.mark.gpu
@pytest.mark.alone
@needs_horovod
@pytest.mark.parametrize("min_np", [0, 1])
def test_gpu_that_hangs(tiny_options, tmp_path, min_np):
    """One of two GPUs never finishes a pass, and both hosts wait for the next pass. (Simulated by a host function in
    its stream that does not return, which looks to the stream like a kernel that hangs.)
    """
    if len(find_gpus()) < 2:
        pytest.skip(f"2 GPUs are needed, {len(find_gpus())} are there")
    script = """
        import ctypes, sys
        from train import __main__ as program
        from train.loop import Trainer

        draws = Trainer._draws

        def hanging_draws(self, number):
            if self.workers.rank == 1 and self.state.progress.step == 5:
                gpu, pause = self.executor.gpu, ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p).value
                gpu.check(gpu._driver.cuLaunchHostFunc(gpu.stream_handle, gpu._driver.CUhostFn(pause), 0))
            return draws(self, number)

        Trainer._draws = hanging_draws
        sys.exit(program.main(sys.argv[1:]))
    """
    options = ["gpu" if option == "cpu" else option for option in tiny_options]
    done = run_processes(script, *options, "--commit-every", "2", "--validate-every", "0", "--output", tmp_path / "run",
                         hang_seconds=SECONDS, min_np=min_np, on_gpus=True)
    assert done.returncode == (0 if min_np else EXIT_HUNG_PROCESS), done.stderr
    first, *_ = told(done.stderr)
    assert first.removeprefix("error: ").startswith("process 1 (GPU "), done.stderr
    assert "it hangs and is killed" in first


@pytest.mark.long(but=["False"])
@needs_horovod
@pytest.mark.parametrize("stop", [True, False])
def test_killed_launcher_leaves_no_process(tmp_path, stop):
    """Neither a stopped process, which cannot receive the signal sent at the launcher's end, nor a process that ignores
    the signal remains."""
    script = f"""if True:
        import os, pathlib, signal, time
        from train.processes.pulse import Activity, pulse
        place = pathlib.Path({str(tmp_path)!r}, os.environ['HOROVOD_RANK'])
        if place.name == "1" and {stop}:
            signal.signal(signal.SIGTERM, lambda number, frame: place.with_suffix('.told').touch())
        pulse.show(Activity.LOADING)
        pulse.end_step(0, 1), pulse.end_step(0, 2)
        place.touch()
        time.sleep(10_000)
    """
    starter = ("import sys; from train.processes.launch import launch, plan; "
               "sys.exit(launch(plan(2, on_cpu=True)[0], [sys.executable, '-c', sys.argv[1]], 1))")
    with subprocess.Popen([sys.executable, "-c", starter, script]) as launcher:
        wait_until(lambda: {"0", "1"} <= set(os.listdir(tmp_path)))
        all_of_it = children(launcher.pid)
        assert len(all_of_it) == 3  # including the guard
        for pid in all_of_it:
            if stop and b"HOROVOD_RANK=0\0" in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGSTOP)
        launcher.kill()
    wait_until(lambda: not any(map(is_there, all_of_it)))


@pytest.mark.long
@needs_horovod
def test_elastic_run_in_which_one_after_the_other_hangs():
    """A run with --cooldown ends if one process after the other hangs. Formerly, if nobody read rank 0's output, each
    new rank 0 hung like the previous one."""
    script = """if True:
        import os, time
        from train.processes.pulse import pulse

        while True:
            time.sleep(0.05)
            if os.environ["HOROVOD_HOSTNAME"] == "slot1":
                pulse.begin_collective()
    """
    starter = ("import sys; from train.processes.launch import *; slots, _ = plan(2, on_cpu=True); "
               "sys.exit(launch_elastic(slots, [sys.executable, '-c', sys.argv[1]], 1, 0.1, 0.2))")
    done = subprocess.run([sys.executable, "-c", starter, script], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == EXIT_HUNG_PROCESS, done.stderr
    assert done.stderr.count("it hangs and is killed") == 3
    assert "; 3 processes have hung without a step in between, so the run ends; " in done.stderr.splitlines()[-1]

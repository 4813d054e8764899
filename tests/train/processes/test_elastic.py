"""A process is killed in mid-epoch: the run ends with a message about it, or in elastic mode continues without it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from several_processes import BATCH, COMMIT_EVERY, LIMIT, REPOSITORY, needs_horovod, run_processes

from common.nvidia_gpus import find_gpus
from train import checkpoint
from train.commands.train import Beginning
from train.config import Config
from train.errors import TrainError
from train.models import resnet

pytestmark = needs_horovod


@pytest.fixture
def patient_gloo(monkeypatch):
    """Gloo's time-out is set longer than any test, so a test that relies on it to notice a loss fails."""
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", str(2 * LIMIT))


@pytest.mark.long
def test_elastic_run_loses_a_process_and_gets_one(start, on_gpu, processes, rng, request, monkeypatch):
    """Three processes become two and three again (on four GPUs four, three and four; on two GPUs two, one, two). No
    commit is lost, and the position counts images, not steps."""
    count = processes if on_gpu else 3
    if not on_gpu:
        monkeypatch.setattr(resnet, "FIRST_WIDTH", 8)  # as for the run's network
    weights = request.getfixturevalue("initial_weights")
    run = start(count, "--min-np", str(count - 1), "--cooldown", "1", "--freeze", "stage2", "--weights", str(weights))
    run.wait_for(lambda: run.last_step() >= COMMIT_EVERY + 1)
    victim = int(rng.integers(count))  # any rank, also rank 0, which has more tasks
    os.kill(run.workers()[victim], signal.SIGKILL)
    killed_after = run.last_step()
    run.wait_for(lambda: len(run.events("session")) == 3)
    steps = len(run.events("steps"))
    run.wait_for(lambda: len(run.events("steps")) >= steps + COMMIT_EVERY + 1)
    run.process.send_signal(signal.SIGTERM)
    code, out, err = run.end()
    assert code == 128 + signal.SIGTERM, err
    assert "was killed by SIGKILL" in err and "it hangs" not in err
    assert f"{count - 1} {'process goes' if count == 2 else 'processes go'} on from the last commit" in err
    less, more = (count - 1) * BATCH, count * BATCH
    fewer = "1 process" if count == 2 else f"{count - 1} processes"
    assert f"resuming with {less} images a step ({fewer}), before {more} ({count})" in out
    assert f"resuming with {more} images a step ({count} processes), before {less} ({count - 1})" in out

    sessions = run.events("session")
    assert [session["num_processes"] for session in sessions] == [count, count - 1, count]
    first, second, third = (session["step"] for session in sessions)
    assert first == 0
    assert killed_after - COMMIT_EVERY <= second <= killed_after + COMMIT_EVERY
    assert second % COMMIT_EVERY == third % COMMIT_EVERY == 0
    rates = {}
    for event in run.events("steps"):
        rates[event["step"]] = event["learning_rate"]  # a repeated step counts as in its last execution

    def size(step: int) -> int:
        return less if second < step <= third else more

    # Rates are in proportion to the batch: the cosine schedule is hardly below its peak. On a busy machine the lost
    # process may be back before the others have done a step.
    if third in rates:
        assert rates[third] / rates[third + 1] == pytest.approx(size(third) / size(third + 1), rel=1e-3)

    last = checkpoint.load(checkpoint.find(str(run.folder)))
    assert len(last.loader_states) == count
    assert {name.partition("_")[0] for name in last.state["momentum"]} == {"stage3", "stage4", "classifier"}
    state = json.loads(last.loader_states[0])
    if last.progress.epoch == 0:
        num_seen = sum(map(size, range(1, last.progress.step + 1)))  # may include a step that rank 0 did not record
        # less than a batch is skipped at each change
        assert num_seen <= more * state["batch"] < num_seen + less + more


@pytest.mark.long(but=["start-*"])
@pytest.mark.usefixtures("patient_gloo")
@pytest.mark.parametrize("place, where", [
    *((place, "without it: nothing was trained yet") for place in ("start", "joining", "session")),
    ("first steps", "from where the run began: nothing it trained was committed yet (--commit-every)"),
])
def test_loss_at_start_up(place, where):
    """One of three processes is killed before it has joined the others, while the processes connect, before the first
    commit, or after the first commit. The other processes continue without the killed process, and do not wait for
    Gloo's time-out.
    """
    script = f"""
        import os, signal, sys
        from train.processes import elastic
        from train.processes.distributed import Workers
        from train.processes.pulse import pulse

        def die_at(place):
            if place == {place!r} and os.environ["HOROVOD_HOSTNAME"] == "slot1":
                print("half a line", end="", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

        class DyingWorkers(Workers):
            def __init__(self):
                die_at("joining")
                super().__init__()

        def session(state):
            die_at("session")
            workers = Workers()
            workers.gather("all are here")
            pulse.count_commit()
            die_at("first steps")
            print(f"{{workers.gather(workers.rank)}}\\n", end="", flush=True)

        elastic.Workers = DyingWorkers
        die_at("start")
        elastic.run(session)
    """
    done = run_processes(script, count=3, min_np=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 2 * "[0, 1]\n"
    (line,) = [line for line in done.stderr.splitlines() if "process 1 (" in line]
    assert re.match(r"process 1 \(pid \d+\) was killed by SIGKILL, ", line)
    assert line.endswith(f"; 2 processes go on {where}")


@pytest.mark.long
@pytest.mark.parametrize("commits", [1, 2])
def test_fault_without_a_loss(tmp_path, monkeypatch, commits):
    """An operation fails although no process is lost; for example, NCCL refuses two processes on one GPU. If the only
    commit is the initial one, the run ends, because it would fail again; otherwise it continues and says so."""
    # The second process to leave Horovod sometimes waits for the first until Gloo's time-out.
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "20")
    script = f"""
        import os, sys, time
        from pathlib import Path
        from common.command_line import exit_code_of
        from train.processes import elastic
        from train.processes.distributed import Workers
        from train.processes.pulse import pulse

        folder = Path({str(tmp_path)!r})

        def session(state):
            workers = Workers()
            workers.gather("")
            if pulse.commits:
                return
            for _ in range({commits}):
                pulse.count_commit()
            (folder / str(workers.rank)).touch()
            while len(os.listdir(folder)) < 2:  # until nobody waits for an answer of this one any more
                time.sleep(0.05)
            raise elastic.HorovodInternalError("trace\\nncclCommInitRank failed: invalid usage")

        sys.exit(exit_code_of(lambda: elastic.run(session)))
    """
    done = run_processes(script, min_np=2)
    fault = "2 processes failed, though none of them was lost (ncclCommInitRank failed: invalid usage)"
    lines = [line for line in done.stderr.splitlines() if fault in line]
    if commits > 1:
        assert done.returncode == 0 and len(lines) == 1, done.stderr
        assert lines[0].endswith("; resuming from the last commit")
    else:
        assert done.returncode == 2 and lines, done.stderr  # one may be ended before it reports that, too
        assert all(line.startswith("error: ") and ", so the run ends: check that" in line for line in lines)


@pytest.mark.parametrize("now, sentence", [
    ([("a", 1, 5), ("b", 2, 5)],
     "an operation among the 2 processes failed, though none of them was lost (broken pipe)"),
    ([("b", 2, 1)], "1 of 2 processes is lost (process 1 on a)"),
    ([("b", 2, 1), ("b", 3, 0)], "1 of 2 processes is lost (process 1 on a)"),
    ([("a", 1, 1), ("b", 2, 1), ("b", 3, 0)],
     "an operation among the 2 processes failed, though none of them was lost (broken pipe)"),
])
def test_a_fault_over_several_machines_is_told(now, sentence):
    """If horovodrun has started the processes, nobody else reports what happened to the run. Processes that join may
    make a failed operation work."""
    from train.processes.elastic import Member, _what_happened

    before = [Member(host, pid, True, 0, "") for host, pid in (("a", 1), ("b", 2))]
    after = [Member(host, pid, commits > 0, commits, "broken pipe" * (pid == 2)) for host, pid, commits in now]
    assert _what_happened(before, after) == sentence
    assert _what_happened(before, [member._replace(fault="") for member in after]) == "", "somebody was let in"


def test_a_fault_that_would_come_for_ever_ends_the_run():
    from train.processes.elastic import Member, _what_happened

    before = [Member("a", 1, True, 2, ""), Member("b", 2, True, 2, "")]
    after = [member._replace(commits=3, fault="invalid usage") for member in before]
    with pytest.raises(TrainError, match=r"none of them was lost \(invalid usage\), so the run ends: check that each"):
        _what_happened(before, after)


@pytest.mark.parametrize("commits, step, where", [
    (1, 0, "beginning again where the run began: nothing it trained was committed yet (--commit-every)"),
    (3, 20, "resuming from the last commit, step 20"),
])
def test_the_state_comes_from_a_process_that_has_it(monkeypatch, capsys, commits, step, where):
    """Horovod may make a new process rank 0: it must not restart the run in the others."""
    from train.processes import elastic

    start = checkpoint.Checkpoint({}, {}, {}, Config(), [], progress=checkpoint.Progress(step))
    beginning = Beginning(Config(), Path("run"), start)
    other = elastic.Member("b", 2, True, commits, "broken pipe")
    monkeypatch.setattr(elastic, "_gather", lambda own: [own, other])
    monkeypatch.setattr(elastic, "_broadcast", lambda value, rank=0: [value, beginning][rank])
    monkeypatch.setattr(elastic.hvd, "rank", lambda: 0)
    state = elastic.RunState()
    state.members = [other._replace(commits=0, fault=""), elastic.Member("c", 3, True, 0, "")]
    state.sync()
    assert state.beginning is beginning and state.fault == ""
    assert capsys.readouterr().err == f"1 of 2 processes is lost (process 3 on c); {where}\n"


@pytest.mark.slow
def test_fault_without_a_loss_over_two_hosts(tmp_path):
    """Both hosts are this machine. The run used to restart and fail forever without a message."""
    hosts, script, ready = tmp_path / "hosts.sh", tmp_path / "script.py", tmp_path / "ready"
    ready.mkdir()
    hosts.write_text("#!/bin/sh\nprintf 'localhost:1\\n127.0.0.1:1\\n'\n")
    hosts.chmod(0o755)
    script.write_text(textwrap.dedent("""
        import os, sys, time
        from pathlib import Path
        from common.command_line import exit_code_of
        from train.processes import elastic
        from train.processes.distributed import Workers

        folder = Path(sys.argv[1])

        def session(state):
            workers = Workers()
            workers.gather("")
            (folder / str(workers.rank)).touch()
            while len(os.listdir(folder)) < 2:  # until nobody waits for an answer of this one any more
                time.sleep(0.05)
            raise elastic.HorovodInternalError("ncclCommInitRank failed: invalid usage")

        sys.exit(exit_code_of(lambda: elastic.run(session)))
    """))
    run = "import sys; from train.processes.multi_host import horovodrun; sys.exit(horovodrun(sys.argv[1:]))"
    command = [sys.executable, "-c", run, "--gloo", "-np", "2", "--min-np", "2", "--host-discovery-script", str(hosts),
               sys.executable, str(script), str(ready)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, cwd=REPOSITORY,
                          env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 2, done.stdout + done.stderr
    assert "none of them was lost (ncclCommInitRank failed: invalid usage), so the run ends: check" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("min_np", [0, 1])
def test_loss_while_the_report_is_written(tiny_options, tmp_path, min_np):
    """Process 1 has nothing left to do, so its loss does not matter. Process 0 writes the report, and the run cannot
    continue without it."""
    script = """
        import os, signal, sys, time
        from pathlib import Path
        from train import __main__ as program
        from train.commands import session

        folder = Path(sys.argv[1])

        def write_report(*_):
            while not (folder / "gone").exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

        session._write_report = write_report
        code = program.main(sys.argv[2:])
        if os.environ["HOROVOD_RANK"] == "1":
            (folder / "gone").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(code)
    """
    done = run_processes(script, tmp_path, *tiny_options, "--epochs", "1", "--output", tmp_path / "run", light=True,
                         min_np=min_np)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if re.search(r"process \d \(", line)]
    assert line.startswith("error: process 0 (pid ")
    assert "was killed by SIGKILL, as the kernel does when the machine's memory runs out, before the report" in line
    assert "make the report with " in line
    assert checkpoint.load(checkpoint.find(str(tmp_path / "run"))).progress.epoch == 1


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_loss_once_another_process_has_trained_to_the_end(tiny_options, tmp_path, victim):
    """The run no longer continues then: process 1's loss does not matter, and without process 0 the run ends."""
    script = """
        import os, signal, sys, time
        from pathlib import Path
        from train import __main__ as program
        from train.commands import session
        from train.processes.pulse import Activity, pulse

        folder, victim = Path(sys.argv[1]), int(sys.argv[2])
        report = session.report

        def wait_for(condition):
            while not condition():
                time.sleep(0.05)

        def at_the_end(*arguments):
            if int(os.environ["HOROVOD_RANK"]) == victim:
                (folder / "victim").write_text(str(os.getpid()))
                wait_for((folder / "reports").exists)
                os.kill(os.getpid(), signal.SIGKILL)
            pulse.show(Activity.REPORTING)
            (folder / "reports").touch()
            wait_for((folder / "victim").exists)
            wait_for(lambda: not Path("/proc", (folder / "victim").read_text()).exists())  # the launcher knows
            report(*arguments)

        session.report = at_the_end
        sys.exit(program.main(sys.argv[3:]))
    """
    done = run_processes(script, tmp_path, victim, *tiny_options, "--max-steps", "1", "--output", tmp_path / "run",
                         light=True, min_np=1)
    assert " on from the last commit" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if re.search(r"process \d \(", line)]
    if victim:
        assert (done.returncode, lines) == (0, []), done.stderr
    else:
        (line,) = lines
        assert line.startswith("error: process 0 (pid ") and "was killed by SIGKILL" in line
        assert "before the report was complete; training had ended" in line and "make the report with " in line
        assert done.returncode == 128 + signal.SIGKILL, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("min_np", [0, 1])
def test_a_process_that_has_said_why_it_ends_is_not_lost(tiny_options, tmp_path, min_np):
    """Process 0 reports, after all work is done, that a file of the run was removed."""
    script = """
        import sys
        from pathlib import Path
        from train import __main__ as program
        from train.commands import session

        folder, *arguments = sys.argv[1:]
        session._write_report = lambda *_: Path(folder, "config.json").unlink()
        sys.exit(program.main([*arguments, "--output", folder]))
    """
    done = run_processes(script, tmp_path / "run", *tiny_options, "--max-steps", "1", light=True, min_np=min_np)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line or "process 0" in line]
    assert line.startswith("error: the run has ended, but config.json had been removed from ")


@pytest.mark.long
@pytest.mark.usefixtures("patient_gloo")
def test_killed_process_ends_the_run(start, processes, rng):
    """Without elastic mode: the run ends at once with the reason and advice, and the earlier checkpoint is intact."""
    run = start(processes)
    run.wait_for(lambda: run.last_step() >= 1)
    run.process.send_signal(signal.SIGUSR1)
    run.wait_for(lambda: len(run.events("checkpoint")) == 1)
    os.kill(run.workers()[int(rng.integers(processes))], signal.SIGKILL)
    killed = time.monotonic()
    code, _, err = run.end()
    print(f"ended after {time.monotonic() - killed:.1f} s")
    assert code == 128 + signal.SIGKILL
    last = err.splitlines()[-1]
    assert last.startswith("error: process ")
    assert "was killed by SIGKILL, as the kernel does when the machine's memory runs out" in last
    assert "resume with --resume" in last
    assert "Traceback" not in err
    (saved,) = run.events("checkpoint")
    assert checkpoint.load(checkpoint.find(str(run.folder))).progress.step == saved["step"]


@pytest.mark.long
def test_process_without_memory_ends_the_run(tiny_options, tmp_path):
    """An allocation fails on one of two processes in mid-epoch: both end, and the checkpoints are intact."""
    script = """
        import sys
        from train import __main__ as program
        from train.loop import Trainer

        step = Trainer.step

        def failing_step(self, batches):
            if self.workers.rank == 1 and self.state.progress.step == 2:
                raise MemoryError("std::bad_alloc")
            return step(self, batches)

        Trainer.step = failing_step
        sys.exit(program.main(sys.argv[1:]))
    """
    done = run_processes(script, *tiny_options, "--output", tmp_path / "run", "--checkpoint-minutes", "1e-6",
                         light=True)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors[0].startswith("error: the machine has too little memory for this run (std::bad_alloc): lower ")
    assert errors[-1].startswith("error: process 1 (pid ")
    assert "failed with exit code 1, so the run ends" in errors[-1]
    assert "Traceback" not in done.stderr
    assert checkpoint.load(checkpoint.find(str(tmp_path / "run"))).progress.step in (1, 2)


@pytest.mark.long
def test_validation_that_fails_on_one_process_ends_the_run(tiny_options, tmp_path):
    """Validation fails on one process, for example because its GPU has no memory left: neither process waits for the
    other, and the epoch is saved."""
    script = """
        import sys
        from graph_passes import GraphError
        from graph_passes.executors.mxnet import MXNetExecutor
        from train import __main__ as program
        from train.processes.distributed import Workers

        infer, workers = MXNetExecutor.infer, []
        begin = Workers.__init__

        def known(self, *arguments):
            begin(self, *arguments)
            workers.append(self)

        def failing(self, *arguments):
            if workers[0].rank == 1:
                raise GraphError("the GPU has no memory left")
            return infer(self, *arguments)

        Workers.__init__, MXNetExecutor.infer = known, failing
        sys.exit(program.main(sys.argv[1:]))
    """
    done = run_processes(script, *tiny_options, "--output", tmp_path / "run", light=True)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == ["error: the GPU has no memory left"]
    assert checkpoint.load(checkpoint.find(str(tmp_path / "run"))).progress.step == 3


@pytest.mark.gpu
@pytest.mark.alone
def test_gpu_without_memory_ends_the_run(tiny_options, tmp_path):
    """A step asks for more than one of two GPUs has left."""
    if len(find_gpus()) < 2:
        pytest.skip(f"2 GPUs are needed, {len(find_gpus())} are there")
    script = """
        import sys
        from train import __main__ as program
        from train.loop import Trainer

        step = Trainer.step

        def taking_step(self, batches):
            if self.workers.rank == 1 and self.state.progress.step == 2:
                gpu = self.executor.gpu
                gpu.allocate(gpu.memory()[0] + 2**30)
            return step(self, batches)

        Trainer.step = taking_step
        sys.exit(program.main(sys.argv[1:]))
    """
    options = ["gpu" if option == "cpu" else option for option in tiny_options]
    done = run_processes(script, *options, "--output", tmp_path / "run", "--checkpoint-minutes", "1e-6",
                         on_gpus=True)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    lost = [line for line in errors if "the connection to another process of this run is lost" in line]
    (cause,) = set(errors) - set(lost)  # of the process without memory; the other may have noticed its end
    assert re.search(r"the GPU has (no memory left|[\d.]+ of [\d.]+ GiB free)", cause)
    assert "Traceback" not in done.stderr
    assert checkpoint.load(checkpoint.find(str(tmp_path / "run"))).progress.step >= 1

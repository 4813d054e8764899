"""Checkpoints are written beside training: they hold the state of their capture, are reported once they are complete,
and a write that fails ends the run."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from several_processes import needs_horovod, run_processes

from common.mxnet_compat import mx
from graph_passes import Graph
from graph_passes.executors import create_executor
from graph_passes.optimizers.sgd import SGD
from train import TrainError, checkpoint
from train.background import Background
from train.callbacks import Callbacks
from train.checkpoint import CheckpointFolder
from train.loop import Trainer
from train.models.network import init_params
from train.models.resnet import resnet
from train.saver import Saver

pytestmark = pytest.mark.usefixtures("narrow_network")

STEPS = 12  # of tiny_options
AFTER_EACH_STEP = ("--checkpoint-minutes", "0.00001", "--keep-checkpoints", "99")


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def signal_at(step: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run gets a signal within this step."""
    do_step = Trainer.step

    def signalled_step(self, batches):
        if self.state.progress.step == step - 1:
            signal.raise_signal(number)
        return do_step(self, batches)

    monkeypatch.setattr(Trainer, "step", signalled_step)


def test_work_in_the_background():
    background, begun, go_on, done = Background(), threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        go_on.wait()
        done.append(threading.current_thread())

    background.wait()  # nothing to wait for
    background.start(work)
    begun.wait()
    assert background.is_running and not done
    go_on.set()
    background.wait()
    assert not background.is_running and done != [threading.current_thread()]


def test_an_error_in_the_background_is_raised_once():
    background, go_on = Background(), threading.Event()

    def work() -> None:
        go_on.wait()
        raise TrainError("no room")

    background.start(work)
    assert not background.has_failed
    go_on.set()
    while background.is_running:
        time.sleep(0.001)
    assert background.has_failed
    with pytest.raises(TrainError, match="^no room$"):
        background.wait()
    assert not background.has_failed
    background.wait()


@pytest.mark.parametrize("name", ["mxnet", "reference"])
def test_copies_stay_as_they_were(name, rng):
    """A training step after the request changes neither parameters nor momentum nor statistics of the copies."""
    symbol = resnet(18, num_classes=3)
    executor = create_executor(name, Graph.from_json(symbol.tojson()),
                               {"data": (2, 32, 32, 3), "softmax_label": (2,)})
    executor.set_params(*init_params(symbol, seed=0, zero_init_residual=False))
    optimizer = executor.create_optimizer(SGD(momentum=0.9))

    def step() -> None:
        executor.forward_backward(mx.nd.array(rng.standard_normal((2, 32, 32, 3))), mx.nd.array([0, 2]))
        optimizer.step(0.1)
        executor.synchronize()

    step()
    params, aux = executor.get_params()
    momentum = {key: executor.to_canonical(key, array) for key, array in optimizer.state["momentum"].items()}
    takes = [executor.request_copies(arrays) for arrays in (executor.params, executor.aux,
                                                            optimizer.state["momentum"])]
    step()
    assert not np.array_equal(executor.get_params()[0]["classifier_weight"], params["classifier_weight"])
    for take, wanted in zip(takes, (params, aux, momentum), strict=True):
        taken = take()
        assert taken.keys() == wanted.keys()
        for key, array in wanted.items():
            np.testing.assert_array_equal(taken[key], array, err_msg=key)


class Late:
    """Each checkpoint is written after the step that follows its capture, or when training waits for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._go_on = threading.Event()
        for owner, name, changed in ((CheckpointFolder, "save", self._after(CheckpointFolder.save)),
                                     (Trainer, "step", self._then_go_on(Trainer.step)),
                                     (Background, "wait", self._go_on_and(Background.wait)),
                                     (Background, "start", self._stop_and(Background.start))):
            patch.setattr(owner, name, changed)

    def _after(self, save):
        return lambda *arguments, **options: (self._go_on.wait(), save(*arguments, **options))

    def _then_go_on(self, step):
        return lambda *arguments: (step(*arguments), self._go_on.set())[0]

    def _go_on_and(self, wait):
        return lambda *arguments: (self._go_on.set(), wait(*arguments))[1]

    def _stop_and(self, start):
        return lambda *arguments: (self._go_on.clear(), start(*arguments))[1]


@pytest.mark.long
@pytest.mark.parametrize("ema_decay", ["0", "0.9"])
def test_a_checkpoint_has_the_state_of_its_capture(ema_decay, tiny_options, tmp_path, run_train, monkeypatch):
    """A run that saves after each step, beside the next one, leaves the checkpoints of a run whose steps wait."""
    options = [*tiny_options, *AFTER_EACH_STEP, "--ema-decay", ema_decay]
    with monkeypatch.context() as patch:
        Late(patch)
        assert run_train("--output", tmp_path / "beside", *options)[0] == 0
    save = Saver.save

    def save_and_wait(self, recorder, best=None):
        save(self, recorder, best)
        self.finish(recorder)

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "save", save_and_wait)
        assert run_train("--output", tmp_path / "waiting", *options)[0] == 0
    names = sorted(os.listdir(tmp_path / "waiting" / "checkpoints"))
    assert names == sorted(os.listdir(tmp_path / "beside" / "checkpoints")) and len(names) == STEPS + 1
    for name in names:
        paths = [tmp_path / run / "checkpoints" / name for run in ("beside", "waiting")]
        ours, theirs = map(np.load, paths)
        assert ours.files == theirs.files
        for member in set(ours.files) - {checkpoint.META}:
            np.testing.assert_array_equal(ours[member], theirs[member], err_msg=f"{name} {member}")
        assert len({repr(checkpoint.load(path).progress) for path in paths}) == 1, name


def test_a_checkpoint_is_reported_when_its_file_is_complete(tiny_options, tmp_path, run_train, monkeypatch):
    """Callbacks are told in the main thread, in order; events have the step of the capture."""
    told = []

    def saved(self, path):
        told.append((checkpoint.load(path).progress.step, threading.current_thread() is threading.main_thread()))

    Late(monkeypatch)
    monkeypatch.setattr(Callbacks, "saved", saved)
    folder = tmp_path / "run"
    assert run_train("--output", folder, *tiny_options, *AFTER_EACH_STEP, "--validate-every", "0")[0] == 0
    saved_steps = [*range(1, STEPS + 1), STEPS]  # the last one again, with its epoch done
    assert told == [(step, True) for step in saved_steps]
    lines = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
    reported = [line for line in lines if line["event"] == "checkpoint"]
    assert [(line["step"], line["file"]) for line in reported] == [(step, f"step-{step:08}.npz") for step in
                                                                   saved_steps]
    steps = [line["step"] for line in lines[: lines.index(reported[0])] if line["event"] == "steps"]
    assert steps[-1] == 2, "the next step was done by then"


def test_a_write_that_fails_ends_the_run_at_the_next_step(tiny_options, tmp_path, run_train, monkeypatch):
    """The run ends with the error of the write, and with all steps logged. It can be resumed from its earlier
    checkpoint.
    """
    folder, do_step, save = tmp_path / "run", Trainer.step, CheckpointFolder.save

    def step(self, batches):
        if self.state.progress.step in (1, 3):
            signal.raise_signal(signal.SIGUSR1)
        while self.saver.is_writing:
            time.sleep(0.001)
        return do_step(self, batches)

    def failing(self, state, is_best=False):
        if state.progress.step > 2:
            raise TrainError("cannot save: no room")
        save(self, state, is_best)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        patch.setattr(CheckpointFolder, "save", failing)
        code, out, err = run_train("--output", folder, *tiny_options, "--log-every", "1")
    assert code == 2 and err.endswith("error: cannot save: no room\n") and err.count("no room") == 1, err
    assert [line["step"] for line in events(folder, "steps")] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in events(folder, "checkpoint")] == [2]
    code, out, err = run_train("--resume", folder, "--max-steps", "4")
    assert code == 0 and "stopped after step 4" in out, err


def test_a_write_that_fails_at_the_end(tiny_options, tmp_path, run_train, monkeypatch):
    def failing(self, state, is_best=False):
        raise TrainError("cannot save: no room")

    monkeypatch.setattr(CheckpointFolder, "save", failing)
    code, _, err = run_train("--output", tmp_path / "run", *tiny_options, "--max-steps", "2")
    assert code == 2 and err.endswith("error: cannot save: no room\n"), err
    assert events(tmp_path / "run", "end")[-1]["reason"] == "error"
    assert not events(tmp_path / "run", "checkpoint")


def test_sigterm_waits_for_a_slow_disk(tiny_options, tmp_path, run_train, monkeypatch):
    save = CheckpointFolder.save

    def slowly(*arguments):
        time.sleep(0.5)
        save(*arguments)

    monkeypatch.setattr(CheckpointFolder, "save", lambda self, state, is_best=False: slowly(self, state, is_best))
    signal_at(2, signal.SIGTERM, monkeypatch)
    folder = tmp_path / "run"
    code, out, err = run_train("--output", folder, *tiny_options)
    assert code == 128 + signal.SIGTERM and "stopped after step 2 with a checkpoint; resume with: " in out, err
    assert checkpoint.load(checkpoint.find(str(folder))).progress.step == 2
    assert [line["step"] for line in events(folder, "checkpoint")] == [2]
    (waited,) = [line["seconds"] for line in events(folder, "phase") if line["seconds"] > 0.4]
    assert waited > 0.4, "the wait counts as checkpoint, not as a step"


@pytest.mark.parametrize("error, is_waited_for", [(RuntimeError, True), (KeyboardInterrupt, False)])
def test_which_end_waits_for_the_checkpoint_in_flight(error, is_waited_for, tiny_options, tmp_path, light_run,
                                                      monkeypatch):
    """Any error does; a second Ctrl-C, which ends the run without saving, does not."""
    go_on, step, save = threading.Event(), Trainer.step, CheckpointFolder.save
    written = threading.Event()

    def failing_step(self, batches):
        if self.state.progress.step == 1:
            signal.raise_signal(signal.SIGUSR1)
        if self.state.progress.step == 2:
            if is_waited_for:
                go_on.set()
            raise error("in mid-run")
        return step(self, batches)

    def late(self, state, is_best=False):
        go_on.wait()
        save(self, state, is_best)
        written.set()

    monkeypatch.setattr(Trainer, "step", failing_step)
    monkeypatch.setattr(CheckpointFolder, "save", late)
    folder = tmp_path / "run"
    if is_waited_for:
        with pytest.raises(RuntimeError, match="in mid-run"):
            light_run("--output", folder, *tiny_options)
    else:
        assert light_run("--output", folder, *tiny_options) == 130
        assert not written.is_set()
    assert len(events(folder, "checkpoint")) == is_waited_for
    go_on.set()
    assert written.wait(60)
    assert checkpoint.load(checkpoint.find(str(folder))).progress.step == 2


def test_a_state_that_is_not_finite_is_not_saved(tiny_options, tmp_path, run_train, monkeypatch):
    """A weight that became NaN unseen by the loss ends the run when it would be saved."""
    step, folder = Trainer.step, tmp_path / "run"

    def poisoned_step(self, batches):
        answer = step(self, batches)
        if self.state.progress.step == 3:
            self.state.optimizer.state["momentum"]["classifier_bias"][:] = 0
            self.executor.aux[next(iter(self.executor.aux))][:] = np.nan
            signal.raise_signal(signal.SIGUSR1)
        return answer

    monkeypatch.setattr(Trainer, "step", poisoned_step)
    code, _, err = run_train("--output", folder, *tiny_options)
    assert code == 2 and "the loss is no longer finite (step 3, epoch 1); there is no checkpoint yet: " in err
    assert not list(folder.rglob("*.npz"))


def test_a_best_checkpoint_that_a_kill_left_unreported(tiny_options, tmp_path, run_train):
    """The resumed run reports it, once, so that its report names the epoch of the weights."""
    folder = tmp_path / "run"
    assert run_train("--output", folder, *tiny_options, "--max-steps", "7")[0] == 0
    metrics = folder / "metrics.jsonl"
    (best,) = [event for event in events(folder, "checkpoint") if event["is_best"]]
    kept = [line for line in metrics.read_text().splitlines(keepends=True) if '"is_best": true' not in line]
    metrics.write_text("".join(kept))
    for limit in ("8", "9"):
        code, _, err = run_train("--resume", folder, "--max-steps", limit)
        assert code == 0, err
        (found,) = [event for event in events(folder, "checkpoint") if event["is_best"]]
        assert found | {"time": 0} == best | {"time": 0}


def test_a_commit_waits_for_the_checkpoint_in_flight(tiny_options, tmp_path, run_train, monkeypatch):
    """A commit may hold the accuracy of a best checkpoint, which must then be complete."""
    run, writing = Trainer.run, []

    def run_and_commit(self, recorder):
        self.commit = lambda: writing.append(self.saver.is_writing)
        run(self, recorder)

    Late(monkeypatch)
    monkeypatch.setattr(Trainer, "run", run_and_commit)
    code, _, err = run_train("--output", tmp_path / "run", *tiny_options, *AFTER_EACH_STEP, "--commit-every", "5")
    assert code == 0 and writing == [False] * 3, err


@pytest.mark.long
@needs_horovod
def test_a_write_that_fails_ends_all_processes(tiny_options, tmp_path):
    """Process 0 alone writes. Both end by themselves, with its sentence, said once."""
    script = """
        import sys
        from train import __main__ as program
        from train.checkpoint import CheckpointFolder
        from train.errors import TrainError

        save, saved = CheckpointFolder.save, []

        def failing(self, state, is_best=False):
            if saved:
                raise TrainError("cannot save: no room")
            save(self, state, is_best)
            saved.append(state)

        CheckpointFolder.save = failing
        sys.exit(program.main(sys.argv[1:]))
    """
    folder = tmp_path / "run"
    done = run_processes(script, *tiny_options, "--output", folder, "--checkpoint-minutes", "1e-6", light=True)
    assert done.returncode == 2, done.stderr
    assert [line for line in done.stderr.splitlines() if "error" in line] == ["error: cannot save: no room"]
    (saved,) = events(folder, "checkpoint")
    assert checkpoint.load(checkpoint.find(str(folder))).progress.step == saved["step"]

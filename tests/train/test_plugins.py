"""Runs with plug-ins, by the command line: training, recording, resuming, use; callbacks that stop or fail."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import plugins
from train import checkpoint
from train.callbacks import Callbacks, LiveRun
from train.config import Config
from train.schedule import make_schedule

pytestmark = pytest.mark.usefixtures("narrow_network")

SOURCE = '''
    import numpy as np
    from mxnet.gluon import nn
    from train.plugins import callback, metric, model, schedule

    @model
    def small(num_classes):
        net = nn.HybridSequential()
        net.add(nn.Conv2D(8, 3, strides=2, use_bias=False), nn.BatchNorm(), nn.Activation("relu"),
                nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(num_classes))
        return net

    @schedule
    def falling(progress):
        return 1 - progress

    @metric
    def truth(probabilities, labels):
        return probabilities[np.arange(len(labels)), labels]
'''
CALLBACK = '''
    from train.plugins import callback

    LOG = __file__ + ".log"

    def write(*words):
        with open(LOG, "a") as file:
            print(*words, file=file)

    @callback
    class Told:
        def on_run_start(self, run):
            write("start", run.folder.name, run.config["model"], *run.class_names, run.num_processes)

        def on_epoch_end(self, epoch, metrics):
            write("epoch", epoch, *sorted(set(metrics) & {"train_loss", "val_top1", "truth"}))
            BODY

        def on_checkpoint(self, path):
            write("saved", path.name, path.is_file())

    @callback
    def on_run_end(reason):
        write("end", reason)
'''


@pytest.fixture
def options(tiny_options: list[str]) -> list[str]:
    at = tiny_options.index("--model")
    return [*tiny_options[:at], *tiny_options[at + 2 :]]


@pytest.fixture
def small(plugin: Callable[..., Path], options: list[str]) -> tuple[Path, list[str]]:
    """The plug-in, and the options of a run with it."""
    file = plugin(SOURCE)
    return file, [*options, "--plugin", str(file), "--model", "small"]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def as_in_another_process() -> None:
    """Forget everything that plug-ins have registered."""
    plugins._loaded.clear()
    plugins._told.clear()
    for key in [key for key, each in plugins._registered.items() if each.record]:
        del plugins._registered[key]


def train(run_train: Callable[..., tuple[int, str, str]], arguments: Sequence[object]) -> str:
    code, out, err = run_train(*arguments)
    assert code == 0, out + err
    return out + err


def test_trained_and_used(run_train, small, tiny_data: Path, tmp_path: Path) -> None:
    file, options = small
    run = tmp_path / "run"
    said = train(run_train, [*options, "--schedule", "falling", "--output", run, "--log-every", "1"])
    assert re.search(r"epoch 2/2 done: .* validation|on the training images: loss .*, truth 0\.\d+", said)
    (record,) = json.loads((run / "config.json").read_text())["plugin"]
    assert plugins.name_of(record) == "my.py" and record.startswith(f"{file}#sha256=")
    assert checkpoint.load(run / "checkpoints" / "best.npz").config.plugin == (record,)
    (copy,) = (run / "plugins").glob("*/my.py")
    assert copy.read_bytes() == file.read_bytes()
    rates = [line["learning_rate"] for line in events(run, "steps")]
    assert rates == pytest.approx([0.5 / 64 * (1 - step / 12) for step in range(12)])
    truth = [line["plugin_metrics"]["truth"] for line in events(run, "epoch")]
    assert len(truth) == 2 and all(0.2 < value < 1 for value in truth)

    as_in_another_process()
    code, out, err = run_train("validate", "--checkpoint", run)
    assert code == 0 and re.search(r"top-1 \d+\.\d+%.*, truth 0\.\d+", out), out + err
    shown = float(re.search(r"truth (0\.\d+)", out)[1])
    assert shown == pytest.approx(truth[int(np.argmax([line["train_eval_top1"] for line in events(run, "epoch")]))],
                                  rel=1e-3)
    as_in_another_process()
    image = next(tiny_data.glob("*/*.jpg"))
    code, out, err = run_train("predict", "--checkpoint", run, "--json", image)
    assert code == 0 and len(json.loads(out)[0]["predictions"]) == 3
    assert f"plug-in {file}, as {run / 'checkpoints/best.npz'} records it\n" in err
    as_in_another_process()
    assert run_train("export", "--checkpoint", run, "--onnx", tmp_path / "net.onnx")[0] == 0
    as_in_another_process()
    assert run_train("quantize", "--checkpoint", run, "--images", "16", "--data", tiny_data)[0] == 0


def test_benchmarks(run_train, small, tmp_path: Path) -> None:
    file, options = small
    more = ["--min-steps", "2", "--limit-steps", "2", "--warmup-steps", "1"]
    at = options.index("--epochs")
    known = [word for i, word in enumerate(options) if i not in (at, at + 1)]
    drop = ("--checkpoint-minutes", "--validate-every", "--warmup-epochs")
    pairs = [word for i, word in enumerate(known) if word not in drop and (i == 0 or known[i - 1] not in drop)]
    said = train(run_train, ["benchmark", *pairs, *more, "--output", tmp_path / "run"])
    assert "median step" in said
    code, out, err = run_train("benchmark", "--inference", "--plugin", file, "--model", "small", "--device", "cpu",
                               "--image-size", "32", "--batch-sizes", "1", "--output", tmp_path / "inference")
    assert code == 0, out + err
    assert "small" in json.loads((tmp_path / "inference" / "inference.json").read_text())["model"]


def test_resumed(run_train, small, tmp_path: Path) -> None:
    """A resumed run ends like an uninterrupted one; its network can also start another run."""
    _, options = small
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(run_train, [*options, "--output", whole])
    train(run_train, [*options, "--output", parts, "--max-steps", "4"])
    as_in_another_process()
    train(run_train, ["--resume", parts])
    ours, theirs = (checkpoint.load(run / "checkpoints" / "step-00000012.npz") for run in (whole, parts))
    for name, array in ours.params.items():
        np.testing.assert_array_equal(array, theirs.params[name], err_msg=name)
    as_in_another_process()
    start = options.index("--plugin")
    said = train(run_train, [*options[:start], "--weights", parts, "--output", tmp_path / "tuned", "--max-steps", "1"])
    assert "weights: small with 3 classes of" in said
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["plugin"] == list(theirs.config.plugin)


def test_a_file_that_has_gone_or_changed(
    run_train, small, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, options = small
    run, image = tmp_path / "run", next(tiny_data.glob("*/*.jpg"))
    train(run_train, [*options, "--output", run, "--max-steps", "2"])
    (copy,) = (run / "plugins").glob("*/my.py")
    file.write_text(file.read_text() + "\n# changed\n")
    for arguments in (["predict", "--checkpoint", run, image], ["--resume", run, "--max-steps", "3"]):
        as_in_another_process()
        code, _, err = run_train(*arguments)
        assert code == 0 and f"plug-in {copy}, as " in err and f"({file} is missing or has changed; --plugin" in err
    as_in_another_process()
    code, out, err = run_train("--resume", run, "--plugin", file, "--max-steps", "4")
    assert code == 0 and re.search(r"my\.py \(sha256 \w+\.\.\.\) is used, although .* was made with", err)
    assert "resuming with other options: --plugin" in out
    assert len(list((run / "plugins").glob("*/my.py"))) == 2  # each checkpoint has its own
    file.unlink()
    as_in_another_process()
    last = run / "checkpoints" / "step-00000004.npz"
    assert run_train("predict", "--checkpoint", last, image)[0] == 0
    (alone := tmp_path / "alone.npz").write_bytes(last.read_bytes())
    as_in_another_process()
    code, _, err = run_train("predict", "--checkpoint", alone, image)
    assert code == 2 and f"{alone} needs the plug-in {file}, which is not there: give its new path with --plugin" in err
    as_in_another_process()
    assert run_train("predict", "--checkpoint", alone, "--plugin", copy, "--json", image)[0] == 0
    as_in_another_process()
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path / "another account"))
    code, _, err = run_train("predict", "--checkpoint", last, image)
    assert code == 2 and "which has not been used on this account yet: read it first" in err


def test_a_file_that_has_not_the_network_is_not_executed(run_train, plugin, tiny_options, tiny_data, tmp_path) -> None:
    file, run = plugin(SOURCE), tmp_path / "run"
    train(run_train, [*tiny_options, "--plugin", file, "--output", run, "--max-steps", "1"])
    file.unlink()
    shutil.rmtree(run / "plugins")
    as_in_another_process()
    assert run_train("predict", "--checkpoint", run, next(tiny_data.glob("*/*.jpg")))[0] == 0
    code, _, err = run_train("--resume", run)
    assert code == 2 and f"needs the plug-in {file}, which is not there" in err


@pytest.mark.parametrize(("body", "end"), [
    ("pass", "end epochs"),
    ("return 'enough'", "stopped by a callback: enough"),
    ("return True", "stopped by a callback: Told asked for it"),
    ("return False", "end epochs"),
])
def test_callbacks(body: str, end: str, run_train, small, plugin, tmp_path: Path) -> None:
    _, options = small
    told = plugin(CALLBACK.replace("BODY", body), "told.py")
    said = train(run_train, [*options, "--plugin", told, "--output", tmp_path / "run"])
    log = (tmp_path / "told.py.log").read_text().splitlines()
    epochs = 1 if "stopped" in end else 2
    assert log[0] == "start run small class0 class1 class2 1"
    assert log[-1] == ("end callback" if "stopped" in end else end)
    assert [line for line in log if line.startswith("epoch")] == [
        f"epoch {epoch} train_loss truth" for epoch in range(1, epochs + 1)]
    assert f"saved step-{6 * epochs:08}.npz True" in log
    assert (end in said) == ("stopped" in end)
    assert events(tmp_path / "run", "steps")[-1]["step"] == 6 * epochs


def test_a_run_is_stopped_between_two_steps(run_train, small, plugin, tmp_path: Path) -> None:
    _, options = small
    source = CALLBACK.replace("BODY", "pass").replace('write("saved", path.name, path.is_file())', "self.run.stop('a')")
    source = source.replace('write("start"', 'self.run = run; write("start"')
    told = plugin(source, "told.py")
    said = train(run_train, [*options, "--plugin", told, "--output", tmp_path / "run", "--checkpoint-minutes", "1e-9"])
    assert "stopped by a callback: a\n" in said
    assert (tmp_path / "run" / "checkpoints" / "step-00000002.npz").exists()  # after the step that saved, one more


def test_callbacks_of_a_program(tmp_path: Path) -> None:
    """Objects that `train.plugins.callback` accepts, and functions of any name, for the end of an epoch."""
    heard: list[Any] = []

    class Told:
        def on_epoch_end(self, epoch: int, metrics: Any) -> None:
            heard.append((epoch, metrics))

    def on_run_end(reason: str) -> None:
        heard.append(reason)

    run = LiveRun(tmp_path, {}, ["a"], 1)
    callbacks = Callbacks(Config(), run, is_first=True)
    assert not callbacks
    callbacks.add([Told(), on_run_end, lambda epoch, metrics: epoch == 2])
    assert callbacks
    for epoch in (1, 2):
        assert not callbacks.is_to_stop
        callbacks.end_epoch(epoch, {"loss": 1.0})
    assert callbacks.wish == ("<lambda> asked for it", "")
    callbacks.end("done")
    assert heard == [(1, {"loss": 1.0}), (2, {"loss": 1.0}), "done"]
    elsewhere = Callbacks(Config(), run, is_first=False)
    elsewhere.add([Told()])
    elsewhere.end_epoch(1, {})
    assert elsewhere and len(heard) == 3


FAILURES = {
    "on_epoch_end": ("BODY", "1 / 0", 6, "ZeroDivisionError: division by zero"),
    "on_checkpoint": ('write("saved", path.name, path.is_file())', "path.no_such", 6, "AttributeError: "),
    "on_run_start": ('write("start"', 'run.no_such; write("start"', 0, "AttributeError: 'LiveRun' object"),
    "on_run_end": ('write("end", reason)', "reason + 1", 12, "TypeError: "),
}


@pytest.mark.parametrize("hook", FAILURES)
def test_a_callback_that_fails(hook: str, run_train, small, plugin, tmp_path: Path) -> None:
    """The run ends after a checkpoint, with file and line."""
    before, after, step, fault = FAILURES[hook]
    _, options = small
    source = CALLBACK.replace(before, after).replace("BODY", "pass")
    told = plugin(source, "told.py")
    line = next(number for number, text in enumerate(told.read_text().splitlines(), 1) if after in text)
    code, out, err = run_train(*options, "--plugin", told, "--output", tmp_path / "run")
    name = "on_run_end" if hook == "on_run_end" else "Told"
    assert code == 2 and err.startswith(f"error: the callback {name} failed at {told}:{line}: {fault}"), err
    assert ("is saved; fix that, then resume with" in out) == (step > 0)
    assert (tmp_path / "run" / "checkpoints" / f"step-{step:08}.npz").exists() == (step > 0)
    if hook != "on_run_end":
        assert (tmp_path / "told.py.log").read_text().splitlines()[-1] == "end error"


def test_a_callback_that_returns_something_else(run_train, small, plugin, tmp_path: Path) -> None:
    _, options = small
    told = plugin(CALLBACK.replace("BODY", "return 3"), "told.py")
    code, _, err = run_train(*options, "--plugin", told, "--output", tmp_path / "run")
    assert code == 2 and (f"on_epoch_end of the callback Told ({told}:9) returned 3: return nothing, True to stop the "
                          "run, or a sentence that says why it is to stop") in err


@pytest.mark.parametrize(("body", "fault"), [
    ("return probabilities", r"odd \(.*my.py:3\) returned float32 \(\d, 3\) for \d images: return \(\d,\), a number"),
    ("return labels.mean()", r"the metric odd \(.*my.py:3\) returned float64 \(\) for \d images"),
    ("return labels[100]", r"the metric odd failed at .*my.py:5: IndexError: index 100 is out of bounds"),
])
def test_a_metric_that_fails(body: str, fault: str, run_train, plugin, tiny_options, tmp_path: Path) -> None:
    file = plugin(f"from train.plugins import metric\n\n@metric\ndef odd(probabilities, labels):\n    {body}\n")
    code, out, err = run_train(*tiny_options, "--plugin", file, "--output", tmp_path / "run")
    assert code == 2 and re.search(fault, err), err
    assert "step 6 is saved; fix that, then resume with" in out


@pytest.mark.parametrize(("factor", "fault"), [
    ("-progress", r"the schedule odd \(.*my.py:2\) gives -0.01 for the progress 0.01: return a factor"),
    ("None", "gives None for the progress 0"), ("1 / progress", "my.py:3: ZeroDivisionError"),
    ("float('nan')", "gives nan for the progress 0"),
])
def test_a_schedule_that_fails(factor: str, fault: str, run_train, plugin, tiny_options, tmp_path: Path) -> None:
    file = plugin(f"from train.plugins import schedule\n@schedule\ndef odd(progress): return {factor}\n")
    code, _, err = run_train(*tiny_options, "--plugin", file, "--schedule", "odd", "--output", tmp_path / "run")
    assert code == 2 and re.search(fault, err), err


def test_a_schedule_after_the_warm_up(plugin) -> None:
    file = plugin("from train.plugins import schedule\n@schedule\ndef root(progress): return progress ** .5\n")
    plugins.load([str(file)])
    config = Config(schedule="root", epochs=10, warmup_epochs=2, batch_size=256, learning_rate=0.3)
    schedule = make_schedule(config, 10, num_processes=1)
    assert [schedule(step) for step in (9, 20, 60, 100)] == pytest.approx([0.15, 0, 0.3 * math.sqrt(0.5), 0.3])


@pytest.mark.parametrize(("given", "fault"), [
    (["--schedule", "cosin"], "there is no schedule 'cosin'; did you mean cosine?"),
    (["--augment", "tilt"], "there is no augmentation 'tilt': load the plug-in that has it with --plugin"),
    (["--model", "smal"], "there is no model 'smal'; did you mean small?"),
])
def test_names_that_no_plugin_has(given: list[str], fault: str, run_train, small, tmp_path: Path) -> None:
    _, options = small
    code, _, err = run_train(*options, *given, "--output", tmp_path / "run")
    assert code == 2 and fault in err and not (tmp_path / "run").exists()


LOSS = """
    from common.mxnet_compat import mx
    from train.plugins import loss

    @loss("focal", probabilities="PROBABILITIES")
    def mine(scores, targets):
        log_p = mx.sym.log_softmax(scores, axis=1)
        return -mx.sym.sum(targets * (1 - mx.sym.exp(log_p)) ** 2 * log_p, axis=1)
"""


@pytest.mark.parametrize("probabilities", ["softmax", "sigmoid"])
def test_a_loss(run_train, plugin, tiny_options, tiny_data: Path, tmp_path: Path, probabilities: str) -> None:
    """A run trains with the plug-in's loss, records it, resumes without its option, and is validated with it. Files for
    other programs state its probabilities."""
    file, run = plugin(LOSS.replace("PROBABILITIES", probabilities)), tmp_path / "run"
    train(run_train, [*tiny_options, "--plugin", file, "--loss", "focal", "--label-smoothing", "0", "--output", run,
                      "--learning-rate", "1e-9", "--max-steps", "3"])
    config = json.loads((run / "config.json").read_text())
    assert config["loss"] == "focal" and plugins.name_of(config["plugin"][0]) == "my.py"
    # the initial probabilities of three classes are nearly equal
    first = events(run, "steps")[0]["loss"]
    assert first == pytest.approx((2 / 3) ** 2 * math.log(3), rel=0.5)
    as_in_another_process()
    file.unlink()  # the run's copy is used
    said = train(run_train, ["--resume", run, "--max-steps", "8"])
    assert "is missing or has changed" in said
    as_in_another_process()
    code, out, err = run_train("validate", "--checkpoint", run)
    assert code == 0 and "loss " in out, out + err
    as_in_another_process()
    code, out, err = run_train("predict", "--checkpoint", run, "--json", tiny_data / "class0" / "0.jpg")
    assert code == 0, out + err
    total = sum(guess["probability"] for guess in json.loads(out)[0]["predictions"])
    assert (abs(total - 1) < 1e-4) == (probabilities == "softmax")
    code, out, err = run_train("export", "--checkpoint", run, "--symbol", tmp_path / "net.json")
    assert code == 0, out + err
    said = json.loads((tmp_path / "net.json").read_text())["nodes"][-1]["op"]
    assert said == {"softmax": "SoftmaxOutput", "sigmoid": "LogisticRegressionOutput"}[probabilities]


@pytest.mark.parametrize("body, sentence", [
    ("return mx.sym.sin(scores) * targets", r"has the operator sin \(sin0\), which no loss can have here: make it of"),
    ("return mx.sym.broadcast_mul(scores, targets)", r"returns \(N, C\): return a loss for each image"),
    ("return mx.sym.mean(scores * targets)", "would mix the images of a batch: give axis=1"),
    ("return 3", "returned a int: return a Symbol, made of scores and targets by mx.sym"),
    ("return scores.no_such_thing", "failed at .*my.py:7: AttributeError"),
])
def test_a_loss_that_is_none(run_train, plugin, tiny_options, tmp_path: Path, body: str, sentence: str) -> None:
    """A wrong loss is refused in one sentence with its file and line, before anything is read or written."""
    file = plugin(f"""
        from common.mxnet_compat import mx
        from train.plugins import loss

        @loss
        def mine(scores, targets):

            {body}
    """)
    code, _, err = run_train(*tiny_options, "--plugin", file, "--loss", "mine", "--output", tmp_path / "run")
    assert code == 2 and err.count("\n") == 1 and re.search(f"the loss mine .*{sentence}", err), err
    assert not (tmp_path / "run").exists()
    code, _, err = run_train(*tiny_options, "--plugin", file, "--loss", "mien", "--output", tmp_path / "run")
    assert code == 2 and "there is no loss 'mien'; did you mean mine?" in err
    code, _, err = run_train(*tiny_options, "--plugin", file, "--loss", "mine", "--bce-threshold", "0.2")
    assert code == 2 and "--bce-threshold is for --loss bce, and this run has mine" in err

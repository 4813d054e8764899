"""The command language-model: a word language model in the training loop of classifiers. With the reference executor:
MXNet's RNN needs oneDNN, which the tests turn off (tests/graph_passes/test_rnn.py tests it)."""

from __future__ import annotations

import inspect
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common import command_line
from common.mxnet_compat import mx
from graph_passes import Ref
from graph_passes.choice import fewest
from graph_passes.executors.reference import backward, forward, run
from graph_passes.pipeline import training_step
from train import checkpoint, loop, saver
from train.config import Config
from train.language_model import LanguageModel
from train.options.language_model import LanguageModelOptions
from train.schedule import Schedule

SMALL = ["language-model", "--executor", "reference", "--hidden", "16", "--layers", "1", "--sequences", "16", "--steps",
         "8", "--log-every", "100"]
Train = Callable[..., tuple[int, str, str]]


def test_it_shares_the_options_of_training() -> None:
    """Each shared option has one help text. Some options have other defaults, and the learning rate has another unit.
    """
    own, training = (command_line._help_texts(options) for options in (LanguageModelOptions, Config))
    assert [name for name in own.keys() & training.keys() if own[name] != training[name]] == ["learning_rate"]
    here = command_line._field_docstrings(inspect.getfile(LanguageModelOptions))["LanguageModelOptions"]
    assert here.keys() & training.keys() == {"learning_rate"}
    different = LanguageModelOptions()
    assert (different.epochs, different.log_every, different.clip_norm) == (5, 50, 1.0)


def test_it_learns_a_text(run_train: Train, tmp_path: Path) -> None:
    """Sentences in which each word except the second follows from the previous one: one of the 7 words of a line cannot
    be predicted, so the perplexity approaches 3 ** (1 / 7) = 1.17."""
    rng = np.random.default_rng(0)
    animals, sounds = ("cat", "dog", "bird"), ("meows", "barks", "sings")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"my {animals[i]} {sounds[i]} in the morning" for i in rng.integers(0, 3, 1500)))
    code, out, err = run_train(*SMALL, "--output", tmp_path / "run", "--text", text, "--epochs", "2", report=True)
    assert code == 0, err
    found = [float(value) for value in re.findall(r"validation loss [\d.]+, perplexity ([\d.]+) \|", out)]
    assert len(found) == 2 and found[1] < min(1.3, found[0]), out
    assert "10,500 words, 12 in the vocabulary" in out and "total words/sec: " in out
    assert (tmp_path / "run" / "checkpoints").is_dir()
    values = json.loads((tmp_path / "run" / "report" / "report.json").read_text())["language_model"]
    assert values["precision"] == "float32" and values["vocabulary"] == 12
    assert values["parameters"] == 16 * 16 + 2 * 4 * 16 * (16 + 1) + 16, "embedding, LSTM, bias, of 16 scores"
    assert [round(epoch["validation"], 2) for epoch in values["perplexity"]] == found


def test_words_that_are_not_in_the_vocabulary_are_told(run_train: Train, tmp_path: Path) -> None:
    """In the last tenth one word is known. The byte order mark that some editors put at the start of a file is not a
    word."""
    text = tmp_path / "text.txt"
    text.write_text("\ufeff" + "a b " * 1800 + " ".join(f"w{number}" for number in range(398)) + " a")
    code, out, err = run_train(*SMALL, "--output", tmp_path / "run", "--text", text, "--epochs", "1")
    assert code == 0, err
    assert "4,000 words, 3 in the vocabulary" in out
    assert "99.8% of the words for validation are not in the vocabulary: perplexity counts them as one word" in out


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy
def test_a_run_that_diverges(run_train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the learning rate as it was given, and no option for training with images."""
    text = tmp_path / "text.txt"
    text.write_text("a b c b c a " * 400)
    monkeypatch.setattr(Schedule, "__call__", lambda schedule, step: 1e38)
    code, _, err = run_train(*SMALL, "--output", tmp_path / "run", "--text", text, "--learning-rate", "999")
    assert code == 2 and err.endswith("there is no checkpoint yet: lower --learning-rate (now 999)\n"), err


@pytest.mark.long
def test_resume(run_train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is stopped and resumed ends like an uninterrupted one; options that do not fit are refused in one
    sentence."""
    text, other, longer = (tmp_path / f"{name}.txt" for name in ("text", "other", "longer"))
    text.write_text("a b c b c a " * 400)
    other.write_text("d e f " * 800)
    longer.write_text("a b c b c a " * 450)
    whole, parts = ([*SMALL, "--text", text, "--epochs", "2", "--output", tmp_path / name] for name in ("one", "two"))
    _, out, _ = run_train(*whole)
    with monkeypatch.context() as patch:
        patch.setattr(saver.Saver, "is_due", lambda self: bool(signal.raise_signal(signal.SIGTERM)))
        code, stopped, _ = run_train(*parts)
    assert code == 143
    assert stopped.splitlines()[-1].endswith(f" -m train language-model --resume {tmp_path / 'two'}")

    go_on = ["language-model", "--resume", tmp_path / "two"]
    for options, sentence in (
            (["--text", other], f"to a run with another vocabulary than that of {other}: give the original --text, or"),
            (["--text", longer], "resume with the same text, sequences, steps, seed and number of processes"),
            (["--hidden", "8"], "to a run with --hidden 16, but this one has --hidden 8: leave it out, or begin a new"),
            (["--sequences", "8"], "to a run with --sequences 16, but this one has --sequences 8: leave it out, or")):
        code, _, err = run_train(*go_on, *options)
        assert code == 2 and sentence in err and err.count("\n") == 1, err
        assert err.startswith(f"error: the checkpoint {checkpoint.find(str(tmp_path / 'two'))}")
    code, _, err = run_train("validate", "--checkpoint", tmp_path / "two")
    assert code == 2 and "belongs to a language model, not to a network for images" in err
    code, again, err = run_train(*go_on, "--log-every", "50")
    assert code == 0, err
    assert "resuming with other options: --log-every 50 (before: 100)\n" in again
    assert json.loads((tmp_path / "two" / "config.json").read_text())["hidden"] == 16
    last = [[line.partition(" | 0:")[0] for line in each.splitlines() if line.startswith("epoch 2/2 done")]
            for each in (out, again)]
    assert last[0] == last[1] and "perplexity" in last[0][0]
    one, two = (checkpoint.load(checkpoint.find(str(tmp_path / name))) for name in ("one", "two"))
    for name, array in one.params.items():
        np.testing.assert_array_equal(array, two.params[name])


def test_resume_of_a_run_of_images(run_train: Train, tmp_path: Path) -> None:
    file = tmp_path / "checkpoints" / "step-00000001.npz"
    checkpoint.save(checkpoint.Checkpoint({}, {}, {}, Config(), ["cat", "dog"]), file)
    code, _, err = run_train("language-model", "--resume", tmp_path)
    assert code == 2 and f"error: {file} belongs to a network for images, not to a language model: give another" in err


def test_a_run_begins_and_goes_on_by_the_same_command(run_train: Train, tmp_path: Path) -> None:
    """A reached --max-steps is not kept."""
    text = tmp_path / "text.txt"
    text.write_text("a b c b c a " * 400)
    options = [*SMALL, "--text", text, "--epochs", "1", "--output", tmp_path / "run", "--resume", "auto"]
    code, out, err = run_train(*options, "--max-steps", "5")
    assert code == 0 and "stopped after step 5: --max-steps is 5" in out, err
    code, out, err = run_train(*options)
    assert code == 0 and "step 6/15" in out and "--max-steps 5 has been reached and is dropped" in out, err


@pytest.mark.parametrize("options, message", [
    (["--text", "/nowhere.txt"], "cannot read the text /nowhere.txt (No such file or directory): give --text a"),
    (["--hidden", "0"], "--hidden 0 must be at least 1"),
    (["--vocabulary", "1"], "--vocabulary 1 must be at least 2"),
    (["--hidden", "1000000"], "lower --hidden, --layers or --vocabulary"),
    (["--sequences", "100000"], "too few for 100000 sequences of 8 steps"),
])
def test_bad_input(run_train: Train, options: list[str], message: str, tmp_path: Path) -> None:
    code, _, err = run_train(*SMALL, "--output", tmp_path / "run", *options)
    assert code == 2 and message in err and "Traceback" not in err


def test_elastic_runs_are_refused(run_train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elastic runs are refused before anything is built: they would end at the first loss of a process, although the
    launcher says that they continue."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    code, _, err = run_train(*SMALL)
    assert code == 2 and err.startswith("error: --min-np is for training with images: language-model cannot continue")


def test_a_lost_process_is_told(run_train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(trainer: object, recorder: object) -> None:
        raise mx.base.MXNetError("Gloo: connection closed by peer")

    monkeypatch.setattr(loop.Trainer, "run", fail)
    code, _, err = run_train(*SMALL, "--output", tmp_path)
    assert code == 3 and err.startswith("error: the connection to another process of this run is lost; resume from the")
    assert err.endswith(f" -m train language-model --resume {tmp_path}\n")


def test_its_step_has_the_gradient_of_the_network(rng: np.random.Generator) -> None:
    """The embedding's gradient is the sum over its two uses."""
    model = LanguageModel(words=16, hidden=6, layers=2, steps=4, sequences=3)
    values = {name: array.astype(np.float64) for name, array in model.initial_values(seed=0).items()}
    tokens = rng.integers(0, 16, (2, 12)).astype(np.float64)
    values |= {"data": tokens[0].reshape(12, 1, 1, 1), "softmax_label": tokens[1]}
    results = run(training_step(model.graph, model.shapes, "float32", fewest), values)
    tensors = forward(model.graph, {Ref(name): array for name, array in values.items()}, training=True)
    gradients = backward(model.graph, tensors)
    for name in ("embedding_weight", "rnn_parameters", "scores_bias"):
        np.testing.assert_allclose(results[f"{name}_grad"], gradients[Ref(name)], rtol=0, atol=1e-12)
    log_p = np.log(tensors[Ref("softmax")][np.arange(12), tokens[1].astype(int)])
    assert results["loss"] == pytest.approx(-log_p.sum())

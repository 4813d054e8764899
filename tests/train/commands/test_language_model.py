"""The command language-model: a word language model through the loop that trains classifiers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from graph_passes import Ref
from graph_passes.executors.reference import backward, forward, run
from graph_passes.passes import fused_way
from graph_passes.pipeline import training_step
from train.language_model import LanguageModel

SMALL = ["--hidden", "16", "--layers", "1", "--sequences", "16", "--steps", "8", "--log-every", "100"]
REPOSITORY = Path(__file__).resolve().parents[3]


def train(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: MXNet's RNN needs oneDNN, which the tests turn off."""
    environment = {**os.environ, "MXNET_MKLDNN_ENABLED": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "train", "language-model", "--output", str(folder), "--device",
               "cpu", *SMALL, *options]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)


def perplexities(output: str) -> list[float]:
    """Of validation, by epoch."""
    return [float(found) for found in re.findall(r"in validation ([\d.]+)", output)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences in which each word but the first follows from the one before."""
    rng = np.random.default_rng(0)
    animals, sounds = ("cat", "dog", "bird"), ("meows", "barks", "sings")
    lines = [f"my {animals[i]} {sounds[i]} in the morning" for i in rng.integers(0, 3, 1500)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines))
    return path


def test_it_learns_a_text(text: Path, tmp_path: Path) -> None:
    """A line of 7 words has a single one that cannot be known: the perplexity goes towards 3 ** (1 / 7) = 1.17."""
    done = train(tmp_path / "run", "--text", str(text), "--epochs", "3")
    assert done.returncode == 0, done.stderr
    found = perplexities(done.stdout)
    assert len(found) == 3 and found[-1] < 1.25, done.stdout
    assert "10,500 words, 16 in the vocabulary" in done.stdout
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_executors_agree(text: Path, tmp_path: Path) -> None:
    """Both from the same values; after 20 steps of fp32, whose sums are in another order."""
    found = [perplexities(train(tmp_path / executor, "--text", str(text), "--epochs", "1", "--max-steps", "20",
                                "--executor", executor).stdout) for executor in ("mxnet", "reference")]
    assert found[0] == found[1] == []  # it has ended before a validation
    losses = []
    for executor in ("mxnet", "reference"):
        metrics = (tmp_path / executor / "metrics.jsonl").read_text()
        losses.append([float(loss) for loss in re.findall(r'"loss": ([\d.]+)', metrics)])
    assert losses[0] and losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("options, message", [
    (["--text", "/nowhere.txt"], "cannot read the text /nowhere.txt (No such file or directory): give a text file"),
    (["--hidden", "0"], "--hidden 0 must be at least 1"),
    (["--sequences", "100000"], "are too few for 100000 sequences of 8 steps"),
])
def test_bad_input(options: list[str], message: str, tmp_path: Path) -> None:
    done = train(tmp_path / "run", *options)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_its_step_has_the_gradient_of_the_network(rng: np.random.Generator) -> None:
    """The embedding's is that of its two uses together."""
    model = LanguageModel(words=16, hidden=6, layers=2, steps=4, sequences=3)
    values = {name: array.astype(np.float64) for name, array in model.initial_values(seed=0).items()}
    tokens = rng.integers(0, 16, (2, 12)).astype(np.float64)
    values |= {"data": tokens[0].reshape(12, 1, 1, 1), "softmax_label": tokens[1]}
    results = run(training_step(model.graph, model.shapes, "float32", fused_way), values)
    tensors = forward(model.graph, {Ref(name): array for name, array in values.items()}, training=True)
    gradients = backward(model.graph, tensors)
    for name in ("embedding_weight", "rnn_parameters", "scores_bias"):
        np.testing.assert_allclose(results[f"{name}_grad"], gradients[Ref(name)], rtol=0, atol=1e-12)
    log_p = np.log(tensors[Ref("softmax")][np.arange(12), tokens[1].astype(int)])
    assert results["loss"] == pytest.approx(-log_p.sum())

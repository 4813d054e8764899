"""Runs with frozen layers, a slower backbone, and patience."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from graph_passes import passes, roles
from train import checkpoint, loop, models
from train.models.network import init_params

pytestmark = pytest.mark.usefixtures("narrow_network")

FINE_TUNING = ("--freeze", "stage2", "--backbone-lr-factor", "0.1", "--ema-decay", "0.9", "--weights")


def last_of(folder):
    return checkpoint.load(checkpoint.find(str(folder)))


@pytest.mark.long(but=["mxnet"])
@pytest.mark.parametrize("executor", ["mxnet", "reference"])
def test_frozen_layers_keep_their_initial_values(run_train, tiny_options, initial_weights, tmp_path, executor):
    steps = () if executor == "mxnet" else ("--max-steps", "1", "--batch-size", "2")
    code, out, err = run_train("--output", tmp_path / "run", *tiny_options, *FINE_TUNING, initial_weights,
                               "--executor", executor, *steps)
    assert code == 0, err
    assert re.search(r"\n\d+,\d+ of \d+,\d+ parameters are trained \(--freeze stage2\)\n", out)
    end, network = last_of(tmp_path / "run"), models.create("resnet18", 3)
    frozen = roles.frozen(passes.freeze(network.graph, "stage2"))
    before = dict(zip(("params", "aux"), init_params(network.symbol, end.config.seed, zero_init_residual=False),
                      strict=True))
    for values in (end.params | end.aux, end.ema):
        for name, value in values.items():
            same = np.array_equal(value, (before["params"] | before["aux"])[name])
            if name in frozen or name.endswith("_weight"):  # a gamma of 1 may move by less than its rounding
                assert same == (name in frozen), name
    assert end.state["momentum"].keys() == end.params.keys() - frozen
    assert checkpoint.load_trained(str(tmp_path / "run")).params.keys() == before["params"].keys()


@pytest.mark.long
def test_a_stopped_run_goes_on_to_the_same_bits(run_train, tiny_options, initial_weights, tmp_path):
    for name, limits in (("whole", ["0"]), ("parts", ["5", "0"])):
        for limit in limits:
            code, _, err = run_train("--output", tmp_path / name, "--resume", "auto", *tiny_options, *FINE_TUNING,
                                     initial_weights, "--max-steps", limit)
            assert code == 0, err
    whole, parts = last_of(tmp_path / "whole"), last_of(tmp_path / "parts")
    assert whole.progress.step == parts.progress.step == 12
    for one, other in ((whole.params, parts.params), (whole.aux, parts.aux), (whole.ema, parts.ema),
                       (whole.state["momentum"], parts.state["momentum"])):
        assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_branches_that_are_all_frozen_cannot_be_dropped(run_train, tiny_options, initial_weights, tmp_path):
    code, _, err = run_train("--output", tmp_path / "run", *tiny_options, "--freeze", "backbone", "--weights",
                             initial_weights, "--stochastic-depth", "0.1")
    assert code == 2 and "--stochastic-depth 0.1, of resnet18: all residual branches are frozen, so" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_other_layers_cannot_be_frozen_by_going_on(run_train, tiny_options, tmp_path):
    folder = tmp_path / "run"
    assert run_train("--output", folder, *tiny_options, "--max-steps", "1")[0] == 0
    code, _, err = run_train("--resume", folder, "--freeze", "stem")
    assert code == 2 and "no --freeze, but this one has --freeze stem: to train other layers, begin a new run" in err
    assert last_of(folder).progress.step == 1


def test_factor_of_a_backbone_that_is_frozen(run_train, tiny_options, initial_weights, tmp_path):
    code, _, err = run_train("--output", tmp_path / "run", *tiny_options, "--freeze", "backbone",
                             "--backbone-lr-factor", "0.1", "--weights", initial_weights)
    assert code == 2 and "--backbone-lr-factor 0.1 has no effect with --freeze backbone" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name, words", [
    ("stage7", "no layer with parameters has a name that begins with 'stage7': there are stem, stage1"),
    ("classifier", "nothing would be left to train: freeze backbone, or a part of it")])
def test_layers_that_cannot_be_frozen(run_train, tiny_options, initial_weights, tmp_path, name, words):
    code, _, err = run_train("--output", tmp_path / "run", *tiny_options, "--freeze", name, "--weights",
                             initial_weights)
    assert code == 2 and f"--freeze {name}, of resnet18: " in err and words in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", [("--freeze", "backbone"), ("--backbone-lr-factor", "0.1"),
                                    ("--config", "finetune")], ids=" ".join)
@pytest.mark.parametrize("command", ["train", "compare-precision"])
def test_what_is_for_trained_weights(command, option, run_train, tiny_options, tmp_path):
    code, _, err = run_train(command, "--output", tmp_path / "run", *tiny_options, *option)
    assert code == 2 and err == (f"error: {' '.join(option)} is for trained weights (--weights), and this run would "
                                 "begin with random ones: leave it out, or add --weights\n")
    assert not (tmp_path / "run").exists()


def make_accuracies(monkeypatch, top1s):
    """Set the accuracies of the next validations, whatever the network predicts."""
    real, fractions = loop.validate, iter(top1s)

    def validated(*arguments):
        found = real(*arguments)
        return found._replace(metrics=found.metrics._replace(top1=next(fractions) * found.metrics.count))

    monkeypatch.setattr(loop, "validate", validated)


@pytest.mark.long
def test_patience(run_train, tiny_options, tmp_path, monkeypatch):
    """The third of these validations is the best, the next two are not: the run ends and keeps the third's weights."""
    make_accuracies(monkeypatch, [0.25, 0.375, 0.5, 0.5, 0.375, 0.75])
    folder = tmp_path / "run"
    code, out, err = run_train("--output", folder, *tiny_options, "--epochs", "6", "--patience", "2")
    assert code == 0, err
    assert "stopped: 2 validations in a row have not raised the top-1 on the training images above 0.5000" in out
    assert last_of(folder).progress.epoch == 5
    assert checkpoint.load(checkpoint.find(str(folder), prefer_best=True)).progress.epoch == 3
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert [line["reason"] for line in lines if line["event"] == "stop"]


@pytest.mark.long
def test_patience_counts_through_a_resume(run_train, tiny_options, tmp_path, monkeypatch):
    make_accuracies(monkeypatch, [0.5] * 6)
    folder, options = tmp_path / "run", (*tiny_options, "--epochs", "6", "--patience", "3")
    assert run_train("--output", folder, *options, "--max-steps", "15")[0] == 0  # in the third epoch
    assert last_of(folder).progress.validations_since_best == 1
    for _ in range(2):  # a run that has ended is not resumed
        code, out, err = run_train("--resume", folder, "--max-steps", "0")
        assert code == 0 and "stopped: 3 validations in a row" in out, err
        assert last_of(folder).progress.epoch == 4


@pytest.mark.long
def test_a_run_that_has_reached_its_target_is_done(run_train, tiny_options, tmp_path, monkeypatch):
    make_accuracies(monkeypatch, [0.5, 0.75, 0.25])
    folder = tmp_path / "run"
    for arguments in (("--output", folder, *tiny_options, "--epochs", "3", "--target-accuracy", "0.75"),
                      ("--resume", folder)):
        code, out, err = run_train(*arguments)
        assert code == 0 and "is 0.7500 and has reached the target of 0.75" in out, err
        assert last_of(folder).progress.epoch == 2
    assert run_train("--resume", folder, "--target-accuracy", "0.9")[0] == 0
    assert last_of(folder).progress.epoch == 3


@pytest.mark.long
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_going_on_without_the_best_weights(is_elsewhere, run_train, tiny_options, tmp_path, monkeypatch):
    """If a run is resumed in another folder, or if best.npz was removed, the weights of the next validation are the
    best."""
    make_accuracies(monkeypatch, [0.75, 0.5, 0.25])
    folder = tmp_path / "run"
    assert run_train("--output", folder, *tiny_options, "--epochs", "1", "--patience", "1")[0] == 0
    if is_elsewhere:
        folder = tmp_path / "other"
    else:
        (folder / "checkpoints" / "best.npz").unlink()
    code, out, err = run_train("--resume", tmp_path / "run", "--output", folder, "--epochs", "3")
    assert code == 0 and "stopped: 1 validations in a row have not raised" in out and "above 0.5000" in out, (out, err)
    best = checkpoint.load(checkpoint.find(str(folder), prefer_best=True))
    assert best.progress.epoch == 2 and best.progress.best_top1 == 0.5
    assert last_of(folder).progress.epoch == 3

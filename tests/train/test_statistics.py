"""BatchNorm's running statistics without their initial values: in validation, in checkpoints and everything made from
them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from common.mxnet_compat import mx
from graph_passes.executors import create_executor
from train import TrainError, checkpoint, models
from train.build import training_graph
from train.config import Config
from train.optimizer import ema_decay, make_optimizer
from train.statistics import LEAST, InitialShares

pytestmark = pytest.mark.usefixtures("narrow_network")

BATCH = 4


def executor_of(name, freeze=""):
    network = models.create("resnet18", 3)
    shapes = {"data": (BATCH, 32, 32, 3), "softmax_label": (BATCH,)}
    executor = create_executor(name, training_graph(Config(freeze=freeze), network), shapes, "cpu(0)")
    executor.set_params(*network.initial_values(0, zero_init_residual=False))
    return executor


def batch_of(seed):
    random = np.random.default_rng(seed)
    return mx.nd.array(random.standard_normal((BATCH, 32, 32, 3))), mx.nd.array(random.integers(0, 3, BATCH))


def statistics(executor):
    return executor.get_params()[1]


def unbiased(executor, shares):
    with shares.divided_out(executor, is_averaged=False):
        return statistics(executor)


@pytest.mark.parametrize("name", ["mxnet", "reference"])
def test_statistics_of_one_batch_are_that_batch_s(name, seed):
    """The corrected statistics are the batch's own, however often it has been seen. The executor continues with its
    uncorrected statistics, to the bit."""
    executor, batch = executor_of(name), batch_of(seed)
    shares = InitialShares(executor)
    once = None
    for number in range(1, 4):
        executor.forward_backward(*batch)
        shares.step(1, 0.0)
        before, found = statistics(executor), unbiased(executor, shares)
        once = once or found
        assert found.keys() == before.keys() == shares.own.keys()
        for key, values in found.items():
            np.testing.assert_allclose(values, once[key], rtol=2e-4, atol=2e-6, err_msg=key)
            share, initial = 0.9**number, float(key.endswith("_var"))
            np.testing.assert_allclose(before[key], share * initial + (1 - share) * values, rtol=1e-5, atol=1e-6)
        for key, values in statistics(executor).items():
            assert np.array_equal(values, before[key]), key


def test_executors_agree(seed):
    found = []
    for name in ("mxnet", "reference"):
        executor = executor_of(name)
        shares = InitialShares(executor)
        for number in range(2):
            executor.forward_backward(*batch_of(seed + number))
            shares.step(1, 0.0)
        found.append(unbiased(executor, shares))
    for key, values in found[0].items():
        np.testing.assert_allclose(values, found[1][key], rtol=1e-3, atol=1e-5, err_msg=key)


def test_averages_hold_the_average_of_the_shares(seed):
    """If all statistics are of the same batch, their averages are that batch's statistics."""
    executor, batch, config = executor_of("mxnet"), batch_of(seed), Config(ema_decay=0.9, optimizer="sgd")
    optimizer, shares = make_optimizer(executor, config), InitialShares(executor)
    for step in range(5):
        executor.forward_backward(*batch)
        decay = ema_decay(config.ema_decay, step)
        optimizer.step(0.0, ema_decay=decay)
        shares.step(1, decay)
    own = unbiased(executor, shares)
    optimizer.swap_ema()
    with shares.divided_out(executor, is_averaged=True):
        averages = statistics(executor)
    assert all(shares.averaged[key] > share for key, share in shares.own.items())
    for key, values in own.items():
        np.testing.assert_allclose(averages[key], values, rtol=2e-4, atol=2e-6, err_msg=key)


def test_frozen_and_trained_statistics_stay_theirs():
    executor = executor_of("mxnet", freeze="stage1")
    frozen = {name for name in executor.aux if name in executor.frozen}
    trained = sorted(executor.aux.keys() - frozen)[0]
    executor.aux[trained][:] = 0.5
    assert frozen and InitialShares(executor).own.keys() == executor.aux.keys() - frozen - {trained}


def test_they_end_with_what_fp32_holds():
    """The shares of the initial values end when fp32 cannot hold them; from then on nothing is corrected."""
    shares = InitialShares(executor_of("mxnet"))
    batches = 0
    while shares.own:
        assert min(shares.own.values()) >= LEAST
        shares.step(2, 0.0)
        batches += 2
    assert 150 < batches < 200 and not shares.averaged


def test_no_variance_is_negative():
    shares = InitialShares(executor_of("mxnet"))
    shares.step(1, 0.0)
    name = "stem_bn_moving_var"
    found, _ = shares.divide_out({name: np.float32([0.9, np.nextafter(np.float32(0.9), np.float32(0))])},
                                 {name: shares.own[name]})
    assert (found[name] >= 0).all() and found[name].max() < 1e-6


@pytest.fixture(scope="module")
def four_classes(tmp_path_factory):
    """48 images, in train and again in val. They are always the same, because the accuracy after twelve steps depends
    on the images."""
    folder, random = tmp_path_factory.mktemp("four_classes"), np.random.default_rng(2)
    tints = [(150, 60, 60), (60, 150, 60), (60, 60, 150), (140, 140, 40)]
    for label, tint in enumerate(tints):
        for number in range(12):
            pixels = np.clip(np.array(tint) + random.integers(-40, 40, (40, 40, 3)), 0, 255).astype(np.uint8)
            for split in ("train", "val"):
                path = folder / split / f"class{label}" / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    return folder


@pytest.mark.parametrize("options", [(), ("--ema-decay", "0.9"), ("--batch-size", "4", "--accumulate", "2")])
def test_few_steps_are_validated_as_they_are_trained(four_classes, tmp_path, run_train, options):
    """After twelve steps the running variance still holds 28 % of its initial 1, and the batches' are about 0.01."""
    run = tmp_path / "run"
    code, out, err = run_train("--data", four_classes, "--model", "resnet18", "--image-size", 32, "--batch-size", 8,
                               "--epochs", 2, "--device", "cpu", "--num-threads", 1, "--no-tensorboard", "--output",
                               run, "--warmup-epochs", 0, "--optimizer", "sgd", "--learning-rate", 0.5, *options)
    assert code == 0, err
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (row,) = (row for row in rows if row["event"] == "epoch" and row["epoch"] == 2)
    assert row["val_top1"] >= 0.8 and row["val_loss"] < 0.75 * row["train_loss"], row  # it was above 0.82
    code, out, err = run_train("validate", "--checkpoint", checkpoint.find(run), "--data", four_classes)
    assert code == 0 and f"top-1 {row['val_top1']:.2%}" in out, (row, out, err)


def test_weights_keep_their_statistics(four_classes, tmp_path, run_train):
    """A run that begins with trained weights continues with their statistics."""
    options = ["--data", four_classes, "--model", "resnet18", "--image-size", 32, "--batch-size", 8, "--device", "cpu",
               "--num-threads", 1, "--no-tensorboard", "--warmup-epochs", 0, "--validate-every", 0]
    for name, more in (("one", ()), ("two", ("--weights", tmp_path / "one"))):
        code, _, err = run_train("--output", tmp_path / name, "--max-steps", 3, *options, *more)
        assert code == 0, err
    one, two = (checkpoint.load_checked(checkpoint.find(str(tmp_path / name))) for name in ("one", "two"))
    assert one.biased.aux.keys() == one.aux.keys() == one.biased.aux_shares.keys() and not one.biased.averages
    assert two.biased == checkpoint.Biased()


@pytest.mark.parametrize("change", [{"stem_bn_moving_var": 1.5}, {"stem_bn_moving_var": "half"}, {}, [1]])
def test_damaged_shares_are_refused(tmp_path, change):
    params, aux = models.create("resnet18", 3).initial_values(0)
    name, path = "stem_bn_moving_var", tmp_path / "step-00000001.npz"
    biased = checkpoint.Biased({name: aux[name]}, {}, change)
    checkpoint.save(checkpoint.Checkpoint(params, aux, {}, Config(model="resnet18"), list("abc"), biased=biased), path)
    with pytest.raises(TrainError, match=r"step-00000001.npz is not a complete checkpoint \("):
        checkpoint.load(path)

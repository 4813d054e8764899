"""The random choices of a pass: their distributions, and that they are a function of the position in the run."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from graph_passes.executors import Draws
from train.config import Config
from train.draws import draw


def test_without_mixup_images_stay() -> None:
    assert draw(Config(mixup=0.0, seed=1), 2, 3) == Draws(mixup=1.0)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
def test_lambda_is_the_larger_half_of_beta(alpha: float, rng: np.random.Generator) -> None:
    config = Config(mixup=alpha, seed=int(rng.integers(2**31)))
    drawn = np.array([draw(config, epoch, batch).mixup for epoch in range(5) for batch in range(400)])
    assert drawn.min() >= 0.5 and drawn.max() <= 1
    # lambda * (1 - lambda) is the same for lambda and 1 - lambda; its mean under Beta(a, a) is a / (4 a + 2). The
    # largest value is 1/4, so the mean of 2000 has a standard error below 0.0028; five of them are allowed.
    assert np.mean(drawn * (1 - drawn)) == pytest.approx(alpha / (4 * alpha + 2), abs=0.014)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 4.0])
def test_boxes_of_cutmix(alpha: float, rng: np.random.Generator) -> None:
    """Their centres are anywhere. Boxes that no edge cuts off have the area 1 - lambda, with lambda from Beta."""
    config = Config(cutmix=alpha, image_size=224, epochs=9, seed=int(rng.integers(2**31)))
    boxes = np.array([draw(config, epoch, batch).cutmix for epoch in range(5) for batch in range(400)])
    (top, left), (bottom, right) = boxes.T[:2], boxes.T[2:]
    assert boxes.min() == 0 and boxes.max() == 224 and (top <= bottom).all() and (left <= right).all()
    height, width = bottom - top, right - left
    whole = (top > 0) & (left > 0) & (bottom < 224) & (right < 224)
    assert (height == width)[whole].all()
    # The side is r = sqrt(1 - lambda) of the image, and a box stays whole with the probability (1 - r)^2.
    lambdas = np.random.default_rng(1).beta(alpha, alpha, 100_000)
    chance = (1 - np.sqrt(1 - lambdas)) ** 2
    share = chance.mean()
    assert whole.mean() == pytest.approx(share, abs=5 * np.sqrt(share / len(boxes)))
    wanted = np.average(1 - lambdas, weights=chance)
    deviation = np.sqrt(np.average((1 - lambdas - wanted) ** 2, weights=chance) / whole.sum())
    # Sides are even numbers, rounded down by up to two pixels.
    assert (height * width / 224**2)[whole].mean() == pytest.approx(wanted, abs=5 * deviation + 1 / 224)


def test_boxes_are_in_images_of_their_epoch() -> None:
    config = Config(cutmix=1.0, image_size=160, first_image_size=64, resize_epochs=(1.0, 3.0), epochs=5)
    most = [max(max(draw(config, epoch, batch).cutmix or ()) for batch in range(60)) for epoch in range(5)]
    assert most == [64, 64, 128, 160, 160], "some box touches an edge"


def test_mixup_or_cutmix_by_chance() -> None:
    both = [draw(Config(mixup=0.4, cutmix=1.0, cutmix_share=0.3), epoch, batch)
            for epoch in range(4) for batch in range(250)]
    with_box = [draws for draws in both if draws.cutmix]
    assert len(with_box) == pytest.approx(300, abs=5 * np.sqrt(1000 * 0.3 * 0.7))
    assert all(draws.mixup == 1 for draws in with_box)
    assert all(0.5 <= draws.mixup < 1 for draws in both if not draws.cutmix)
    for share, is_cutmix in ((0.0, False), (1.0, True)):
        config = Config(mixup=0.4, cutmix=1.0, cutmix_share=share)
        assert all(bool(draw(config, 0, batch).cutmix) == is_cutmix for batch in range(50))


def test_mixup_alone_draws_what_it_always_did() -> None:
    """Mixup draws the numbers that earlier versions drew, so that their runs resume to the bit."""
    assert draw(Config(mixup=0.4, seed=3), 2, 5, 1).mixup == 0.8259347960390848


@pytest.mark.parametrize("options", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0},
                                     {"stochastic_depth": 0.1}, {"dropout": 0.1}], ids=str)
def test_each_place_in_a_run_has_its_own(options: dict[str, float]) -> None:
    def everywhere() -> list[Draws]:
        config = Config(**options)  # type: ignore[arg-type]  # mypy takes them for any options
        return [draw(replace(config, seed=seed), *place) for seed, *place in itertools.product((0, 1), repeat=4)]

    drawn = everywhere()
    assert len(set(drawn)) == len(drawn)
    assert drawn == everywhere()


def test_masks_have_seeds_of_64_bits_and_of_their_own() -> None:
    config = Config(stochastic_depth=0.1)
    seeds = [draw(config, epoch, batch).seed for epoch in range(2) for batch in range(500)]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0 and 2**63 < max(seeds) < 2**64
    both = draw(replace(config, mixup=0.4, dropout=0.2), 0, 0)
    assert both == Draws(mixup=draw(Config(mixup=0.4), 0, 0).mixup, seed=seeds[0]), "each as without the others"

"""What is random in a pass: its distributions, and that it is a function of where the run stands."""

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


@pytest.mark.parametrize("options", [{"mixup": 0.4}, {"stochastic_depth": 0.1}, {"dropout": 0.1}], ids=str)
def test_each_place_in_a_run_has_its_own(options: dict[str, float]) -> None:
    def everywhere() -> list[Draws]:
        config = Config(**options)
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

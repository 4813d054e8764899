"""Learning rate schedules against closed forms written out here."""

import math

import numpy as np
import pytest

from train.config import Config
from train.schedule import Schedule, image_sizes, make_schedule


def test_warmup_is_linear_and_reaches_the_peak():
    schedule = Schedule("cosine", peak=2.0, total_steps=100, warmup_steps=8)
    assert [schedule(step) for step in range(8)] == pytest.approx([0.25 * k for k in range(1, 9)])
    assert schedule(8) == 2.0


def test_cosine():
    schedule = Schedule("cosine", peak=0.7, total_steps=57, warmup_steps=7, final=0.1)
    for step in range(7, 57):
        assert schedule(step) == pytest.approx(0.1 + 0.6 * math.cos(math.pi * (step - 7) / 100) ** 2)
    assert schedule(57) == pytest.approx(0.1)
    assert schedule(1000) == pytest.approx(0.1)  # it stays there after the end


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_polynomial(power):
    schedule = Schedule("polynomial", peak=3.0, total_steps=40, power=power)
    expected = 3.0 * np.linspace(1, 0, 41) ** power
    assert [schedule(step) for step in range(41)] == pytest.approx(expected)


def test_step():
    schedule = Schedule("step", peak=1.0, total_steps=90, milestones=(30, 60, 80), factor=0.1)
    rates = [schedule(step) for step in range(90)]
    assert rates == pytest.approx([1.0] * 30 + [0.1] * 30 + [0.01] * 20 + [0.001] * 10)


def test_no_warmup_starts_at_the_peak():
    assert Schedule("polynomial", peak=0.3, total_steps=10)(0) == pytest.approx(0.3)


def test_learning_rate_follows_the_global_batch():
    config = Config(batch_size=64, accumulate=2, epochs=10, learning_rate=0.256, warmup_epochs=0.5, schedule="step",
                    decay_epochs=(2.5, 5.0))
    schedule = make_schedule(config, steps_per_epoch=11, num_processes=3)
    assert schedule.peak == pytest.approx(0.256 * 64 * 2 * 3 / 256)
    assert (schedule.warmup_steps, schedule.total_steps, schedule.milestones) == (6, 110, (28, 55))


def test_unknown_kind():
    with pytest.raises(ValueError, match="unknown schedule 'linear'"):
        Schedule("linear", peak=1.0, total_steps=1)(0)


def test_image_sizes():
    config = Config(epochs=7, first_image_size=100, image_size=180, resize_epochs=(1.5, 5.0), warmup_epochs=0)
    # 100 + 80 * (epoch - 1.5) / 3.5 in epochs 2, 3 and 4: 111, 134, 157, each to the nearest multiple of 32
    assert image_sizes(config) == (100, 100, 100, 128, 160, 180, 180)
    assert image_sizes(Config(epochs=3, image_size=48)) == (48, 48, 48)
    at_once = Config(epochs=4, first_image_size=64, image_size=96, resize_epochs=(2, 2), warmup_epochs=0)
    assert image_sizes(at_once) == (64, 64, 96, 96)

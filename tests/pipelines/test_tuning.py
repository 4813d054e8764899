"""The JPEG engine's fraction of the images: given, remembered, or measured once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_records

from common.nvidia_gpus import GpuInfo
from pipelines import LoaderConfig, tuning
from pipelines.bench import LoaderSpeed
from pipelines.sources import open_source


@pytest.fixture
def measured(monkeypatch, tmp_path) -> list[float]:
    """Replace the measurement, without a GPU; returns the list of timed candidates. 0.8 is the fastest, 0.9 hardly
    slower, 1 much slower."""
    timed: list[float] = []

    def time_loader(load: float, seconds: float) -> LoaderSpeed:
        timed.append(load)
        return LoaderSpeed({0.5: 9_000, 0.65: 19_000, 0.8: 20_000, 0.9: 18_100, 1.0: 17_900}[load], 0, [])

    monkeypatch.setenv("RESNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "require_gpu", lambda device_id: None)
    monkeypatch.setattr(tuning, "find_gpus", lambda: [GpuInfo("NVIDIA H200", (9, 0))])
    monkeypatch.setattr(tuning, "DaliLoader", lambda config, shard, source: config.hw_decoder_load)
    monkeypatch.setattr(tuning, "time_loader", time_loader)
    return timed


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A data set of a hundred batches of two images, and one of a batch too few."""
    path = tmp_path_factory.mktemp("tuning") / "train.rec"
    image = encode(smooth_image(np.random.default_rng(0), 8, 8))
    write_records(path, [image] * 200, [0.0] * 200)
    return path


def test_it_is_measured_once(measured, data):
    source = open_source(data, "train")
    config = LoaderConfig(data=str(data), batch_size=2, device="gpu", decoder="gpu", num_threads=4)
    assert tuning.tune(config, source, (0, 1)) == replace(config, hw_decoder_load=0.9)
    assert measured == list(tuning.CANDIDATES)
    again = [config, replace(config, split="val"), replace(config, seed=5)]
    assert [tuning.tune(other, source, (0, 1)).hw_decoder_load for other in again] == [0.9] * 3
    assert len(measured) == len(tuning.CANDIDATES)
    # Other threads, other images: another answer.
    assert tuning.tune(replace(config, num_threads=8), source, (0, 1)).hw_decoder_load == 0.9
    assert len(measured) == 2 * len(tuning.CANDIDATES)


@pytest.mark.parametrize(
    "changes",
    [{"device": "cpu"}, {"decoder": "cpu"}, {"hw_decoder_load": 0.3}, {"split": "val"}, {"batch_size": 3}],
    ids=["on the CPU", "decoded on the CPU", "given", "validation before any training", "too few batches"],
)
def test_it_is_left_alone(measured, data, changes):
    config = LoaderConfig(**{"data": str(data), "batch_size": 2, "device": "gpu", "decoder": "gpu", **changes})
    assert tuning.tune(config, open_source(data, "train"), (0, 1)) == config
    assert not measured

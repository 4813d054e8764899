"""A network's predictions for some validation images: the right classes, the guesses, and the pictures."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipelines import LoaderConfig, open_loader
from train.build import build_executor
from train.config import Config
from train.devices import Placement
from train.errors import TrainError
from train.processes.distributed import Workers
from train.recording.outcomes import spread
from train.report import plots, predictions
from train.report.inspection import SHOWN_SIZE, sample
from train.report.predictions import Predictions
from train.validation import validate

NAMES = ["bricks", "a class with a rather long name, as ImageNet has many", "dots"]


@pytest.fixture
def shown(rng: np.random.Generator) -> Predictions:
    """Eight images in shades of grey; the network is wrong about the second and the last."""
    true = [NAMES[i % 3] for i in range(8)]
    guessed = [NAMES[2] if i == 1 else NAMES[0] if i == 7 else name for i, name in enumerate(true)]
    pictures = np.repeat(rng.integers(0, 256, (8, 40, 40, 1)).astype(np.uint8), 3, axis=3)
    return Predictions(pictures, true, guessed, rng.uniform(0, 1, 8), epoch=3)


@pytest.mark.parametrize(("total", "count", "expected"), [
    (300, 3, [50, 150, 250]), (5, 24, [0, 1, 2, 3, 4]), (24, 24, list(range(24))), (1, 1, [0]),
])
def test_spread(total: int, count: int, expected: list[int]) -> None:
    assert spread(total, count) == expected


@pytest.mark.long(but=["False"])
@pytest.mark.parametrize("broken", [False, True])
def test_predictions_of_the_spread_images(
    broken: bool, tmp_path: Path, narrow_network: None, rng: np.random.Generator
) -> None:
    """The guesses are those that the executor gives for each image alone, and the pictures have the files' pixels. An
    image that cannot be decoded is left out."""
    colours, files = {}, []
    for i in range(30):
        colours[f"{i:02}.png"] = tuple(int(value) for value in rng.integers(0, 256, 3))
        path = tmp_path / "images" / f"class{i // 10}" / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (50, 40), colours[path.name]).save(path)
        files.append(path)
    chosen = spread(30, 24)
    if broken:
        files[chosen[4]].write_bytes(b"no image")
        del chosen[4]
    options = LoaderConfig(data=str(tmp_path / "images"), split="val", image_size=32, batch_size=9)
    placement = Placement("mxnet", "cpu(0)", "")
    executor = build_executor(Config(model="resnet18", image_size=32, batch_size=9), 3, 32, placement, None)
    executor.set_params(*({name: array + rng.standard_normal(array.shape).astype(np.float32) * scale
                           for name, array in arrays.items()}
                          for arrays, scale in zip(executor.get_params(), (0.1, 0.0), strict=True)))
    loader = open_loader(replace(options, on_bad_image="skip"))
    validation = validate(executor, loader, Workers())
    assert validation
    found = sample(validation.outcomes, loader, epoch=7)

    assert (found.true, found.epoch) == ([f"class{i // 10}" for i in chosen], 7)
    assert found.pictures.shape == (len(chosen), SHOWN_SIZE, SHOWN_SIZE, 3)
    expected = np.array([colours[files[i].name] for i in chosen])
    np.testing.assert_allclose(found.pictures.mean((1, 2)), expected, atol=1.0)
    whole = [(batch.data, batch.num_valid) for batch in open_loader(replace(options, on_bad_image="skip"))]
    rows = np.concatenate([executor.forward(data).asnumpy()[:valid] for data, valid in whole])
    numbers = [i for i in range(30) if not broken or files[i].read_bytes() != b"no image"]
    rows = rows[[numbers.index(i) for i in chosen]]
    assert found.guessed == [f"class{i}" for i in rows.argmax(axis=1)]
    np.testing.assert_allclose(found.probability, rows.max(axis=1), rtol=1e-5)


def test_they_are_kept_in_a_file(shown: Predictions, tmp_path: Path) -> None:
    assert predictions.read(tmp_path) is None
    predictions.save(shown, tmp_path)
    kept = predictions.read(tmp_path)
    assert kept
    assert (kept.true, kept.guessed, kept.epoch) == (shown.true, shown.guessed, 3)
    np.testing.assert_array_equal(kept.pictures, shown.pictures)
    np.testing.assert_array_equal(kept.probability, shown.probability)
    assert kept.num_right == 6 and "after 3 epochs" in kept.caption and kept.caption.endswith(": 6 are right.")
    path = tmp_path / predictions.FILE
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(TrainError, match="predictions.npz cannot be read .*: delete it"):
        predictions.read(tmp_path)


def test_the_picture_frames_what_is_wrong(shown: Predictions) -> None:
    """Each image has a bar and a name in the colour of right or wrong; only images with a wrong guess have a frame."""
    theme, sheet = plots.LIGHT, np.asarray(Image.open(io.BytesIO(plots.predictions(shown))))
    assert sheet.shape[1] == 1152
    cell, height = plots._CELL, (sheet.shape[0] - plots._TOP) // 2
    for i in range(8):
        y, x = plots._TOP + i // 6 * height, i % 6 * cell
        part = sheet[y - 6 : y + height - 6, x : x + cell]
        counts = [int((part == tuple(bytes.fromhex(theme.series[k][1:]))).all(axis=2).sum()) for k in (2, 1)]
        is_wrong = i in (1, 7)
        assert counts[not is_wrong] == 0, "nothing in the other colour"
        assert (counts[is_wrong] > 3000) == is_wrong and counts[is_wrong] > 50

"""The command `embed`: features of image files as a NumPy file, and the list of the files beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.errors import UserError
from train.checkpoint import load
from train.command_line import read
from train.commands import embed, export
from train.devices import Placement
from train.features import Features
from train.options.commands import EmbedOptions, ExportOptions

pytestmark = pytest.mark.usefixtures("narrow_network")


def run_embed(*arguments: object) -> None:
    embed.main(read(EmbedOptions, [str(word) for word in arguments], command="embed"))


@pytest.fixture
def photos(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Five images, the third of which is broken."""
    (tmp_path / "photos").mkdir()
    for number in range(5):
        pixels = rng.integers(0, 256, (40 + number, 50, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "photos" / "2.png").write_bytes(b"\x89PNG no image")
    return tmp_path / "photos"


def test_rows_are_in_the_order_of_the_list(
    initial_weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "made" / "features.npy"
    place = ["--checkpoint", initial_weights, "--output", output, "--batch-size", 2, "--on-bad-image", "skip"]
    run_embed(*place, photos)
    out, err = capsys.readouterr()
    features, listed = np.load(output), output.with_suffix(".txt").read_text().splitlines()
    assert listed == [str(photos / f"{number}.png") for number in (0, 1, 3, 4)]
    assert features.dtype == np.float32 and features.shape == (4, load(initial_weights).params[
        "classifier_weight"].shape[1]) and np.isfinite(features).all() and features.std(axis=0).max() > 0
    assert re.match(rf"{re.escape(str(output))}: float32 \(4, 64\), in the order of .*features.txt; .* images/sec", out)
    assert f"skipped: {photos / '2.png'}: " in err
    reverse = tmp_path / "reverse.txt"
    reverse.write_text("\n".join(reversed(listed)))
    run_embed(*place, "--overwrite", reverse)
    np.testing.assert_allclose(np.load(output), features[::-1], rtol=1e-5)


def test_executors_give_what_the_classifier_reads(
    initial_weights: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXNet and the reference end at one tensor; the cuda executor is told to end there."""
    features = {}
    for executor in ("mxnet", "reference"):
        output = tmp_path / f"{executor}.npy"
        run_embed("--checkpoint", initial_weights, "--output", output, "--executor", executor, "--batch-size", 2,
                  "--device", "cpu", "--on-bad-image", "skip", photos)
        features[executor] = np.load(output)
    np.testing.assert_allclose(features["mxnet"], features["reference"], rtol=1e-4, atol=1e-5)  # sums in fp32

    made: dict[str, Any] = {}
    monkeypatch.setattr("train.build.create_executor", lambda name, graph, shapes, device, **options:
                        made.update(options, graph=graph) or SimpleNamespace(set_params=lambda *values: None))
    trained = load(initial_weights)
    Features(trained, replace(trained.config, batch_size=2, dtype="float16"), Placement("cuda", "gpu(0)", ""))
    (reader,) = made["graph"].consumers[made["answer"]]
    assert reader.op == "FullyConnected"


def test_mistakes(initial_weights: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "there.npy").write_bytes(b"of another program")
    (tmp_path / "beside.txt").write_text("of another program")
    good = ["--checkpoint", initial_weights, photos / "0.png"]
    for arguments, sentence in [
        ([photos / "0.png"], "embed needs trained weights: give --checkpoint"),
        (good, "embed writes a NumPy file: give --output features.npy"),
        ([*good, "--output", tmp_path / "a.csv"], "--output .*a.csv must end in .npy: give the NumPy file to write"),
        ([*good, "--output", tmp_path / "there.npy"], "there.npy exists already: give --overwrite"),
        ([*good, "--output", tmp_path / "beside.npy"], "beside.txt exists already: give --overwrite"),
        ([*good, tmp_path / "beside.txt", "--output", tmp_path / "beside.npy", "--overwrite"],
         "beside.npy would replace .*beside.txt, the list of the images to read: give another --output"),
        (["--checkpoint", initial_weights, photos, "--output", tmp_path / "a.npy"], r"2\.png: .*; replace it"),
        (["--checkpoint", initial_weights, photos / "2.png", "--output", tmp_path / "a.npy", "--on-bad-image", "skip"],
         r"no image of 1 can be read, for example .*2\.png: .*; replace them"),
    ]:
        with pytest.raises(UserError, match=sentence):
            run_embed(*arguments)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["beside.txt", "there.npy"]


def test_features_are_for_onnx_in_floats(initial_weights: Path, tmp_path: Path) -> None:
    for more in (["--symbol", tmp_path / "a.json"], ["--onnx", tmp_path / "a.onnx", "--int8", "tensorrt"]):
        arguments = ["--checkpoint", initial_weights, "--features", *more]
        with pytest.raises(UserError, match="--features works only with --onnx FILE and without --int8"):
            export.main(read(ExportOptions, [str(word) for word in arguments], command="export"))
    assert not list(tmp_path.glob("a.*"))

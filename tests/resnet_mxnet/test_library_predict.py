"""`predict` and `embed` of the library: all kinds of images, in any order, with the bits of the commands."""

from __future__ import annotations

import gc
import io
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import resnet_mxnet as rm
from train import prediction
from train.command_line import read
from train.commands import predict
from train.options.commands import PredictOptions
from train.prediction import Kept


def of_command(run: rm.Run, *arguments: object, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The output of `python -m train predict --json` for some files."""
    capsys.readouterr()
    line = ["--checkpoint", str(run.folder), "--json", *map(str, arguments)]
    predict.main(read(PredictOptions, line, command="predict"))
    return json.loads(capsys.readouterr().out)


def as_plain(found: list[rm.Prediction]) -> list[list[dict[str, Any]]]:
    return [[{"class": guess.name, "index": guess.index, "probability": guess.probability} for guess in each.guesses]
            for each in found]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, seed: int) -> list[Path]:
    """Seven losslessly stored images of any sizes; EXIF rotates one of them."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(seed)
    for number, size in enumerate([(32, 32), (33, 60), (90, 41), (200, 150), (31, 30), (64, 300)]):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 5, 3), np.uint8))
        coarse.resize(size, Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: rotated by 90 degrees
    coarse.resize((70, 40)).save(folder / "6.png", exif=exif)
    return sorted(folder.iterdir())


def pixels_of(path: Path) -> np.ndarray:
    """The pixels that a decoder with EXIF support returns for a lossless file."""
    from PIL import ImageOps

    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize("count", [1, 3, 7])
def test_all_kinds_give_the_bits_of_the_command(
    run: rm.Run, net: rm.TrainedNetwork, pictures: list[Path], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The results have the bits of the command's, also for a folder with several batches, and after other calls of the
    same network."""
    chosen = pictures[-count:]  # including the rotated one
    wanted = [entry["predictions"] for entry in of_command(run, *chosen, capsys=capsys)]
    for kind in (str, Path, Path.read_bytes, pixels_of, Image.open):
        assert as_plain(net.predict([kind(path) for path in chosen])) == wanted, kind
    assert as_plain(net.predict(pixels_of(path) for path in chosen)) == wanted


def test_several_batches(run: rm.Run, pictures: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [entry["predictions"] for entry in of_command(run, pictures[0].parent, "--batch-size", 2, capsys=capsys)]
    with rm.load(run.folder, batch_size=2) as net:
        found = net.predict(pictures[0].parent)
        assert as_plain(found) == wanted and [each.file for each in found] == pictures
        assert as_plain(net.predict(map(pixels_of, pictures))) == wanted


def test_real_photographs(run: rm.Run, net: rm.TrainedNetwork, real_data: Path, capsys: pytest.CaptureFixture[str]
                          ) -> None:
    photographs = sorted((real_data / "imagenet_sample").rglob("*.JPEG"))[:5]
    if not photographs:
        pytest.skip("no JPEG in imagenet_sample")
    wanted = [entry["predictions"] for entry in of_command(run, *photographs, capsys=capsys)]
    assert as_plain(net.predict(photographs)) == wanted
    assert as_plain(net.predict([path.read_bytes() for path in photographs])) == wanted


def test_kinds_and_sizes_may_be_mixed(net: rm.TrainedNetwork, pictures: list[Path]) -> None:
    """The order stays. Batches of other kinds have other sizes, which may change the last bits."""
    kinds = [str, pixels_of, Path.read_bytes, Image.open, pixels_of, Path, bytearray]
    mixed = [kind(path.read_bytes() if kind is bytearray else path) for kind, path in zip(kinds, pictures, strict=True)]
    found, wanted = net.predict([*mixed, pictures[0].parent], top=3), net.predict([*pictures, *pictures], top=3)
    assert len(found) == 14 and len({each.best.probability for each in wanted}) > 5
    for ours, theirs in zip(found, wanted, strict=True):
        assert [guess.index for guess in ours.guesses] == [guess.index for guess in theirs.guesses]
        assert ours.best.probability == pytest.approx(theirs.best.probability, abs=1e-6)


def test_one_in_one_out_a_list_in_a_list_out(net: rm.TrainedNetwork, pictures: list[Path], tmp_path: Path) -> None:
    listed = tmp_path / "some.txt"
    listed.write_text(f"{pictures[0]}\n{pictures[1]}\n")
    for one in (pictures[0], pixels_of(pictures[0]), pictures[0].read_bytes(), Image.open(pictures[0])):
        found = net.predict(one)
        assert isinstance(found, rm.Prediction) and len(found.guesses) == 3 and found.image is one
    several: list[tuple[Any, int]] = [([pictures[0]], 1), ([], 0), (iter(pictures[:2]), 2), (listed, 2),
                                      (np.stack(3 * [pixels_of(pictures[0])]), 3), (str(pictures[0].parent), 7)]
    for given, count in several:
        found = net.predict(given)
        assert isinstance(found, list) and len(found) == count
    assert net.embed(pictures[0]).shape == (net.num_features,) and net.embed([]).shape == (0, net.num_features)


def broken_images(tmp_path: Path) -> list[Any]:
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no image")
    truncated = io.BytesIO()
    Image.effect_noise((80, 80), 90).save(truncated, "PNG")
    cut_off = Image.open(io.BytesIO(truncated.getvalue()[:2000]))
    return [tmp_path / "broken.jpg", tmp_path / "missing.jpg", b"", b"no image", cut_off]


def test_a_broken_image_gives_its_error_in_its_place(net: rm.TrainedNetwork, pictures: list[Path], tmp_path: Path
                                                     ) -> None:
    broken = broken_images(tmp_path)
    for place, bad in enumerate(broken):
        images: list[Any] = [pictures[0], pixels_of(pictures[1]), pictures[2].read_bytes()]
        images.insert(place % 4, bad)
        found = net.predict(images, on_bad_image="skip")
        assert [bool(each.error) for each in found] == [image is bad for image in images]
        features = net.embed(images, on_bad_image="skip")
        assert np.isnan(features).all(axis=1).tolist() == [image is bad for image in images]
        with pytest.raises(rm.UserError, match="; replace it, list all such images with"):
            net.predict(images)
    assert all(each.error and not each.guesses for each in net.predict(broken, on_bad_image="skip"))
    with pytest.raises(rm.UserError, match="there is no prediction: cannot be read"):
        _ = net.predict(tmp_path / "missing.jpg", on_bad_image="skip").best


def test_a_damaged_image_is_told(net: rm.TrainedNetwork, pictures: list[Path], seed: int) -> None:
    content = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(content, "JPEG", quality=90)
    damaged = bytearray(content.getvalue())
    damaged[len(damaged) // 2 : len(damaged) // 2 + 64] = bytes(range(64))
    found = net.predict([pictures[0].read_bytes(), bytes(damaged)])
    assert not found[0].damage and found[1].damage and found[1].guesses


@pytest.mark.parametrize("image, sentence", [
    (3, "image 0 is of the type int: give a path, the bytes of an image file, a uint8 array"),
    (np.zeros((8, 8), np.uint8), r"image 0 is an array of uint8 with the shape \(8, 8\): give"),
    (np.zeros((8, 8, 3), np.float32), "image 0 is an array of float32 with the shape"),
    (np.zeros((0, 8, 3), np.uint8), "image 0 is an array of uint8 with the shape"),
    ([np.zeros((8, 8, 3), np.uint8), None], "image 1 is of the type NoneType: give"),
])
def test_what_is_no_image(net: rm.TrainedNetwork, image: Any, sentence: str) -> None:
    with pytest.raises(rm.UserError, match=sentence):
        net.predict(image, on_bad_image="skip")


@pytest.mark.parametrize("options, sentence", [
    ({"top": 4}, "--top 4 is more than the 3 classes of"), ({"top": 0}, "--top 0 must be at least 1"),
    ({"on_bad_image": "raise"}, "on_bad_image is 'raise': give 'error' or 'skip'"),
])
def test_wrong_options(net: rm.TrainedNetwork, pictures: list[Path], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(rm.UserError, match=sentence):
        net.predict(pictures, **options)


def test_features_are_what_the_classifier_reads(net: rm.TrainedNetwork, pictures: list[Path]) -> None:
    features = net.embed(pictures)
    assert features.dtype == np.float32 and features.shape == (7, net.num_features)
    params = net._predictor.trained.params
    scores = features @ params["classifier_weight"].T + params["classifier_bias"]
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    wanted = exponentials / exponentials.sum(axis=1, keepdims=True)
    for each, probabilities in zip(net.predict(pictures), wanted, strict=True):
        assert {guess.index: pytest.approx(guess.probability, abs=1e-5) for guess in each.guesses} == dict(
            enumerate(probabilities))


def test_networks_side_by_side_and_threads(run: rm.Run, net: rm.TrainedNetwork, pictures: list[Path]) -> None:
    wanted = as_plain(net.predict(pictures))
    found: list[list[list[dict[str, Any]]]] = []
    with rm.load(run.folder) as other:
        threads = [threading.Thread(target=lambda each=each: found.append(as_plain(each.predict(pictures))))
                   for each in (net, other, net, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == 4 * [wanted]


def test_a_closed_network(run: rm.Run, pictures: list[Path]) -> None:
    with rm.load(run.folder) as net:
        net.predict(pictures[0])
    net.close()
    with pytest.raises(rm.UserError, match="the network of .* is closed: load it again"):
        net.predict(pictures[0])


def test_what_goes_out_of_scope_is_closed(run: rm.Run, pictures: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    close = prediction.Scores.close
    monkeypatch.setattr(prediction.Scores, "close", lambda scores: (closed.append("scores"), close(scores)))
    net = rm.load(run.folder)
    net.predict(pictures[0])
    gone = weakref.ref(net._predictor)
    del net
    gc.collect()
    assert gone() is None and closed == ["scores"]


def test_few_are_kept() -> None:
    class Item:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    closed: list[str] = []
    kept: Kept[Item] = Kept(2)
    for name in "abacad":
        kept.get(name, lambda name=name: Item(name))
    assert closed == ["b", "c"]
    kept.drop("x")
    kept.close()
    assert sorted(closed) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("device, sentence", [
    ("gpu(7)", "--device gpu"), ("tpu", "--device tpu is not one of auto, cpu, gpu"),
    ("cuda(0)", r"there is no device 'cuda\(0\)'"),
])
def test_devices_that_are_not_there(run: rm.Run, device: str, sentence: str) -> None:
    with pytest.raises(rm.UserError, match=sentence):
        rm.load(run.folder, device=device)


def test_devices_by_number(run: rm.Run) -> None:
    with rm.load(run.folder, device="cpu(0)") as net:
        assert net.device == "cpu(0)" and repr(net).endswith("resnet18 with 3 classes, 32 pixels, cpu(0))")


def test_a_notebook_shows_predictions(net: rm.TrainedNetwork, pictures: list[Path], tmp_path: Path) -> None:
    found = net.predict([*pictures, pixels_of(pictures[0]), pictures[0].read_bytes(), tmp_path / "<missing>.jpg"],
                        on_bad_image="skip")
    shown = found._repr_html_()
    assert shown.count("data:image/png;base64,") == 9 and "class1" in shown and "cannot be read" in shown
    assert found[0]._repr_html_().count("data:image/png;base64,") == 1
    assert f"{pictures[0].parent.name}/0.png" in shown and "&lt;missing&gt;.jpg" in shown
    many = rm.Predictions(30 * [found[0]])._repr_html_()
    assert many.count("data:image/png;base64,") == 24 and "and 6 more" in many


def test_the_form_of_a_prediction(net: rm.TrainedNetwork, pictures: list[Path]) -> None:
    found = net.predict(pixels_of(pictures[0]))
    assert repr(found).startswith("Prediction(guesses=[Guess(name=") and "array" not in repr(found)
    assert sum(guess.probability for guess in found.guesses) == pytest.approx(1, abs=1e-5)
    assert found.best is found.guesses[0] and found.best.name in net.classes


def make(*arguments: Any) -> Any:
    from graph_passes.executors import create_executor

    return create_executor(*arguments)


@pytest.mark.parametrize("images, sentence", [
    ("", "the path of the images is empty"), ({"a.png"}, "a set is not a list of images"),
    ({"a.png": 1}, "a dict is not a list of images"),
    (io.BytesIO(b"image"), r"an open file \(BytesIO\): give its path or"),
    (Image.new("F", (4, 4)), "its pixels are floating-point numbers; convert it to 8 bits"),
])
def test_what_is_no_list_of_images(net: rm.TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: Any,
                                   sentence: str) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (4, 4)).save("a.png")
    for ask in (net.predict, net.embed):
        with pytest.raises(rm.UserError, match=sentence):
            ask(images)


@pytest.mark.parametrize("top", ["2", 1.5, None, True])
def test_the_number_of_classes_is_a_whole_number(net: rm.TrainedNetwork, top: Any) -> None:
    with pytest.raises(rm.UserError, match="top is .*: give a whole number"):
        net.predict(np.zeros((4, 4, 3), np.uint8), top=top)
    assert len(net.predict(np.zeros((4, 4, 3), np.uint8), top=np.int64(2)).guesses) == 2

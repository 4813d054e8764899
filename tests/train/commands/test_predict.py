"""Prediction: right classes for right files, in every form of output."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.errors import UserError
from common.mxnet_compat import mx
from graph_passes import Graph
from graph_passes.executors import create_executor
from pipelines import DataError, open_files
from train.checkpoint import Checkpoint, load, save
from train.command_line import read
from train.commands import predict
from train.config import Config
from train.errors import TrainError
from train.models.network import init_params
from train.models.resnet import resnet
from train.options.commands import PredictOptions
from train.prediction import Guess, Prediction

SIZE = 48
REPOSITORY = Path(__file__).resolve().parents[3]
CLASS_NAMES = ["red", "green", "blue", "grey", "a class with a rather long name, as ImageNet has many"]


def run_predict(arguments: list[str]) -> None:
    predict.main(read(PredictOptions, arguments, command="predict"))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose network tells plain colours apart: its classifier is fitted to their features."""
    symbol = resnet(18, len(CLASS_NAMES))
    params, aux = init_params(symbol, seed=3)
    for name in params:
        if name.endswith("_gamma"):
            params[name] = np.ones_like(params[name])
    folder = tmp_path_factory.mktemp("run")
    colours = [(220, 20, 20), (20, 220, 20), (20, 20, 220), (128, 128, 128)]
    for colour, name in zip(colours, CLASS_NAMES, strict=False):
        Image.new("RGB", (80, 60), colour).save(folder / f"{name}.png")
    features_symbol = symbol.get_internals()["flatten_output"]
    graph = Graph.from_json(features_symbol.tojson())
    (batch,) = open_files([folder / f"{name}.png" for name in CLASS_NAMES[:4]], SIZE, 4)
    executor = create_executor("mxnet", graph, {"data": (4, SIZE, SIZE, 3)}, "cpu(0)")
    executor.set_params({k: v for k, v in params.items() if not k.startswith("classifier")}, aux)
    features = executor.forward(batch.data).asnumpy()
    # Scores of 8 for the right class and 0 for the others: the least-norm solution of the linear equations. Its four
    # rows sum to zero, so one singular value is only rounding and must not be inverted.
    centre = features.mean(axis=0)
    params["classifier_weight"] = np.zeros_like(params["classifier_weight"])
    params["classifier_weight"][:4] = 8 * np.linalg.pinv(features - centre, rcond=1e-5).T
    params["classifier_bias"] = (-params["classifier_weight"] @ centre).astype(np.float32)
    config = Config(model="resnet18", image_size=SIZE)
    save(Checkpoint(params, aux, {}, config, CLASS_NAMES), folder / "checkpoints" / "best.npz")
    return folder


def test_classes_and_order(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["blue", "red", "grey", "green", "red"]
    images = [str(run_folder / f"{name}.png") for name in names]
    run_predict(["--checkpoint", str(run_folder), "--json", "--batch-size", "2", "--top", "3", *images])
    printed = json.loads(capsys.readouterr().out)
    assert [entry["file"] for entry in printed] == images
    for name, entry in zip(names, printed, strict=True):
        guesses = entry["predictions"]
        assert len(guesses) == 3
        assert guesses[0]["class"] == name
        assert guesses[0]["index"] == CLASS_NAMES.index(name)
        assert [g["probability"] for g in guesses] == sorted((g["probability"] for g in guesses), reverse=True)
        assert guesses[0]["probability"] > 0.5


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_folder_stands_for_its_images(
    run_folder: Path, is_relative: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_folder.parent)
    folder = Path(run_folder.name) if is_relative else run_folder
    run_predict(["--checkpoint", str(run_folder), "--json", str(folder / "red.png"), str(folder)])
    files = [entry["file"] for entry in json.loads(capsys.readouterr().out)]
    assert files == [str(folder / f"{name}.png") for name in ("red", "blue", "green", "grey", "red")]


def test_what_of_a_folder_is_left_out_or_damaged_is_named(
    run_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "link").symlink_to(run_folder)
    (tmp_path / "moving.gif").write_bytes(b"GIF89a")
    rng = np.random.default_rng(3)
    Image.fromarray(rng.integers(0, 256, (60, 80, 3), np.uint8)).save(tmp_path / "damaged.jpg", quality=95)
    content = bytearray((tmp_path / "damaged.jpg").read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = rng.integers(0, 255, 64, np.uint8).tobytes()
    (tmp_path / "damaged.jpg").write_bytes(content)
    (tmp_path / "._damaged.jpg").write_bytes(b"of another system")
    run_predict(["--checkpoint", str(run_folder), "--json", str(tmp_path)])
    out, err = capfd.readouterr()
    assert [entry["file"] for entry in json.loads(out)] == [f"{tmp_path}/damaged.jpg"]
    *left_out, unread, damaged = err.splitlines()
    found = {"links to folders": "link", "hidden folders": ".hidden", "hidden images": "._damaged.jpg"}
    assert left_out == [f"{tmp_path}: {kind} are left out: {tmp_path / name}" for kind, name in found.items()]
    assert unread.startswith(f"{tmp_path}: files of formats that are not read are left out: 1 .gif")
    assert damaged.startswith(f"{tmp_path}/damaged.jpg: the decoder says: Corrupt JPEG data: ")


def test_table_names_files_classes_and_probabilities(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_folder)
    run_predict(["--checkpoint", ".", "green.png"])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert "green.png" in text
    for name in CLASS_NAMES[:4]:
        assert name in text
    assert sum("%" in line for line in lines) == 5  # top 5
    assert "\x1b" not in text


def test_probabilities_are_those_of_the_executor(run_folder: Path) -> None:
    file = run_folder / "grey.png"
    (found,) = predict.predict(PredictOptions(images=(file,), checkpoint=str(run_folder), top=5))
    trained = load(run_folder / "checkpoints" / "best.npz")
    graph = Graph.from_json(resnet(18, len(CLASS_NAMES)).tojson())
    executor = create_executor("mxnet", graph, {"data": (1, SIZE, SIZE, 3), "softmax_label": (1,)}, "cpu(0)")
    executor.set_params(trained.params, trained.aux)
    # 128 of 255 in every channel, normalised by hand with the published ImageNet statistics
    mean, std = np.array([123.675, 116.28, 103.53]), np.array([58.395, 57.12, 57.375])
    data = np.broadcast_to((128 - mean) / std, (1, SIZE, SIZE, 3)).astype(np.float32)
    want = executor.forward(mx.nd.array(data)).asnumpy()[0]
    assert {g.index: pytest.approx(g.probability, abs=1e-4) for g in found.guesses} == dict(enumerate(want))
    assert (found.picture == 128).all()


def test_contact_sheet_shows_every_picture(run_folder: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    images = [str(run_folder / f"{name}.png") for name in CLASS_NAMES[:3]]
    run_predict(["--checkpoint", str(run_folder), "--contact-sheet", str(sheet), *images])
    picture = np.asarray(Image.open(sheet).convert("RGB")).astype(int)
    for channel in range(3):
        others = [c for c in range(3) if c != channel]
        pure = (picture[..., channel] > 200) & (picture[..., others] < 60).all(axis=-1)
        assert pure.sum() == 224 * 224


@pytest.mark.parametrize("name, sentence", [
    ("other.jpg", "must end in .png: the sheet is a PNG image"),
    ("a/../own.png", "is one of the images, which it would replace: give another name"),
])
def test_contact_sheet_replaces_no_photograph(name: str, sentence: str, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for file in ("own.png", "other.jpg"):
        Image.new("RGB", (SIZE, SIZE)).save(tmp_path / file)
    before = {file: file.read_bytes() for file in tmp_path.glob("*.*")}
    sheet, own = str(tmp_path / name), str(tmp_path / "own.png")
    with pytest.raises(TrainError, match=f"--contact-sheet .*{name} {sentence}$"):
        run_predict(["--checkpoint", str(run_folder), "--contact-sheet", sheet, own])
    assert len(before) == 2 and all(file.read_bytes() == content for file, content in before.items())


def test_contact_sheet_cuts_long_names() -> None:
    guess = Guess("w" * 200, 0, 0.5)
    prediction = Prediction(Path("n" * 200), [guess] * 3, np.zeros((8, 8, 3), np.uint8))
    with Image.open(io.BytesIO(predict.contact_sheet([prediction] * 7))) as sheet:
        assert sheet.width == 6 * 244 + 20
        # Nothing is written into the gaps between the pictures.
        gap = np.asarray(sheet.convert("L"))[:, 20 + 224 + 1 : 20 + 244 - 1]
        assert (gap == 255).all()
    with pytest.raises(TrainError, match="all images were skipped"):
        predict.contact_sheet([])


def test_contact_sheet_of_names_of_two_lines() -> None:
    pictures = [
        predict.contact_sheet([Prediction(Path(file), [Guess(name, 0, 0.5)], np.zeros((8, 8, 3), np.uint8))])
        for file, name in (("a\nb.jpg", "c\nd"), ("a b.jpg", "c d"))
    ]
    assert pictures[0] == pictures[1]


def test_broken_images_are_skipped_if_asked_for(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes((run_folder / "red.png").read_bytes()[:100])
    os.mkfifo(pipe := tmp_path / "pipe.jpg")
    files = (broken, run_folder / "red.png", pipe)
    with pytest.raises(DataError, match=r"broken\.jpg"):
        predict.predict(PredictOptions(images=files[:2], checkpoint=str(run_folder)))
    arguments = ["--checkpoint", str(run_folder), "--on-bad-image", "skip", "--json", *map(str, files)]
    run_predict(arguments)
    printed = capsys.readouterr()
    (found,) = json.loads(printed.out)
    assert found["file"] == str(files[1]) and found["predictions"][0]["class"] == "red"
    assert printed.err.splitlines()[-2:] == [f"skipped, not a readable image: {file}" for file in (broken, pipe)]


def test_real_photographs(run_folder: Path, real_data: Path) -> None:
    photographs = tuple(sorted((real_data / "imagenet_sample").rglob("*.JPEG"))[:3])
    if not photographs:
        pytest.skip("no JPEG in imagenet_sample")
    found = predict.predict(PredictOptions(images=photographs, checkpoint=str(run_folder)))
    assert [prediction.file for prediction in found] == list(photographs)
    for prediction in found:
        assert sum(guess.probability for guess in prediction.guesses) == pytest.approx(1, abs=1e-5)
        assert prediction.picture.std() > 5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--checkpoint", "RUN"], "IMAGES must be given"),
        (["RUN/red.png"], "prediction needs trained weights: give --checkpoint"),
        (["RUN/red.png", "--checkpoint", "nowhere"], "nowhere"),
        (["RUN/red.png", "--checkpoint", "RUN/red.png"], "red.png"),
        (["RUN/none.png", "--checkpoint", "RUN"], "none.png"),
        (["RUN/checkpoints", "--checkpoint", "RUN"], "checkpoints has no image files in it"),
        (["RUN/red.png", "--checkpoint", "RUN", "--top", "0"], "--top 0"),
        (["RUN/red.png", "--checkpoint", "RUN", "--batch-size", "-1"], "--batch-size -1"),
        (["RUN/red.png", "--chekpoint", "RUN"], "did you mean --checkpoint"),
    ],
)
def test_bad_input_is_one_sentence(run_folder: Path, arguments: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        run_predict([argument.replace("RUN", str(run_folder)) for argument in arguments])
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_where_the_seconds_went_and_what_was_not_imported(run_folder: Path) -> None:
    program = ("import sys; from train.__main__ import main; code = main(sys.argv[1:]); "
               "print('imported:', *sys.modules); sys.exit(code)")
    command = ["predict", "--checkpoint", str(run_folder), "--device", "cpu", "--profile-start",
               str(run_folder / "red.png")]
    done = subprocess.run([sys.executable, "-c", program, *command], cwd=REPOSITORY, capture_output=True, text=True)
    out, _, imported = done.stdout.rpartition("imported:")
    assert (done.returncode, out.count("%")) == (0, len(CLASS_NAMES)), done.stderr
    unused = {"onnx", "matplotlib", "tensorboardX", "horovod", "setuptools", "graph_passes.executors.cuda.executor"}
    assert unused & set(imported.split()) == set()
    line = re.fullmatch(r"seconds: (.*); [\d.]+ in all", done.stderr.strip())
    assert line and {"imports", "network"} <= {part.rpartition(" ")[0] for part in line[1].split(", ")}

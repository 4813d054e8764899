"""The report's part on the classifier: figures against NumPy, pictures by their pixels, and whole tiny runs."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from several_processes import needs_horovod, run_processes

from pipelines import LoaderConfig, open_loader
from train import checkpoint, loop
from train.build import build_executor
from train.devices import Placement
from train.errors import TrainError
from train.recording.metrics import TRAINING_IMAGES, interval
from train.recording.outcomes import Outcomes, spread
from train.report import classifier, classifier_plots, plots, predictions
from train.report.classifier import CALIBRATION, CONFUSION, MISTAKES, Classifier
from train.report.document import Table, Text, Tiles, html_page, markdown
from train.report.inspection import SHOWN_SIZE, describe
from train.report.page import write_validation
from train.validation import Validation, validate

ODD_NAMES = ["$a$ $b$", "日本語", "a|b", "<b>x</b>", "*star*", "`tick`", "x" * 90]


def made_up(rng: np.random.Generator, count: int, names: list[str], images: str = "validation images") -> Classifier:
    """A network that is wrong for every tenth image."""
    classes = len(names)
    probabilities = rng.dirichlet(np.full(classes, 0.05), count)
    labels = probabilities.argmax(axis=1)
    labels[::10] = (labels[::10] + rng.integers(1, classes, len(labels[::10]))) % classes
    outcomes = Outcomes.of(probabilities, labels, range(count))
    files = [f"val/{image}\udcff.jpg" for image in outcomes.mistakes[:, 0]]  # a byte that is not text
    pictures = rng.integers(0, 256, (2, 20, 20, 3)).astype(np.uint8)
    return Classifier(outcomes, names, files, pictures, np.array([0, 2]), images, 3)


def worse(*arguments: Any) -> Validation | None:
    """Like `validate`, but no guess is right."""
    found = validate(*arguments)
    return found and found._replace(metrics=found.metrics._replace(top1=0.0))


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a Markdown document: rows of cells."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[re.split(r"(?<!\\)\|", line.strip("|\n")) for line in table.splitlines()] for table in found]


def test_figures_and_tables_against_numpy(rng: np.random.Generator, tmp_path: Path) -> None:
    names = [f"class {i}" for i in range(9)]
    found = made_up(rng, 500, names)
    matrix = found.outcomes.confusion(9)
    shares = matrix.diagonal() / matrix.sum(axis=1)
    values = found.to_dict()
    assert values["top1"] == matrix.trace() / 500
    assert values["balanced_top1"] == pytest.approx(shares.mean())
    assert values["class_guessed"] == matrix.sum(axis=0).tolist()
    assert sum(part["count"] for part in values["calibration"]) == 500
    confused, by_class, _ = tables(markdown("", found.blocks()))
    off = matrix - np.diag(matrix.diagonal())
    true, guess = (int(cell.split()[1]) for cell in confused[2][:2])
    assert off[true, guess] == off.max() == int(confused[2][2])
    assert confused[2][3].strip() == f"{off.max() / matrix.sum(axis=1)[true]:.1%}"
    assert [row[1].strip() for row in by_class[2:]] == [f"{share:.1%}" for share in sorted(shares)]
    assert all(re.fullmatch(r" \d+ to \d+ % ", row[2]) for row in by_class[2:])
    assert values["top1_interval"] == pytest.approx(interval(values["top1"], 500))
    path = write_validation(tmp_path, "made up", Tiles([("1", "one")]), "command", found)
    assert json.loads((tmp_path / "report.json").read_text())["classifier"] == values
    assert all((tmp_path / name).is_file() for name in re.findall(r"\]\((.*?)\)", path.read_text()))


def test_it_is_kept_in_a_file(rng: np.random.Generator, tmp_path: Path) -> None:
    assert classifier.read(tmp_path) is None
    found = made_up(rng, 100, ODD_NAMES)
    found.save(tmp_path)
    kept = classifier.read(tmp_path)
    assert kept and kept.to_dict() == found.to_dict() and markdown("", kept.blocks()) == markdown("", found.blocks())
    np.testing.assert_array_equal(kept.pictures, found.pictures)
    (tmp_path / classifier.FILE).write_bytes(b"PK")
    with pytest.raises(TrainError, match=r"classifier.npz cannot be read .*: delete it"):
        classifier.read(tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_odd_names_mean_nothing_to_markdown_and_html(rng: np.random.Generator, tmp_path: Path,
                                                     recwarn: pytest.WarningsRecorder) -> None:
    write_validation(tmp_path, "odd", Tiles([("1", "one")]), "command", made_up(rng, 700, ODD_NAMES))
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]
    text, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    assert "\\$a\\$" in text and "a\\|b" in text and "\\<b>x" in text and "?.jpg" in text
    assert all(len(row) == len(table[0]) for table in tables(text) for row in table)
    assert "<b>x</b>" not in page and "&lt;b&gt;x&lt;/b&gt;" in page and "日本語" in page


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_a_thousand_classes_have_short_tables_and_no_matrix(rng: np.random.Generator) -> None:
    names = [f"class {i}" for i in range(1000)]
    found = made_up(rng, 20_000, names)
    text = markdown("", found.blocks())
    confused, by_class, files = tables(text)
    assert (len(confused), len(by_class), len(files)) == (2 + 20, 2 + 10 + 1 + 10, 2 + 24)
    cells = [row[1].strip() for row in by_class[2:] if row[1].strip()]
    accuracies = [float(cell.strip("%")) for cell in cells]
    assert accuracies == sorted(accuracies) and CONFUSION not in text and len(text) < 10_000
    shares = found.class_accuracy
    assert (cells[0], cells[-1]) == (f"{np.nanmin(shares):.1%}", f"{np.nanmax(shares):.1%}")
    assert len(json.dumps(found.to_dict())) < 100_000


def test_what_it_says_of_its_images(rng: np.random.Generator) -> None:
    names = [f"class {i}" for i in range(4)]
    found = made_up(rng, 300, [*names, "nobody"])
    seen = replace(found, outcomes=Outcomes.of(np.eye(5)[[0, 1, 2, 3]], np.arange(4), range(4)), files=[],
                   pictures=found.pictures[:0], shown=found.shown[:0])
    text = markdown("", seen.blocks())
    assert "## The classifier\n" in text and "What the network makes of 4 validation images after 3 epochs" in text
    assert "No image is taken for one of another class." in text and MISTAKES not in text
    assert "1 class of the network has no image here" in text
    assert "after 3 epochs, with the weights that predict, validate and export take: top-1" in markdown(
        "", seen.blocks(best_epoch=3))
    assert "The best weights, which validate, predict and export take, are those of epoch 2" in markdown(
        "", seen.blocks(best_epoch=2))
    text = markdown("", replace(seen, images=TRAINING_IMAGES, epoch=0).blocks())
    assert "## The classifier on the training images\n" in text and "4 training images: top-1 100.00%" in text
    assert "none of this says how it does on others" in text and "Calibration on the 4 training images" in text


@pytest.mark.long(but=["theme0"])
@pytest.mark.parametrize("theme", [plots.LIGHT, plots.DARK])
def test_matrix_has_one_colour_on_the_diagonal_and_another_beside(theme: plots.Theme) -> None:
    """Class 0 is always right, half of class 1 is predicted as class 0, class 2 has no image."""
    picture = classifier_plots.confusion(np.array([[8, 0, 0], [5, 5, 0], [0, 0, 0]]), ["a", "b", "$c$ $d$"], theme)
    pixels = np.asarray(Image.open(io.BytesIO(picture.png)).convert("RGB")).reshape(-1, 3).astype(int)

    def area(color: np.ndarray) -> int:
        return int((np.abs(pixels - color).max(axis=1) <= 2).sum())

    paper, right, wrong = (255 * classifier_plots._rgb(color) for color in (theme.background, *theme.series[:2]))
    cell = area(right)
    assert cell > 5000
    assert area(paper + 0.5 * (right - paper)) == pytest.approx(cell, rel=0.1)
    assert area(paper + np.sqrt(0.5) * (wrong - paper)) == pytest.approx(cell, rel=0.1)
    assert area(wrong) < 100, "nothing is always wrong"


def test_calibration_is_drawn_for_a_single_bin() -> None:
    sure = Outcomes.of(np.eye(3)[[0, 1, 2]], np.arange(3), range(3))
    image = Image.open(io.BytesIO(classifier_plots.calibration(sure, plots.LIGHT).png))
    assert image.width > 700


# --- of real networks ---


def test_pictures_are_those_of_the_mistakes(tmp_path: Path, rng: np.random.Generator) -> None:
    """The images are plain. An image whose file no longer exists has no picture, but its mistake stays."""
    colours = rng.integers(0, 256, (10, 3))
    for i, colour in enumerate(colours):
        path = tmp_path / f"class{i // 5}" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (40, 50), tuple(colour.tolist())).save(path)
    loader = open_loader(LoaderConfig(data=str(tmp_path), split="val", image_size=32, batch_size=4))
    wrong = [7, 2, 9]
    outcomes = Outcomes.of(np.array([[0.1, 0.9], [0.2, 0.8], [0.7, 0.3]]), np.array([0, 0, 1]), wrong)
    (tmp_path / "class0" / "2.png").write_bytes(b"no image")
    found = describe(outcomes, loader, epoch=1, images="validation images")
    assert found.shown.tolist() == [0, 2]
    assert found.pictures.shape == (2, SHOWN_SIZE, SHOWN_SIZE, 3)
    np.testing.assert_allclose(found.pictures.mean((1, 2)), colours[[7, 9]], atol=1)
    assert [Path(file).name for file in found.files] == ["7.png", "2.png", "9.png"]
    assert len(tables(markdown("", found.blocks()))[-1]) == 2 + 3
    for i in (7, 9):
        (tmp_path / "class1" / f"{i}.png").write_bytes(b"")
    assert MISTAKES not in describe(outcomes, loader, 1, "validation images").sheets


@pytest.mark.long
def test_a_run_shows_what_predict_says_of_each_image(
    narrow_network: None, tiny_options: list[str], tiny_data: Path, tmp_path: Path, run_train,
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """27 images in batches of 4; the best epoch is the first of two. Headline, classifier and pictures are of its
    weights, although the reporting session has only trained the second epoch. `validate` with --report gives the same,
    and does not overwrite existing files."""
    run = tmp_path / "run"
    assert run_train("--output", run, *tiny_options, "--max-steps", "7")[0] == 0
    monkeypatch.setattr(loop, "validate", worse)
    code, _, err = run_train("--resume", run, report=True)
    assert code == 0, err
    values = json.loads((run / "report" / "report.json").read_text())
    found = values["classifier"]
    best = checkpoint.load(checkpoint.find(str(run), prefer_best=True))
    executor = build_executor(best.config, 3, 32, Placement("mxnet", "cpu(0)", ""), best)
    loader = open_loader(LoaderConfig(data=str(tiny_data), split="val", image_size=32, batch_size=4,
                                      transform=best.config.transform))
    rows, labels = [], []
    for batch in loader:
        rows += executor.forward(batch.data).asnumpy()[: batch.num_valid].tolist()
        labels += batch.label.asnumpy()[: batch.num_valid].astype(int).tolist()
    guesses, labels = np.argmax(rows, axis=1), np.array(labels)
    assert (found["images"], found["count"], found["epoch"]) == (TRAINING_IMAGES, 27, 1)
    assert (values["summary"]["best"]["epoch"], values["summary"]["best"]["train_eval_top1"]) == (1, found["top1"])
    shown = predictions.read(run / "report")
    assert shown and shown.epoch == 1
    order = spread(27)
    assert shown.guessed == [f"class{guesses[i]}" for i in order]
    np.testing.assert_allclose(shown.probability, np.max(rows, axis=1)[order], rtol=1e-5)
    assert found["classes"] == ["class0", "class1", "class2"]
    assert found["class_right"] == [int(((guesses == i) & (labels == i)).sum()) for i in range(3)]
    assert found["class_guessed"] == [int((guesses == i).sum()) for i in range(3)]
    sure = np.max(rows, axis=1)[guesses != labels]
    assert [each["probability"] for each in found["mistakes"]] == pytest.approx(sorted(sure, reverse=True)[:24])
    text = (run / "report" / "report.md").read_text()
    assert "## The classifier on the training images" in text
    assert "Accuracy, classifier and pictures are those of epoch 1, whose weights predict, validate and " in text
    for name in (CONFUSION, CALIBRATION, *[MISTAKES] * bool(len(sure))):
        assert f"]({name})" in text and (run / "report" / name).is_file()

    options = ("validate", "--checkpoint", run, "--device", "cpu")
    code, out, err = run_train(*options, "--report", tmp_path / "new" / "report")
    assert code == 0 and f"report: {tmp_path}/new/report/report.md" in out, err
    again = json.loads((tmp_path / "new" / "report" / "report.json").read_text())["classifier"]
    assert again == found
    assert "top-1 on the training images" in (tmp_path / "new" / "report" / "report.md").read_text()
    before = (run / "report" / "report.md").read_bytes()
    monkeypatch.chdir(run / "report")
    for place in (run / "report", ".", "report.md"):
        code, out, err = run_train(*options, "--report", place)
        assert (code, err) == (2, f"error: the report's folder {place} already holds files: give another --report\n")
        assert "top-1" not in out
    assert (run / "report" / "report.md").read_bytes() == before


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
@needs_horovod
def test_two_processes_count_as_one(narrow_network: None, tiny_options: list[str], tmp_path: Path, run_train) -> None:
    """27 images in batches of 4 on each of two processes: the second has a short batch, and finally an empty one."""
    run = tmp_path / "run"
    assert run_train("--output", run, *tiny_options, "--epochs", "1", "--validate-every", "0")[0] == 0
    script = "import sys; from train.__main__ import main; sys.exit(main(sys.argv[1:]))"
    reports = []
    for count in (1, 2):
        folder = tmp_path / f"report{count}"
        done = run_processes(script, "validate", "--checkpoint", run, "--device", "cpu", "--batch-size", 4,
                             "--report", folder, count=count, light=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("report: ") == 1
        reports.append(json.loads((folder / "report.json").read_text())["classifier"])
    one, two = reports
    assert one["count"] == two["count"] == 27
    for mine, other in zip(one.pop("mistakes"), two.pop("mistakes"), strict=True):
        assert mine.pop("probability") == pytest.approx(other.pop("probability"), abs=1e-6)
        assert mine == other
    for mine, other in zip(one.pop("calibration"), two.pop("calibration"), strict=True):
        assert mine == pytest.approx(other, abs=1e-6)
    assert one.pop("calibration_error") == pytest.approx(two.pop("calibration_error"), abs=1e-6)
    assert one == two


def test_addresses_of_pages_are_links() -> None:
    text = "of <b>, https://a.b/c?d=1&e=2; and (http://f.g)."
    wanted = ('of &lt;b&gt;, <a href="https://a.b/c?d=1&amp;e=2">https://a.b/c?d=1&amp;e=2</a>; and '
              '(<a href="http://f.g">http://f.g</a>).')
    page = html_page("", [Text(text), Table(("",), [(text,)])], {}, {})
    assert page.count(wanted) == 2 and f"<p>{wanted}</p>" in page

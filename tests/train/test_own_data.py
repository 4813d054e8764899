"""Runs on own data: --val-split, --balance and balanced accuracy, from the command to the report."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from several_processes import needs_horovod, run_processes
from tfrecord_files import example, write_tfrecord

from pipelines.recordio import pack_record
from pipelines.sources import open_source
from train import checkpoint, models
from train.build import class_remarks, class_weights, open_split, training_graph
from train.config import Config
from train.devices import Placement
from train.errors import TrainError
from train.processes.distributed import Workers

pytestmark = pytest.mark.usefixtures("narrow_network")

OWN = ("--val-split", "0.3", "--balance", "1")


@pytest.fixture(scope="module")
def uneven_data(tiny_data, tmp_path_factory):
    """Class folders of 18, 9 and 3 images."""
    folder = tmp_path_factory.mktemp("uneven") / "photos"
    shutil.copytree(tiny_data, folder)
    for i in range(9):
        shutil.copyfile(folder / "class0" / f"{i}.jpg", folder / "class0" / f"again{i}.jpg")
    for i in range(3, 9):
        (folder / "class2" / f"{i}.jpg").unlink()
    return folder


@pytest.fixture
def options(tiny_options, uneven_data):
    return [*tiny_options, "--data", uneven_data]


def last_of(folder):
    return checkpoint.load(checkpoint.find(str(folder)))


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_a_folder_without_val_is_split(run_train, options, uneven_data, tmp_path):
    folder = tmp_path / "run"
    code, out, err = run_train("--output", folder, *options, *OWN, report=True)
    assert code == 0, err
    said = next(line for line in out.splitlines() if "training images of 3 classes" in line)
    numbers = [int(word) for word in said.replace(",", "").split() if word.isdigit()]
    assert numbers[0] + numbers[2] == 30 and said.endswith("for validation (--val-split 0.3)")
    assert "on the training images" not in out and "validation loss" in out
    report = json.loads((folder / "report" / "report.json").read_text())
    best = max(report["epochs"], key=lambda epoch: epoch["val_top1"])  # the first of several equal ones
    assert best["val_balanced_top1"] == pytest.approx(report["classifier"]["balanced_top1"])
    assert f"balanced accuracy {best['val_balanced_top1']:.1%} |" in out
    assert "balanced accuracy of the same epoch" in (folder / "report" / "report.md").read_text()

    code, out, err = run_train("validate", "--checkpoint", folder)
    assert code == 0 and f"{numbers[2]} images, loss" in out and ", balanced accuracy " in out, err
    shutil.copytree(uneven_data, tmp_path / "x")
    code, out, err = run_train("validate", "--checkpoint", folder, "--data", tmp_path / "x")
    assert code == 0 and "30 images, loss" in out, err  # in other data, all of them
    code, out, err = run_train("validate", "--checkpoint", folder, "--data", tmp_path / "x", "--val-split", "0.3")
    assert code == 0 and f"{numbers[2]} images, loss" in out, err


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_a_network_remembers_where_labels_count_from(run_train, tiny_options, tiny_data, tmp_path):
    """Validation images that lack the first class are not counted from their own first label."""
    images = [(file.read_bytes(), int(file.parent.name[-1])) for file in sorted(tiny_data.glob("*/*.jpg"))]
    data = tmp_path / "data"
    data.mkdir()
    write_tfrecord(data / "train-00000-of-00001", [example(*each) for each in images])
    write_tfrecord(data / "validation-00000-of-00001", [example(*each) for each in images if each[1]])
    code, out, err = run_train("--output", tmp_path / "run", *tiny_options, "--data", data, "--num-classes", "3")
    assert code == 0, err
    assert out.count(f"{data}: labels (image/class/label) count from 0 (--first-label)") == 1
    assert json.loads((tmp_path / "run" / "config.json").read_text())["first_label"] == "0"
    assert last_of(tmp_path / "run").config.first_label == "0"
    said = []
    for place in (data, data / "validation-00000-of-00001"):
        code, out, err = run_train("validate", "--checkpoint", tmp_path / "run", "--data", place)
        assert code == 0, err
        assert "labels (image/class/label) count from 0" in err
        said.append(out.splitlines()[-1])
    assert said[0] == said[1]
    code, out, err = run_train("--resume", tmp_path / "run", "--epochs", "3")
    assert code == 0 and "first-label" not in out.replace("(--first-label)", ""), out + err


@pytest.mark.long
def test_validation_names_classes_without_an_image(run_train, tiny_data, initial_weights, tmp_path):
    """For a list: a class without images cannot be left out if another class follows. For a folder: the class's folder
    is empty, or does not exist.
    """
    options = ("--checkpoint", initial_weights, "--data", tmp_path, "--device", "cpu", "--num-threads", "1",
               "--val-image-size", "32")
    sentence = f"{tmp_path}: no image of these classes was validated on, so accuracy says nothing about them: "
    for name in ("train", "val"):
        shutil.copytree(tiny_data, tmp_path / name)

    def told() -> list[str]:
        code, _, err = run_train("validate", *options)
        assert code == 0, err
        return [line.removeprefix(sentence) for line in err.splitlines() if "accuracy" in line]

    assert told() == []
    for image in (tmp_path / "val/class1").iterdir():
        image.unlink()
    assert told() == ["'class1' (add some)"]
    shutil.rmtree(tmp_path / "val/class2")
    assert told() == ["'class1', 'class2' (add some)"]
    (tmp_path / "val.lst").write_text("0\t0\tval/class0/0.jpg\n0\t2\ttrain/class2/0.jpg\n")
    assert told() == ["'class1' (add some)"]


@pytest.mark.long
def test_balanced_accuracy_is_told_where_classes_are_uneven(run_train, options, tiny_options, tmp_path):
    for data, told in ((tiny_options, False), (options, True), ([*tiny_options, "--balance", "0.5"], True)):
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        code, out, err = run_train("--output", folder, *data, "--epochs", "1")
        assert code == 0 and ("balanced accuracy" in out) == told, err


@pytest.mark.long
def test_a_stopped_run_goes_on_to_the_same_bits(run_train, options, tmp_path):
    assert run_train("--output", tmp_path / "whole", *options, *OWN)[0] == 0
    assert run_train("--output", tmp_path / "parts", *options, *OWN, "--max-steps", "3")[0] == 0
    code, out, err = run_train("--resume", tmp_path / "parts")
    assert code == 0 and "other options" not in out, err
    whole, parts = last_of(tmp_path / "whole"), last_of(tmp_path / "parts")
    assert whole.progress == parts.progress and whole.loader_states == parts.loader_states
    for name, value in (whole.params | whole.aux).items():
        assert np.array_equal(value, (parts.params | parts.aux)[name]), name
    code, _, err = run_train("--resume", tmp_path / "parts", "--epochs", "3", "--val-split", "0.2")
    assert code == 2 and "resume with the same data, seed, --labels, --val-split, --balance and" in err


@pytest.mark.long
@needs_horovod
def test_two_processes_validate_each_image_once(options, uneven_data, tmp_path, monkeypatch):
    """Both processes set aside the same part, and balanced accuracy counts the images of both."""
    monkeypatch.setenv("REPORT", "yes")
    program = "import sys; from train.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = run_processes(program, *options, *OWN, "--output", tmp_path / "run", "--batch-size", "2", "--epochs", "1",
                         light=True)
    assert done.returncode == 0 and "for validation (--val-split 0.3)" in done.stdout, done.stderr
    report = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
    assert report["classifier"]["count"] == len(open_source(uneven_data, "val", val_split=0.3))
    (epoch,) = report["epochs"]
    assert epoch["val_balanced_top1"] == pytest.approx(report["classifier"]["balanced_top1"])


@pytest.mark.parametrize("wrong, sentence", [
    (["--val-split", "1"], "--val-split 1.0 must be at least 0 and below 1"),
    (["--label-smoothing", "0.7"], "--label-smoothing 0.7 gives the right class no larger share than a "
                                   "wrong one (3 classes): give less than 0.667, 0.1 is usual"),
    (["--balance", "2"], "--balance 2.0 must be a fraction from 0 to 1"),
    (["--data", "synthetic", "--val-split", "0.1"], "have a validation split and classes of equal size; leave out"),
    (["--data", "{tmp}/single", "--val-split", "0.1"], "no class has two images, one to train on and one for --val-sp"),
    (["--data", "{tmp}/val", "--val-split", "0.1"], "has images for validation, {tmp}/val/val: leave out --val-split"),
])
def test_mistakes(run_train, tiny_options, tiny_data, tmp_path, monkeypatch, wrong, sentence):
    monkeypatch.chdir(tmp_path)
    for name in ("class0", "class1"):
        for place in ("single", "val/val", "val/train"):
            (tmp_path / place / name).mkdir(parents=True)
            shutil.copyfile(tiny_data / name / "0.jpg", tmp_path / place / name / "0.jpg")
    code, _, err = run_train(*tiny_options, *(option.format(tmp=tmp_path) for option in wrong))
    assert code == 2 and sentence.format(tmp=tmp_path) in err, err
    assert not (tmp_path / "runs").exists()


def test_class_weights(run_train, options, tmp_path):
    """Weights are in proportion to the class size to the power of -1/2, with mean 1 over the images. They are reported,
    and in the network's loss."""
    folder = tmp_path / "run"
    code, out, err = run_train("--output", folder, *options, "--class-weights", "0.5", "--max-steps", "2")
    assert code == 0, err
    sizes = np.array([18, 9, 3])
    weights = sizes**-0.5 * 30 / (sizes**0.5).sum()
    assert weights @ sizes == pytest.approx(30)
    assert (f"--class-weights 0.5: the classes have 3 to 18 images, and weigh {weights[0]:.4g} to {weights[2]:.4g}"
            in out)
    assert "balanced accuracy" in run_train("validate", "--checkpoint", folder)[1]


@pytest.mark.parametrize("stored", ["records", "tfrecord"])
def test_folders_called_by_numbers_and_numbers(tiny_data, tmp_path, stored):
    """Folders called 0 to 11, which sort as 0, 1, 10, 11, 2, and labels 0 to 11 mean the same classes, whichever of the
    two is the training split."""
    image = next(tiny_data.glob("*/*.jpg")).read_bytes()
    for way, (of_folders, other) in enumerate((("train", "val"), ("val", "train"))):
        data = tmp_path / str(way)
        for label in range(12):
            (data / of_folders / str(label)).mkdir(parents=True)
            (data / of_folders / str(label) / "image.jpg").write_bytes(image)
        if stored == "tfrecord":
            (data / other).mkdir()
            write_tfrecord(data / other / "0.tfrecord", [example(image, label) for label in range(12)])
        else:
            write_records(data / f"{other}.rec", image, range(12))
        with loader_of(data) as train_loader:
            classes = train_loader.classes
        with loader_of(data, "val", classes=classes, whose="the training images") as loader:
            labels = [int(label) for batch in loader for label in batch.label.asnumpy()[: batch.num_valid]]
        own = range(12) if other == "val" else sorted(range(12), key=str)
        assert [int(classes[label][1]) for label in labels] == list(own)


PLACEMENT = Placement("mxnet", "cpu(0)", "")


def loader_of(data, split="train", **known):
    config = Config(data=str(data), batch_size=2, image_size=32, val_image_size=32, num_threads=1)
    return open_split(config, split, PLACEMENT, Workers(), **known)


def write_records(path, image, labels):
    parts = [pack_record(label, image, key) for key, label in enumerate(labels)]
    path.write_bytes(b"".join(parts))
    path.with_suffix(".idx").write_text("".join(f"{i}\t{i * len(parts[0])}\n" for i in range(len(parts))))


@pytest.mark.parametrize("stored", ["records", "records and names", "tfrecord", "folders", "list"])
def test_images_of_one_class_are_refused(tiny_data, tmp_path, stored):
    """Images of one class are refused for any number of classes that the labels or a list allow."""
    file = next(tiny_data.glob("*/*.jpg"))
    data, name = tmp_path / "data", "2"
    data.mkdir()
    if stored in ("records and names", "folders"):
        (data / "classes.txt").write_text("a\nb\nc\n")
        name = "c"
    if stored == "folders":
        for label in "abc":
            (data / label).mkdir()
        for i in range(4):
            shutil.copyfile(file, data / "c" / f"{i}.jpg")
    elif stored == "tfrecord":
        write_tfrecord(data / "train.tfrecord", [example(file.read_bytes(), 3)] * 4)
    elif stored == "list":
        name = file.parent.name
        (data / "train.lst").write_text("".join(f"{i}\t2\t{file}\n" for i in range(4)))
    else:
        write_records(data / "train.rec", file.read_bytes(), [2] * 4)
    with pytest.raises(TrainError, match=f"data has images of one class only, {name!r}, so there is nothing"):
        loader_of(data)


def test_classes_that_one_split_alone_has_are_told(tiny_data, tmp_path):
    image = next(tiny_data.glob("*/*.jpg")).read_bytes()
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\n")
    no_image = "no image for validation is of these classes, so accuracy says nothing about them"
    unused = "no image is of these classes, which only the list of classes has: 'd'"
    for in_train, in_val, sentences in (
        ([0, 1, 2], [0, 1, 2, 3], ["images for validation are of classes that no training image has: 'd'"]),
        ([0, 1, 2], [0, 1, 2], [unused]),
        ([0, 1, 2], [1, 1], [f"{no_image}: 'a', 'c' (all of it is 'b')", unused]),
        ([0, 1, 2], [0, 2, 3], [f"{no_image}: 'b'",
                                "images for validation are of classes that no training image has: 'd'"]),
    ):
        write_records(tmp_path / "train.rec", image, in_train)
        write_records(tmp_path / "val.rec", image, in_val)
        with loader_of(tmp_path) as train_loader:
            classes = train_loader.classes
            with loader_of(tmp_path, "val", classes=classes, whose="the training images") as val_loader:
                told = class_remarks("data", train_loader, val_loader)
        assert told == [f"data: {sentence}" for sentence in sentences]


@pytest.mark.long
@pytest.mark.usefixtures("undrawn")
def test_training_and_validation_tell_of_classes_without_images(run_train, tiny_options, tiny_data, tmp_path):
    image = next(tiny_data.glob("*/*.jpg")).read_bytes()
    data = tmp_path / "data"
    data.mkdir()
    write_records(data / "train.rec", image, [0, 1, 2, 0])
    write_records(data / "val.rec", image, [0, 0])
    code, out, err = run_train("--output", tmp_path / "run", *tiny_options, "--data", data)
    sentence = f"{data}: no image for validation is of these classes, so accuracy says nothing about them: '1', '2' ("
    assert code == 0 and sentence in out, out + err
    code, out, err = run_train("validate", "--checkpoint", tmp_path / "run")
    assert code == 0 and f"{data}: no image of these classes was validated on" in err and "'1', '2'" in err, err


@pytest.mark.parametrize("padding", [0, 2])
def test_weights_of_classes(padding, uneven_data):
    """Classes without images have the weight 1."""
    config = Config(data=str(uneven_data), class_weights=1.0, num_classes=3 + padding, batch_size=4)
    with open_split(config, "train", Placement("mxnet", "cpu(0)", ""), Workers()) as loader:
        weights = class_weights(config, loader)
        assert class_weights(replace(config, class_weights=0.0), loader) == []
    assert weights == pytest.approx([30 / 3 / 18, 30 / 3 / 9, 30 / 3 / 3] + padding * [1.0])
    graph = training_graph(config, models.create("resnet18", 3 + padding), weights)
    assert graph["softmax"]["class_weights"] == pytest.approx(weights)


@pytest.mark.long
def test_validation_on_moved_data_says_that_training_images_are_among_it(run_train, tiny_data, tmp_path):
    data, moved = tmp_path / "data", tmp_path / "moved"
    shutil.copytree(tiny_data, data)
    code, _, err = run_train("--data", data, "--val-split", "0.3", "--output", tmp_path / "run", "--model", "resnet18",
                             "--image-size", "32", "--batch-size", "4", "--device", "cpu", "--num-threads", "1",
                             "--no-tensorboard", "--epochs", "1", "--max-steps", "2")
    assert code == 0, err
    shutil.copytree(data, moved)
    said = f"{moved}: all its images were validated on; the network's run kept 0.3 of each class of {data}"
    for place, options, is_said in ((moved, (), True), (moved, ("--val-split", "0.3"), False), (data, (), False)):
        code, _, err = run_train("validate", "--checkpoint", tmp_path / "run", "--data", place, "--device", "cpu",
                                 *options)
        assert code == 0 and (said in err) == is_said, err

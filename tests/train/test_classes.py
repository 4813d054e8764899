"""Classes are identified by their names, whatever their numbers in data and network."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from train import TrainError, checkpoint
from train.classes import display_names, match, padded

# two classes with equal display names, as in ImageNet
KNOWN = [("n1", "cat"), ("n2", "crane"), ("n3", "crane"), ("n4", "dog")]
NUMBERED = padded([], 4)
NETWORK = "the network of runs/x"


def plain(*names):
    return [(name, name) for name in names]


@pytest.mark.parametrize("found, labels, note", [
    (KNOWN, [0, 1, 2, 3], ""),
    (plain("cat", "crane", "crane", "dog"), [0, 1, 2, 3], ""),  # of a checkpoint without folders
    (KNOWN[::-1], [3, 2, 1, 0], f"the classes of DATA are in another order than those of {NETWORK}: they"),
    (plain("n4", "n3", "n2", "n1"), [3, 2, 1, 0], "in another order"),
    (plain("n1", "n2", "n3", "n4"), [0, 1, 2, 3], ""),
    (plain("dog", "n2"), [3, 1], f"DATA has 2 of the 4 classes of {NETWORK}"),
    (plain("cat", "1", "2", "dog"), [0, 1, 2, 3], ""),  # of a list without images of classes 1 and 2
    ([KNOWN[0], KNOWN[2], KNOWN[1], KNOWN[3]], [0, 2, 1, 3], "in another order"),
    (NUMBERED, [0, 1, 2, 3], "DATA has no names of classes: the class numbers of DATA are taken for"
                           f" those of {NETWORK}, 0 = cat, 1 = crane, 2 = crane, 3 = dog (if that is wrong, list the"),
    (NUMBERED[:2], [0, 1], "DATA has no names"),
], ids=str)
def test_labels_and_what_is_said(found, labels, note):
    matched = match("DATA", found, KNOWN, NETWORK, is_whole=False)
    assert matched.labels == labels
    assert note in matched.note and bool(note) == bool(matched.note)


def test_numbers_on_both_sides_and_a_network_without_names():
    assert match("DATA", NUMBERED[:3], NUMBERED, NETWORK, is_whole=True) == ([0, 1, 2], "")
    matched = match("DATA", KNOWN, NUMBERED, NETWORK, is_whole=True)
    assert matched.labels == [0, 1, 2, 3] and matched.note.startswith(f"{NETWORK} has no names of classes")
    ten = plain(*sorted(map(str, range(11))))  # folders called 0, 1, 10, 2, ...
    assert match("DATA", ten[::-1], ten, NETWORK, is_whole=True).labels == list(range(10, -1, -1))
    in_order = [0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 2]
    assert match("DATA", padded([], 11), ten, NETWORK, is_whole=True).labels == in_order
    matched = match("DATA", ten, padded([], 11), NETWORK, is_whole=True)
    assert [in_order[label] for label in range(11)] == np.argsort(matched.labels).tolist()
    assert "are told apart by their names" in matched.note


@pytest.mark.parametrize("found, known, labels", [
    (NUMBERED[:3], plain("00", "01", "02", "03"), [0, 1, 2]),
    (plain("03", "00"), NUMBERED, [3, 0]),
    (padded([], 8), plain("3", "5", "7"), [-1, -1, -1, 0, -1, 1, -1, 2]),  # without images of 0, 1, 2, 4, 6
    (plain("0", "1", "10", "2"), [*KNOWN, *plain(*"ghijklm")], [0, 1, 10, 2]),  # numbers of classes with names
    (plain("cat", "dog"), plain("1", "0"), [1, 0]),
    ([("10", "ten"), ("2", "two")], padded([], 11), [10, 2]),  # folders that determine the classes
    (padded([], 3), [("2", "two"), ("0", "zero"), ("1", "one")], [1, 2, 0]),
    ([("0", "dog"), ("1", "cat")], plain("cat", "dog"), [1, 0]),
    (plain("0", "1", "3"), padded(plain("0", "1", "3"), 4), [0, 1, 2]),  # class 3, without images, is another one
    (padded([], 4), padded(plain("0", "1", "3"), 4), [0, 1, -1, 2]),
    (plain("cafe\u0301", "dog"), plain("dog", "caf\u00e9"), [1, 0]),  # one name in two forms of Unicode
    (plain("caf\u00e9"), plain("dog", "cafe\u0301"), [1]),
    (plain("b", "3"), padded(plain("a", "b", "3"), 4), [1, 2]),
], ids=str)
def test_names_that_are_numbers_are_numbers(found, known, labels):
    met = [label for label, number in enumerate(labels) if number >= 0]
    assert match("DATA", found, known, NETWORK, is_whole=False, met=lambda: met).labels == labels
    if -1 in labels:
        with pytest.raises(TrainError, match=f"the class {found[labels.index(-1)][1]!r} of DATA is none of the"):
            match("DATA", found, known, NETWORK, is_whole=False)


def test_numbers_that_two_folders_share_are_names():
    assert match("DATA", plain("1", "01"), plain("01", "1"), NETWORK, is_whole=True).labels == [1, 0]


@pytest.mark.parametrize("found, known, is_whole, sentence", [
    (plain("cat", "cow"), KNOWN, False, "the class 'cow' of DATA is none of the 4 classes of the network of runs/x "
                                        "('cat', 'crane', 'crane', 'dog'): give data of these classes"),
    (plain("dog", "crane", "crane", "cat"), KNOWN, False, "the class 'crane' of DATA is none of"),  # either of the two?
    (plain("n1", "n2", "n4"), KNOWN, True, "DATA has no class 'crane', which the network of runs/x has: give"),
    (padded([], 5), KNOWN, False, "DATA has 5 classes and the network of runs/x has 4"),
    (plain(*"abcde"), NUMBERED, False, "DATA has 5 classes and the network of runs/x has 4"),
])
def test_what_cannot_be_told_apart_is_refused(found, known, is_whole, sentence):
    with pytest.raises(TrainError) as error:
        match("DATA", found, known, NETWORK, is_whole)
    assert str(error.value).startswith(sentence)


@pytest.fixture(scope="module")
def reordered(tiny_data, tmp_path_factory):
    """The tiny data with its classes in reverse order."""
    folder = tmp_path_factory.mktemp("reordered") / "data"
    shutil.copytree(tiny_data, folder)
    (folder / "classes.txt").write_text("class2\nclass1\tfirst\nclass0\n")
    return folder


@pytest.mark.long
def test_a_run_goes_on_and_is_validated_with_classes_in_another_order(
    narrow_network, tiny_options, reordered, run_train, tmp_path
):
    """The run's weights, and their accuracy, equal the results with data in the first order, to the bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_train("--output", whole, *tiny_options)[0] == 0
    assert run_train("--output", parts, *tiny_options, "--max-steps", "4")[0] == 0
    code, out, err = run_train("--resume", parts, "--data", reordered)
    assert code == 0, err
    said = f"the classes of {reordered} are in another order than those of the network"
    assert f"{said} of the resumed run: they are told apart by their names" in out
    ours, theirs = (checkpoint.load(checkpoint.find(str(folder))) for folder in (parts, whole))
    assert ours.classes == theirs.classes and ours.class_names == ["class0", "class1", "class2"]
    for name in ours.params:
        assert np.array_equal(ours.params[name], theirs.params[name]), name

    figures = []
    for data in ((), ("--data", reordered)):
        code, out, err = run_train("validate", "--checkpoint", whole, *data)
        assert code == 0, err
        figures.append(out.splitlines()[-1].partition(" images, ")[2])  # whether the images are the training images
        assert (f"{said} of {whole}: they" in out) == bool(data)
    assert figures[0] == figures[1]


@pytest.mark.long
def test_more_classes_than_the_data_has(narrow_network, tiny_options, run_train, tmp_path):
    """--num-classes is the number of the network's classes, also in config.json. Classes without images are named by
    numbers."""
    code, out, err = run_train("--output", tmp_path / "run", *tiny_options, "--num-classes", "5", "--max-steps", "7")
    assert code == 0, err
    trained = checkpoint.load(checkpoint.find(str(tmp_path / "run")))
    assert trained.network == "resnet18 with 5 classes"
    assert trained.class_names == ["class0", "class1", "class2", "3", "4"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["num_classes"] == 5
    assert "classes of" not in out
    assert run_train("--resume", tmp_path / "run", "--max-steps", "8")[0] == 0


def test_names_for_people_are_printable_and_differ() -> None:
    classes = [("n1", "crane"), ("n2", "crane"), ("a\nb", "a\nb"), ("", ""), ("k\udcff", "k\udcff"),
               ("e", "\u202eevil"), ("x", "x y"), ("x", "x\ty"), ("日本", "日本")]
    assert display_names(classes) == ["crane (n1)", "crane (n2)", "a b", "class 3", "k?", "evil", "x y (x) (class 6)",
                                      "x y (x) (class 7)", "日本"]

"""`validate`: a record of each image, against the network's own probabilities."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from several_processes import needs_horovod, run_processes

from pipelines import LoaderConfig, open_loader
from train import checkpoint
from train.build import build_executor
from train.devices import Placement

pytestmark = pytest.mark.usefixtures("narrow_network")


@pytest.fixture(scope="module")
def run_folder(narrow_network: None, tiny_options: list[str], light_run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    assert light_run("--output", folder, *tiny_options, "--epochs", "1") == 0
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_image_has_its_record(run_folder, tiny_data, run_train, tmp_path):
    """27 images in batches of 4: in the order of the split, with all values behind accuracy and loss."""
    output = tmp_path / "val.csv"
    code, out, err = run_train("validate", "--checkpoint", run_folder, "--device", "cpu", "--output", output)
    assert code == 0, err
    found = rows(output)
    best = checkpoint.load_trained(str(run_folder))
    executor = build_executor(best.config, 3, 32, Placement("mxnet", "cpu(0)", ""), best)
    loader = open_loader(LoaderConfig(data=str(tiny_data), split="val", image_size=32, batch_size=4,
                                      transform=best.config.transform))
    place = 0
    for batch in loader:
        labels = batch.label.asnumpy().astype(int)
        for row, label in zip(executor.forward(batch.data).asnumpy()[: batch.num_valid], labels, strict=False):
            record = found[place]
            assert (record["file"], record["true"]) == (*loader.names([place]), f"class{label}")
            order = np.argsort(-row)
            assert [record[f"index{rank}"] for rank in ("", "_2", "_3")] == list(map(str, order))
            assert float(record["probability_2"]) == pytest.approx(row[order[1]], rel=1e-4)
            assert float(record["loss"]) == pytest.approx(-np.log(row[label]), rel=1e-3, abs=1e-6)
            place += 1
    assert place == len(found) == 27
    top1 = np.mean([record["true"] == record["class"] for record in found])
    loss = np.mean([float(record["loss"]) for record in found])
    assert f"loss {loss:.4f}, top-1 {top1:.2%} (95 % interval: " in out and f"each image: {output}\n" in out


def test_lines_of_json_and_images_that_are_skipped(run_folder, tiny_data, run_train, tmp_path):
    data, output = tmp_path / "data", tmp_path / "new" / "val.jsonl"
    shutil.copytree(tiny_data, data)
    broken = data / "class1" / "3.jpg"
    broken.write_bytes(b"no image")
    code, _, err = run_train("validate", "--checkpoint", run_folder, "--device", "cpu", "--data", data, "--output",
                             output, "--on-bad-image", "skip")
    assert code == 0, err
    *found, last = map(json.loads, output.read_text().splitlines())
    assert len(found) == 26 and all(record["loss"] >= 0 and len(record["predictions"]) == 3 for record in found)
    assert last["file"] == str(broken) and last["true"] is None and last["error"]


@pytest.mark.parametrize(("name", "more", "sentence"), [
    ("val.txt", [], r"--output .*val.txt must end in .csv or .jsonl, which determines the format"),
    ("there.csv", [], r".*there.csv is there already: give another --output"),
    ("val.csv", ["--data", "synthetic"], r"--output .* needs images with files, and the images of --data synthetic "
                                         r"have no files: leave out --output"),
])
def test_what_is_refused_before_the_validation(name, more, sentence, run_folder, run_train, tmp_path):
    (tmp_path / "there.csv").write_text("mine")
    code, out, err = run_train("validate", "--checkpoint", run_folder, "--device", "cpu", *more, "--output",
                               tmp_path / name)
    assert code == 2 and re.fullmatch(rf"error: {sentence}\n", err.splitlines(keepends=True)[-1])
    assert "top-1" not in out and (tmp_path / "there.csv").read_text() == "mine"


@pytest.mark.long
@needs_horovod
def test_two_processes_write_what_one_writes(run_folder, tmp_path):
    script = "import sys; from train.__main__ import main; sys.exit(main(sys.argv[1:]))"
    for count in (1, 2):
        done = run_processes(script, "validate", "--checkpoint", run_folder, "--device", "cpu", "--output",
                             tmp_path / f"{count}.csv", count=count, light=True)
        assert done.returncode == 0, done.stderr
    one, two = rows(tmp_path / "1.csv"), rows(tmp_path / "2.csv")
    assert [(row["file"], row["true"], row["class"]) for row in one] == [
        (row["file"], row["true"], row["class"]) for row in two]

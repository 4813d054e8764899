"""The model of training on many machines: limits that any such model must keep, and its fits."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.command_line import exit_code_of
from common.errors import UserError

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def model(benchmark_module: Callable[[str], Any]) -> Any:
    return benchmark_module("scaling_model")


@pytest.fixture
def gradients(model: Any) -> Any:
    return model.read_gradients((BENCHMARKS / "results" / model.PROFILE).read_text())


def test_gradients_are_those_of_resnet50(gradients: Any) -> None:
    """25.56 M parameters: 25.50 M weights in fp16, 54,120 of BatchNorm and the classifier's bias in fp32."""
    assert sum(gradient.num_bytes for gradient in gradients[:-1]) == 2 * 25_502_912
    assert gradients[-1].num_bytes == 4 * 54_120
    ready = [gradient.ready for gradient in gradients]
    assert ready == sorted(ready)
    assert 0.25 < ready[0] < 0.45  # the forward pass is about a third of the step
    assert ready[-1] == pytest.approx(1)


def test_ring_formula(model: Any) -> None:
    """n GPUs of one host: 2 (n - 1) / n of the bytes, and 2 (n - 1) hops, of which two are in message_us."""
    machine = model.Machine(nvlink_gbs=100.0, message_us=40.0, nvlink_hop_us=5.0)
    for gpus in range(2, 9):
        expected = 2 * (gpus - 1) / gpus * 50e6 / 100e9 * 1e3 + (40 + (2 * (gpus - 1) - 2) * 5) / 1e3
        assert model.all_reduce_ms(50e6, gpus, machine, "ring") == pytest.approx(expected)
    assert model.all_reduce_ms(50e6, 1, machine, "ring") == 0


@pytest.mark.parametrize("algorithm", ["ring", "tree", "in-network"])
def test_all_reduce_grows_with_bytes_and_hosts(model: Any, algorithm: str) -> None:
    machine = model.Machine()
    times = [model.all_reduce_ms(50e6, 8 * hosts, machine, algorithm) for hosts in (1, 2, 3, 8, 64, 448)]
    assert times == sorted(times)
    sizes = [model.all_reduce_ms(10.0**k, 64, machine, algorithm) for k in range(9)]
    assert sizes == sorted(sizes)
    # without latency what remains is bytes over bandwidth, for any number of hosts
    free = replace(machine, nvlink_hop_us=0.0, network_hop_us=0.0, message_us=0.0)
    least = 50e6 / (1e6 * min(free.nvlink_gbs, 8 * free.network_gbs))
    assert least <= model.all_reduce_ms(50e6, 3584, free, algorithm) <= 2 * least


def test_algorithms_take_over_from_each_other(model: Any) -> None:
    """Few GPUs and many bytes: the ring; many hosts: the tree, whose hops grow with the logarithm."""
    machine = model.Machine()
    assert model.best_all_reduce(50e6, 4, machine, model.NCCL)[1] == "ring"
    assert model.best_all_reduce(50e6, 3584, machine, model.NCCL)[1] == "tree"
    assert model.all_reduce_ms(0, 3584, machine, "ring") > 10 > model.all_reduce_ms(0, 3584, machine, "tree") * 10
    with pytest.raises(ValueError, match="unknown algorithm 'star'"):
        model.all_reduce_ms(1, 2, machine, "star")


def test_one_gpu_is_as_measured(model: Any, gradients: Any) -> None:
    machine, _ = model.fit(BENCHMARKS / "results")
    for batch in model.BATCHES:
        step_ms = json.loads((BENCHMARKS / "results" / model.SINGLE_GPU.format(batch)).read_text())["step_ms"]
        predicted = model.simulate(replace(machine, gpu_spread=0.0, step_jitter=0.0), gradients, 1, batch)
        assert predicted.step_ms == pytest.approx(statistics.median(step_ms), rel=0.01)
        assert predicted.all_reduce_ms == predicted.exposed_ms == 0


def test_more_gpus_are_never_faster_for_each(model: Any, gradients: Any) -> None:
    """But for the luck of the draw, which a second decimal of a percent is allowed."""
    machine = model.Machine()
    for batch in (16, 256):
        speeds = [model.simulate(machine, gradients, gpus, batch).images_per_sec_per_gpu
                  for gpus in (2, 4, 8, 32, 256, 3584)]
        assert all(later <= 1.005 * earlier for earlier, later in itertools.pairwise(speeds))
    ideal = replace(machine, gpu_spread=0.0, step_jitter=0.0, nvlink_gbs=1e9, network_gbs=1e9, message_us=0.0,
                    nvlink_hop_us=0.0, network_hop_us=0.0)
    step = model.simulate(ideal, gradients, 3584, 16)
    assert step.step_ms == pytest.approx(model.step_of_one_gpu_ms(16, ideal), rel=1e-3)


def test_overlap(model: Any, gradients: Any) -> None:
    """One bucket, ready at the end, hides nothing of itself; two leave little but the second."""
    machine = replace(model.Machine(), gpu_spread=0.0, step_jitter=0.0)
    one, two = (model.simulate(machine, gradients, 8, 256, count) for count in (1, 2))
    assert one.exposed_ms == pytest.approx(one.all_reduce_ms, rel=0.05)
    assert two.exposed_ms < 0.5 * one.exposed_ms


def test_the_slowest_is_waited_for(model: Any, gradients: Any) -> None:
    """The largest of n normal variables is about sqrt(2 ln n) standard deviations above the mean, a little less."""
    machine = replace(model.Machine(), gpu_spread=0.0, step_jitter=0.01)
    step = model.simulate(machine, gradients, 1000, 256)
    excess = (step.slowest_ms / step.compute_ms - 1) / 0.01
    assert 3.0 < excess < math.sqrt(2 * math.log(1000))  # 3.24 is the mean of the largest of 1,000


def test_fit_of_nvlink(model: Any, rng: np.random.Generator) -> None:
    """Times made by the model itself, with 1 % of noise, give its parameters back."""
    truth = model.Machine(nvlink_gbs=float(rng.uniform(100, 400)), message_us=float(rng.uniform(20, 60)))
    rows = [{"gpus": gpus, "buckets": [["", num_bytes, ""] for num_bytes in (25e6, 25e6, 1e6, 2e5)],
             "all_reduce_ms": [model.all_reduce_ms(num_bytes, gpus, truth, "ring") * float(rng.normal(1, 0.01))
                               for num_bytes in (25e6, 25e6, 1e6, 2e5)]} for gpus in (2, 4)]
    fitted = model.fit_nvlink(model.Machine(), rows)
    assert fitted.nvlink_gbs == pytest.approx(truth.nvlink_gbs, rel=0.15)
    assert fitted.message_us == pytest.approx(truth.message_us, rel=0.15)


def copy_measurements(model: Any, folder: Path, *others: str) -> None:
    for name in (model.PROFILE, *(model.SINGLE_GPU.format(batch) for batch in model.BATCHES), *others):
        (folder / name).write_bytes((BENCHMARKS / "results" / name).read_bytes())


def test_fit_of_several_gpus(model: Any, tmp_path: Path) -> None:
    """The spread of GPUs comes from their speeds alone, and each run of scaling.py is predicted from its one GPU."""
    copy_measurements(model, tmp_path)
    _, notes = model.fit(tmp_path)
    assert "there is no scaling_<n>gpu.jsonl" in notes[-1]
    single = {"what": "synthetic", "gpus": 1, "batch": 256, "step_ms": [19.8, 20.0, 20.2]}
    jpeg = {"what": "jpeg", "gpus": 4, "batch": 256, "step_ms": [21.0] * 5}
    for gpus, ratio in ((2, 1.25), (4, 1.5)):
        row = {"what": "synthetic", "gpus": gpus, "batch": 256, "step_ms": [20.0 * ratio] * 5,
               "each_alone_ms": [19.0, 20.0, 20.0, 21.0][:gpus], "all_reduce_ms": [0.4, 0.04, 0.03],
               "pass_alone_ms": [19.5, 20.0, 20.5], "pass_ms": [20.0, 20.0 + 0.1 * gpus, 21.0],
               "exposed_ms": [0.1] * 3, "wait_ms": [0.2] * 3, "nvlink_bytes": None,
               "timeline": {"buckets": [[15.0, 15.4], [20.0, 20.1], [20.0, 20.1]], "parts": [20.0, 20.1, 20.5]},
               "buckets": [["weights 1", 50e6, "float16"], ["weights 2", 1e6, "float16"], ["others", 2e5, "float32"]]}
        (tmp_path / f"scaling_{gpus}gpu.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (single, jpeg, row)))
    machine, notes = model.fit(tmp_path)
    assert machine.gpu_spread == pytest.approx(math.sqrt(2 / 3) / 20)
    assert machine.step_jitter == pytest.approx(0.01)
    assert machine.slowdown == pytest.approx(0.015)  # 0.2 and 0.4 ms of 20
    for note, gpus, measured in ((notes[-2], 2, "25.0%"), (notes[-1], 4, "50.0%")):
        assert note.startswith(f"{gpus} GPUs, batch 256: ")
        assert note.endswith(f"by {measured} was measured (scaling_{gpus}gpu.jsonl)")
        predicted = re.search(r"by ([\d.]+)% is predicted", note)
        assert predicted and 0 < float(predicted[1]) < 10  # GPUs that differ by 4 %


def test_a_gradient_is_there_after_the_last_launch_of_its_node(model: Any) -> None:
    """Some are left in parts by one launch and added up by another."""
    table = (BENCHMARKS / "results" / model.PROFILE).read_text().partition("\n\n")[0]
    row = "stage1_block1_conv3_wgrad         sum_parts                      100.0000      0.0    100      3%"
    before, after = model.read_gradients(f"{table}\n\n"), model.read_gradients(f"{table}\n{row}\n\n")
    assert [gradient.num_bytes for gradient in after] == [gradient.num_bytes for gradient in before]
    late = [number for number, gradient in enumerate(after[:-1]) if gradient.ready == 1]
    conv3 = 2 * 256 * 64  # bytes of its weights
    assert [after[number].num_bytes for number in late] == [conv3]
    assert sum(gradient.ready < 0.5 for gradient in after) == len(after) - 2, "but BatchNorm's, which come last"


def test_calibration_meets_its_point(model: Any, gradients: Any) -> None:
    point = model.MLPERF[0]
    machine = model.calibrated(model.Machine(), gradients, point)
    reached = model.best_buckets(machine, gradients, point.gpus, point.batch)
    assert reached.images_per_sec_per_gpu == pytest.approx(point.images_per_sec_per_gpu, rel=1e-3)


def test_missing_measurements(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["scaling_model.py", "--results", str(tmp_path)])
    with pytest.raises(UserError, match=r".*_profile.txt is missing: measure it"):
        model.main()


PROFILE, SINGLE_GPU, ROWS = ("resnet50_fp16_b256_profile.txt", "resnet50_fp16_b64_synthetic_1gpu.json",
                             "scaling_b64_4gpu.jsonl")


def without_line_of(node: str) -> Callable[[str], str]:
    return lambda text: re.sub(rf"^{node} .*\n", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize(("name", "damage"), [
    (ROWS, lambda text: ""),
    (ROWS, lambda text: text[: len(text) // 2]),
    (ROWS, lambda text: text.replace('"all_reduce_ms"', '"other"')),
    (ROWS, lambda text: re.sub(r'"step_ms": \[[^]]*', '"step_ms": [7.4', text)),
    (SINGLE_GPU, lambda text: text[: len(text) // 2]),
    (SINGLE_GPU, lambda text: "{}"),
    (SINGLE_GPU, lambda text: '{"step_ms": [7.4]}'),
    (SINGLE_GPU, lambda text: '{"step_ms": [7.4, NaN, 7.5]}'),
    (PROFILE, lambda text: ""),
    (PROFILE, lambda text: text[:12_000]),
    (PROFILE, lambda text: text.partition("\n\n")[0]),
    (PROFILE, without_line_of("stage4_block3_conv3_wgrad")),
    (PROFILE, lambda text: text.replace("stage4_block3_conv3_wgrad", "unknown_wgrad")),
])
def test_damaged_measurements(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[str], str]) -> None:
    """One sentence that names the file, and nothing is computed from what is left of it."""
    copy_measurements(model, tmp_path, ROWS)
    file, text = tmp_path / name, (tmp_path / name).read_text()
    file.write_text(damage(text))
    assert file.read_text() != text
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("sys.argv", ["scaling_model.py", "--results", str(tmp_path)])
    assert exit_code_of(model.main) == 2
    printed = capsys.readouterr()
    (error,) = printed.err.splitlines()
    assert error.startswith(f"error: {file} is cut off or of another kind (")
    assert error.endswith("): measure it again as benchmarks/README.md says, or give another --results")
    assert not printed.out and sorted(tmp_path.iterdir()) == before


def test_a_kill_leaves_the_files_that_were_there(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_measurements(model, tmp_path, "scaling_model.jsonl", "scaling_model.png")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def killed(*names: Path) -> None:
        raise KeyboardInterrupt

    for name in ("best_buckets", "calibrated", "compare", "sensitivity", "table"):  # which take seconds
        monkeypatch.setattr(model, name, lambda *_: model.Prediction(1, 16, 2, "none", *[1.0] * 6))
    monkeypatch.setattr(model, "plot", lambda *_: b"")
    monkeypatch.setattr("os.replace", killed)  # where a new file takes the place of an old one
    monkeypatch.setattr("sys.argv", ["scaling_model.py", "--results", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        model.main()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

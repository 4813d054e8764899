"""Benchmarks of the step: their results from both sides' measurements, when they publish nothing, and the programs of
measure_all.py."""

from __future__ import annotations

import json
import math
import random
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_results import faults

from common.errors import ProgramError, UserError
from graph_passes.executors.base import Metrics
from train.recording.gpu_monitor import GpuReadings

# Stands in for peer_pytorch.py: a step takes 30 ms, in modes other than "compile" 20 ms; --losses gives the losses.
FAKE_PEER = """
import json, sys
losses = {losses}
for line in sys.stdin:
    mode = line.strip()
    if mode.startswith("prepare "):
        print("{{}}", flush=True)
        print(line, end="", file=sys.stderr, flush=True)
        continue
    print(json.dumps({{"name": "PyTorch 9.9 " + mode, "versions": {{"torch": "9.9"}}, "loss": losses.pop(0),
                       "step_ms": [30.0 if mode == "compile" else 20.0] * 5, "loss_scales": [1024.0, 1024.0],
                       "allocated_bytes": 3 << 30}}), flush=True)
"""


class Gpu:
    """A fake GPU, on which only requested work takes time; an event is a dict."""

    def __init__(self) -> None:
        self.now, self.free = 0.0, 100 << 30

    def timing_event(self) -> dict[str, float]:
        return {}

    def record(self, event: dict[str, float]) -> None:
        event["ms"] = self.now

    def elapsed_ms(self, start: dict[str, float], end: dict[str, float]) -> float:
        return end["ms"] - start["ms"]

    def memory(self) -> tuple[int, int]:
        self.free -= 5 << 30  # taken by the peer between the first call and the second
        return self.free, 140 << 30


class Executor:
    """A step takes 10 ms, inference 2 ms; in the n-th measurement the loss is losses[n], the loss scale scales[n]."""

    gpu_bus_id = "none"

    def __init__(self, losses: list[float], scales: list[float]) -> None:
        self.gpu, self.losses, self.scales = Gpu(), losses, scales
        self.seen: list[Any] = []  # data of all steps
        self.rates: set[float] = set()
        self.num_reads = 0
        self.optimizer = self

    def forward_backward(self, data: Any, label: Any) -> None:
        self.seen.append(data)
        self.gpu.now += 9

    def step(self, learning_rate: float) -> None:
        self.rates.add(learning_rate)
        self.gpu.now += 1

    def forward(self, data: Any) -> Any:
        self.gpu.now += 2
        probabilities = np.full((4, 10), self.losses[0] / 10)
        return SimpleNamespace(asnumpy=lambda: probabilities)

    def synchronize(self) -> None: ...

    def read_metrics(self) -> Metrics:
        self.num_reads += 1
        if self.num_reads % 2:  # after the warm-up
            return Metrics(0.0, 0.0, 0.0, 0.0)
        return Metrics(64 * self.losses.pop(0), 0.0, 0.0, 64.0)

    @property
    def scalars(self) -> dict[str, float]:
        return {"loss_scale": self.scales.pop(0)} if self.scales else {}


class Monitor:
    def __init__(self, bus_id: str) -> None: ...

    def start(self) -> None: ...

    sample = close = start

    def take(self) -> GpuReadings:
        return GpuReadings(690.0, 1.0, 10.0, 1810.0, 1.0)


@pytest.fixture
def measured(benchmark_module: Callable[[str], Any], tmp_path: Path,
             monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run step_gpu.py with the fakes; returns the file that it wrote."""
    step_gpu = benchmark_module("step_gpu")
    torch_peer = sys.modules["torch_peer"]

    def run(*options: str, losses: list[float], scales: list[float] = [], peer_losses: list[float] | None = None  # noqa: B006
            ) -> dict[str, Any]:
        executor = Executor(list(losses), list(scales))
        batches = [(f"batch {number}", [0] * 64) for number in range(6)]
        monkeypatch.setattr(step_gpu, "make_step", lambda *_, **__: (executor, batches))
        monkeypatch.setattr(step_gpu, "make_int8", lambda *_: (executor, batches))
        monkeypatch.setattr(step_gpu, "GpuMonitor", Monitor)
        monkeypatch.setattr(step_gpu, "MEMORY", tmp_path / "memory.jsonl")
        monkeypatch.setattr(step_gpu, "WARM_UP_SECONDS", 0.0)
        monkeypatch.setattr(step_gpu.measure, "__defaults__", (False, 0.0))
        monkeypatch.setattr(step_gpu, "random_batch", lambda *_: batches[0])
        written = {}
        monkeypatch.setattr(step_gpu, "write_result", lambda *arguments: written.update(
            path=sys.modules["record"].write_result(*arguments, folder=tmp_path)))
        monkeypatch.delenv("PEER_PYTHON", raising=False)
        if peer_losses is not None:
            program = tmp_path / "peer.py"
            program.write_text(FAKE_PEER.format(losses=peer_losses).replace("inf", "float('inf')"))
            monkeypatch.setattr(torch_peer, "PEER", program)
            monkeypatch.setenv("PEER_PYTHON", sys.executable)
        monkeypatch.setattr(sys, "argv", [str(Path(step_gpu.__file__)), "--batch", "64", "--steps", "7", *options])
        step_gpu.main()
        assert set(executor.seen) <= {name for name, _ in batches}
        result = json.loads(written["path"].read_text())
        result["commit"] = result["commit"] or "0" * 40
        return {**result, "executor": executor}

    return run


def test_the_fastest_mode_of_the_peer_is_published(
        measured: Callable[..., dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each mode is compiled before the measurements, once."""
    result = measured("--rounds", "2", "--peers", "compile", "graph", losses=[7.0, 6.5], scales=[1024.0] * 4,
                      peer_losses=[7.0] * 4)
    executor = result.pop("executor")
    assert faults(result, "resnet50_fp16_b64_synthetic_1gpu.json") == []
    assert result["step_ms"] == [10.0] * 14 and result["value"] == result["mean"] == 6400
    assert result["peer"] == {"name": "PyTorch 9.9 graph", "value": 3200, "mean": 3200, "versions": {"torch": "9.9"},
                              "step_ms": [20.0] * 10, "others": {"PyTorch 9.9 compile": [30.0] * 10}}
    assert (result["ratio"], result["watts"], result["sm_mhz"]) == (2.0, 690.0, 1810)
    assert set(executor.seen) == {f"batch {number}" for number in range(6)}  # all batches are used
    assert executor.rates == {0.1 * 64 / 256}
    (memory,) = map(json.loads, (tmp_path / "memory.jsonl").read_text().splitlines())
    assert (memory["peer"], memory["peer_in_use_gib"], memory["peer_peak_allocated_gib"]) == (
        "PyTorch 9.9 compile", 5.0, 3.0)
    assert capfd.readouterr().err.splitlines() == ["prepare compile", "prepare graph"]


def test_inference(measured: Callable[..., dict[str, Any]]) -> None:
    result = measured("--inference", "--rounds", "1", losses=[1.0])
    del result["executor"]
    assert faults(result, "resnet50_fp16_b64_inference_synthetic_1gpu.json") == []
    assert (result["value"], result["peer"]) == (32_000, None)


def test_inference_in_int8(measured: Callable[..., dict[str, Any]], benchmark_module: Callable[[str], Any]) -> None:
    """The peer of inference in INT8 runs in float16."""
    result = measured("--inference", "--dtype", "int8", "--rounds", "1", losses=[1.0])
    del result["executor"]
    assert faults(result, "resnet50_int8_b64_inference_synthetic_1gpu.json") == []
    step_gpu = benchmark_module("step_gpu")
    options = step_gpu.peer_options(step_gpu.Options(dtype="int8", inference=True))
    assert options[options.index("--dtype") + 1] == "float16"
    with pytest.raises(UserError, match="--dtype int8 is for --inference: add it, or give another precision"):
        measured("--dtype", "int8", losses=[1.0])


@pytest.mark.parametrize("losses, scales, peer_losses, sentence", [
    ([math.nan], [], [7.0], "ours did not train: their loss is [nan]"),
    ([7.0], [1024.0, 512.0], [7.0], "ours did not all train: some were skipped, since the loss scale fell"),
    ([7.0], [1024.0, 1024.0], [math.inf], "PyTorch 9.9 compile did not train: their loss is [inf]"),
])
def test_steps_that_did_not_train_are_not_published(measured: Callable[..., dict[str, Any]], tmp_path: Path,
                                                    losses: list[float], scales: list[float],
                                                    peer_losses: list[float], sentence: str) -> None:
    with pytest.raises(ProgramError) as error:
        measured("--rounds", "1", "--peers", "compile", losses=losses, scales=scales, peer_losses=peer_losses)
    assert sentence in str(error.value)
    assert not list(tmp_path.glob("*.json*"))


def test_answers_that_are_no_probabilities_are_not_published(measured: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(ProgramError, match="ours computed wrong probabilities: an image.s add up to"):
        measured("--inference", "--rounds", "1", losses=[0.9])


def test_the_loss_scale_may_grow(benchmark_module: Callable[[str], Any]) -> None:
    benchmark_module("record").check_trained("ours", [7.0, 6.0], [1024.0, 2048.0, 1024.0, 1024.0])


def test_a_mean_tells_what_a_median_does_not(benchmark_module: Callable[[str], Any]) -> None:
    """Nine steps take 10 ms and one takes 110 ms, with 100 images each: 1,000 images in 200 ms."""
    found = benchmark_module("record").statistics_of([10.0] * 9 + [110.0], 100)
    assert (found["value"], found["mean"], found["spread"]) == (10_000, 5_000, 0)


def test_turns(benchmark_module: Callable[[str], Any]) -> None:
    order: list[str] = []
    programs = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}  # type: ignore[func-returns-value]
    assert benchmark_module("torch_peer").take_turns(2, programs) == {"a": [1, 4], "b": [2, 5], "c": [3, 6]}
    assert order == list("abcabc")


class TestMeasureAll:
    @pytest.fixture
    def program(self, benchmark_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("PEER_PYTHON", sys.executable)
        return benchmark_module("measure_all")

    def test_every_command_is_one_that_its_program_takes(self, program: Any,
                                                         benchmark_module: Callable[[str], Any]) -> None:
        from common.command_line import given

        assert set(typing.get_args(program.SectionName)) == set(program.SECTIONS)
        for command in (command for commands in program.SECTIONS.values() for command in commands):
            name, *options = command.split()
            module = benchmark_module(name.removesuffix(".py"))
            declared = getattr(module, "LoaderOptions" if name.startswith("loader") else "Options")
            assert given(declared, options, prog=name).keys() >= {option[2:].replace("-", "_") for option in options
                                                                  if option.startswith("--")}

    def test_what_fails_does_not_keep_others_from_being_measured(
            self, program: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        codes = iter((0, 1, 0))
        ran: list[list[str]] = []

        def fake_run(command: list[Any], cwd: Path) -> SimpleNamespace:
            ran.append([str(word) for word in command[2:]])
            return SimpleNamespace(returncode=next(codes))

        monkeypatch.setattr(program.subprocess, "run", fake_run)
        monkeypatch.setattr(program, "SECTIONS", {"step": ("a.py --x 1", "b.py"), "small": ("c.py",), "cpu": ("d.py",)})
        monkeypatch.setattr(sys, "argv", ["measure_all.py", "--sections", "step", "small"])
        with pytest.raises(ProgramError, match=r"^failed: b\.py$"):
            program.main()
        assert ran == [["--x", "1"], [], []]

    def test_pytorch_compiles_first_what_is_measured_compiled(
            self, program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """Peers compile with the options of the measurement; a compilation that takes too long is stopped."""
        started: list[list[str]] = []
        killed: list[int] = []

        class Process:
            def __init__(self, script: Path, *options: str) -> None:
                started.append([str(option) for option in options])
                self.slow = "512" in options

            def wait(self, seconds: float | None = None) -> int:
                if self.slow and seconds:
                    raise program.subprocess.TimeoutExpired("peer", seconds)
                return -9 if self.slow else 0

            def kill(self) -> None:
                killed.append(1)

        monkeypatch.setattr(program, "start_peer", Process)
        program.compile_first(["step_gpu.py --batch 64 --inference", "step_jpeg.py", "step_gpu.py --batch 512",
                               "step_gpu.py --dtype float32 --peers eager"])
        first, second = sorted(started, key=len, reverse=True)
        assert first[0] == second[0] == "--compile-only" and first[-1] == "--inference"
        pairs = {tuple(first[at:at + 2]) for at in range(1, len(first), 2)}
        assert pairs >= {("--batch", "64"), ("--dtype", "float16")}
        assert second[second.index("--batch") + 1] == "512" and len(killed) == 1
        assert "PyTorch has compiled 1 of 2 steps" in capsys.readouterr().out

    def test_limit(self, program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        now = iter(range(0, 10_000, 100))
        monkeypatch.setattr(program.time, "monotonic", lambda: next(now))
        monkeypatch.setattr(program.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
        assert program.measure(["a.py", "b.py", "c.py"], limit=250) == ([], ["b.py", "c.py"])


class TestTables:
    @pytest.fixture
    def tables(self, benchmark_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
        module = benchmark_module("tables")
        monkeypatch.setattr(module, "RESULTS", tmp_path)
        for name, commit, hardware, peer in (
                (module.MAIN, "a" * 40, "1x NVIDIA H200", "PyTorch 9.9 torch.compile in a CUDA graph"),
                ("resnet50_bf16_b256_synthetic_1gpu", "b" * 40, "1x NVIDIA H200", "PyTorch 9.9 torch.compile"),
                ("resnet50_fp16_b64_synthetic_1gpu", "a" * 40, "1x NVIDIA H100", "PyTorch 9.9 torch.compile"),
                ("resnet50_fp16_b256_jpeg_1gpu", "a" * 40, "1x NVIDIA H200", "our synthetic step"),
                ("step_cpu", "a" * 40, "2 cores of a CPU, 24 GiB", "stock Gluon")):
            figure = {"name": name, "value": 1234.5, "mean": 1200.4, "ratio": 0.9753, "watts": 690.0, "sm_mhz": 1810,
                      "peer": {"name": peer, "value": 45.67, "versions": {"torch": "9.9"}}, "commit": commit,
                      "hardware": hardware, "versions": {"nvidia-cudnn-cu12": "9.1"},
                      "date": "2027-01-02T03:04:05+00:00"}
            (tmp_path / f"{name}.json").write_text(json.dumps(figure))
        (tmp_path / "memory_1gpu.jsonl").write_text(json.dumps(
            {"name": module.MAIN, "ours_in_use_gib": 10.62, "peer_in_use_gib": 14.3}) + "\n")
        return module

    def test_rows_are_of_one_commit_and_one_kind_of_gpu(self, tables: Any) -> None:
        where, _, _, _, *rows = tables.results_table(tables.ROOT / "README.md")
        assert where.startswith("(1x NVIDIA H200, cuDNN 9.1, PyTorch 9.9, commit aaaaaaa, 2027-01-02;")
        link = "[1,234](benchmarks/results/{}.json) (1,200)"
        assert rows == [
            f"| training step, synthetic data | {link.format(tables.MAIN)} | PyTorch, torch.compile in a CUDA graph: "
            "45.7 | 0.98 times |",
            f"| training from ImageNet JPEGs, 16 CPU cores | {link.format('resnet50_fp16_b256_jpeg_1gpu')} | our "
            "synthetic step: 45.7 | 97.5 % |",
            f"| 2 CPU cores: step, fp32, batch 32, 64 pixels | {link.format('step_cpu')} | stock Gluon: 45.7 | 0.98 "
            "times |"]

    def test_speed(self, tables: Any) -> None:
        _, _, row = tables.speed_table(tables.ROOT / "docs" / "cuda_executor.md")
        assert row == (f"| ResNet-50 | fp16, 256 | [1,234](../benchmarks/results/{tables.MAIN}.json), 1,200 | 45.7 "
                       "(torch.compile in a CUDA graph) | 0.98 | 690, 1,810 | 10.6, 14.3 |")

    def test_profile(self, tables: Any, tmp_path: Path) -> None:
        """Operations are grouped; unknown ones count as others."""
        from graph_passes.executors.cuda.profile import Row, format_summary

        rows = [Row("a", "fprop_stats", 1.0, 10**9, 10**9), Row("b", "fprop", 0.5, 10**9, 0.0),
                Row("c", "something_new", 0.25, 4 * 10**8, 0.0)]
        (tmp_path / "resnet50_fp16_b256_profile.txt").write_text(f"node  ms\nx  1\n\n{format_summary(rows, 4000.0)}\n")
        assert tables.profile_table(tmp_path)[2:] == [
            "| convolutions forward, most with statistics | 2 | 1.50 | 1.25 | 0.25 |",
            "| loss, pooling and the like | 1 | 0.25 | 0.10 | 0.15 |", "| sum | 3 | 1.75 | 1.35 | 0.40 |"]

    def test_ingredients(self, tables: Any, tmp_path: Path) -> None:
        lines = [{"steps": 3}, {"change": "BCE", "longer_percent": 0.84, "step_ms": [3, 2, 9], "without_ms": [2]}]
        (tmp_path / "resnet50_fp16_b256_ingredients_1gpu.jsonl").write_text("\n".join(map(json.dumps, lines)))
        assert tables.ingredients_table(tmp_path)[2:] == ["| BCE | 3.00 | 2.00 | 0.8 % |"]

    def test_numbers_follow_their_links(self, tables: Any, tmp_path: Path) -> None:
        text = f"[9.0 images/s]({tables.MAIN}.json) [8,000]({tables.MAIN}.json) [7]({tables.MAIN}.jsonl) [6](gone.json)"
        assert tables.updated(text, tmp_path / "page.md") == (
            f"[1,234.5 images/s]({tables.MAIN}.json) [1,234]({tables.MAIN}.json) [7]({tables.MAIN}.jsonl) "
            "[6](gone.json)")


def test_pages_hold_the_present_figures(benchmark_module: Callable[[str], Any]) -> None:
    """The pages agree with the results; if not, `python benchmarks/tables.py` updates them."""
    tables = benchmark_module("tables")
    stale = [page.name for page in tables.PAGES if tables.updated(page.read_text(), page) != page.read_text()]
    assert stale == []
    shown = [(page.name, match[2]) for page in tables.PAGES for match in tables.TABLE.finditer(page.read_text())]
    assert shown == [("README.md", "results"), ("cuda_executor.md", "speed"), ("performance.md", "profile"),
                     ("performance.md", "inference"), ("performance.md", "int8"), ("recipes.md", "ingredients"),
                     ("scaling_model.md", "scaling_error"), ("scaling_model.md", "scaling_plan")]


def test_seeded_peer_choice(benchmark_module: Callable[[str], Any]) -> None:
    rng = random.Random(1)
    ways = {name: [rng.uniform(9, 11) + slow for _ in range(9)] for name, slow in (("a", 2), ("b", 0), ("c", 5))}
    peer = benchmark_module("record").best_peer(ways, {"torch": "9"})
    assert (peer.name, list(peer.others)) == ("b", ["a", "c"])


class TestJpeg:
    """step_jpeg.py: its figures for each policy."""

    @pytest.fixture
    def run(self, benchmark_module: Callable[[str], Any], tmp_path: Path,
            monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
        """Run the program with fakes instead of a GPU; returns the files that it wrote, and how it started its peer."""
        step_jpeg = benchmark_module("step_jpeg")
        record, loader_gpu, torch_peer = (sys.modules[name] for name in ("record", "loader_gpu", "torch_peer"))
        peer = tmp_path / "peer.py"
        peer.write_text("import json, sys\n"
                        f"open({str(tmp_path / 'started')!r}, 'w').write(json.dumps(sys.argv[1:]))\n" +
                        FAKE_PEER.format(losses=[7.0]).replace("* 5", "* 10"))
        gpu = dict(zip(step_jpeg.GPU_READINGS, (690.0, 1810.0, 1.0), strict=True))
        found: dict[str, Any] = {}

        def run_ours(config: Any, *_: Any) -> list[dict[str, Any]]:
            found["config"] = config
            times = {"JPEG": 25.0, "synthetic": 24.0}
            return [*({"name": name, "step_ms": [ms] * 6, "idle_share": 0.0, **gpu} for name, ms in times.items()),
                    {"name": "our loader alone", "step_ms": [12.5] * 6}]

        monkeypatch.setattr(step_jpeg, "repeated_records", lambda *_: tmp_path)
        monkeypatch.setattr(step_jpeg, "run_ours", run_ours)
        monkeypatch.setattr(step_jpeg, "write_result", lambda *arguments: record.write_result(
            *arguments, folder=tmp_path))
        monkeypatch.setattr(loader_gpu, "RESULTS", tmp_path)
        monkeypatch.setattr(torch_peer, "PEER", peer)
        monkeypatch.setenv("PEER_PYTHON", sys.executable)

        def run(*options: str) -> dict[str, Any]:
            monkeypatch.setattr(sys, "argv", [str(Path(step_jpeg.__file__)), "--workers", "2", *options])
            step_jpeg.main()
            return {**found, "started": json.loads((tmp_path / "started").read_text()),
                    **{path.name: path.read_text() for path in tmp_path.glob("resnet50_*")}}

        return run

    @pytest.mark.parametrize("policy", ["trivialaugment", "randaugment"])
    def test_a_policy_is_a_figure_of_its_own(self, run: Callable[..., dict[str, Any]], policy: str) -> None:
        """The peer of a policy is our synthetic step; PyTorch's loader is measured alone, with equal transforms."""
        written = run("--auto-augment", policy, "--random-erasing", "0.1")
        assert (written["config"].auto_augment, written["config"].random_erasing) == (policy, 0.1)
        name = f"resnet50_fp16_b256_jpeg_{policy}_1gpu"
        result = json.loads(written[f"{name}.json"])
        result["commit"] = result["commit"] or "0" * 40
        assert faults(result, f"{name}.json") == []
        assert (result["peer"]["name"], result["ratio"]) == ("our synthetic step", pytest.approx(24 / 25))
        lines = [json.loads(line) for line in written[f"{name}.jsonl"].splitlines()]
        assert [line["name"] for line in lines] == ["JPEG", "synthetic", "our loader alone", "PyTorch 9.9 eager"]
        assert lines[2]["images_per_sec"] == pytest.approx(256 / 12.5e-3)
        started = written["started"]
        assert "--loader-only" in started and "--model" not in started
        assert started[started.index("--auto-augment"):][:4] == ["--auto-augment", policy, "--random-erasing", "0.1"]

    def test_without_a_policy_pytorch_trains(self, run: Callable[..., dict[str, Any]]) -> None:
        written = run()
        assert "--loader-only" not in written["started"] and "--model" in written["started"]
        assert set(written) >= {"resnet50_fp16_b256_jpeg_1gpu.json", "resnet50_fp16_b256_jpeg_1gpu.jsonl"}


class TestIngredients:
    """step_ingredients.py: the lines that it keeps, and its results."""

    @pytest.fixture
    def program(self, benchmark_module: Callable[[str], Any]) -> Any:
        return benchmark_module("step_ingredients")

    def test_every_ingredient_is_a_configuration(self, program: Any) -> None:
        """Each ingredient gives a valid configuration that differs from the step without it."""
        from train.config import check

        plain = program.configuration(program.Options(), {})
        for changes in (program.TOGETHER, *program.INGREDIENTS.values()):
            config = program.configuration(program.Options(), changes)
            check(config)
            assert config != plain
        assert set(program.TOGETHER) >= {name for changes in program.INGREDIENTS.values() for name in changes
                                         if name != "stochastic_depth_mode"}

    def test_it_goes_on_where_it_stopped(self, program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
        from step_jpeg import TimedSteps

        measured: list[str] = []

        def compare(_: Any, name: str, changes: dict[str, Any], folder: Path) -> dict[str, Any]:
            if len(measured) == 2:
                raise ProgramError("the GPU is gone")
            measured.append(name)
            turns = [[TimedSteps([ms] * 5, 0.0, GpuReadings(690.0, 1.0, 10.0, 1810.0, 1.0))] for ms in (20.0, 20.5)]
            return program.line_of(name, *turns)

        monkeypatch.setattr(program, "compare", compare)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(Path(program.__file__)), "--results", "."])
        with pytest.raises(ProgramError, match="the GPU is gone"):
            program.main()
        assert not list(tmp_path.glob("*.json"))
        both, measured = measured, []
        names = [program.ALL, *program.INGREDIENTS]
        while True:  # two more of them at a time
            try:
                program.main()
                break
            except ProgramError:
                both, measured = both + measured, []
        assert both + measured == names
        result = json.loads((tmp_path / "resnet50_fp16_b256_ingredients_1gpu.json").read_text())
        result["commit"] = result["commit"] or "0" * 40
        assert faults(result, "resnet50_fp16_b256_ingredients_1gpu.json") == []
        assert result["ratio"] == pytest.approx(20 / 20.5)
        assert f"{program.ALL}: 20.500 ms, without 20.000 ms: +2.50 %" in capsys.readouterr().out

    def test_frozen_layers_are_configurations(self, program: Any, benchmark_module: Callable[[str], Any]) -> None:
        """step_frozen.py: each choice of frozen layers is a valid configuration."""
        from graph_passes import roles
        from train import models
        from train.build import training_graph
        from train.config import check

        frozen, num_trained = benchmark_module("step_frozen"), []
        for changes in frozen.FROZEN.values():
            config = program.configuration(program.Options(model="resnet18"), changes)
            check(config)
            graph = training_graph(config, models.create(config.model, 10))
            num_trained.append(len(roles.uses(graph).keys() - roles.frozen(graph)))
        assert num_trained == sorted(num_trained, reverse=True) and len(set(num_trained)) == len(num_trained)
        assert frozen.CLASSIFIER_ALONE in frozen.FROZEN

    @pytest.mark.gpu
    @pytest.mark.alone
    def test_steps_with_and_without(self, program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """All ingredients together on a small network: both sides train, and the raw times of both are kept."""
        monkeypatch.setattr(sys.modules["step_jpeg"], "WARM_UP_SECONDS", 0.5)
        line = program.compare(program.Options(model="resnet18", batch=16, steps=20, rounds=2), program.ALL,
                               program.TOGETHER, tmp_path)
        assert len(line["step_ms"]) == len(line["without_ms"]) == 40 and min(line["step_ms"]) > 0
        assert line["power"] > 0 and line["clock"] > 0

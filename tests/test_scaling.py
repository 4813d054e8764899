"""benchmarks/scaling.py: the files, table and plots that it makes from its measurements."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_results import faults

from common.command_line import exit_code_of
from common.errors import UserError
from graph_passes.executors.base import Metrics

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


@pytest.fixture
def scaling(benchmark_module: Callable[[str], Any]) -> Any:
    return benchmark_module("scaling")


def rows() -> list[dict[str, Any]]:
    """One GPU takes 20 ms for 100 images, two take 25 ms for 200, of which 1 ms waits for an all-reduce of 4 ms."""
    both = {
        "what": "synthetic", "gpus": 2, "batch": 100, "step_ms": [25.0] * 8, "nvlink_bytes": None,
        "buckets": [["weights 1", 30_000_000, "float16"], ["others", 2_000_000, "float32"]],
        "each_alone_ms": [20.0, 22.0], "exposed_ms": [1.0] * 8, "all_reduce_ms": [3.5, 0.5],
        "pass_alone_ms": [20.0] * 8, "pass_ms": [22.0] * 8, "wait_ms": [2.5] * 8,
        "timeline": {"buckets": [[15.0, 19.0], [24.0, 24.5]], "parts": [24.0, 24.5, 25.0]}, "watts": 690.0,
        "sm_mhz": 1810.0,
    }
    return [{"what": "synthetic", "gpus": 1, "batch": 100, "step_ms": [20.0] * 8}, both]


def write_rows(path: Path, written: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in written))
    return path


def test_table(scaling: Any) -> None:
    _, _, one, two = scaling.table(rows()).splitlines()
    assert [cell.strip() for cell in one.split("|")[1:6]] == ["ours, synthetic", "1", "5,000", "5,000", "100.0%"]
    assert [cell.strip() for cell in two.split("|")[1:-1]] == [
        "ours, synthetic", "2", "8,000", "4,000", "80.0%", "0.1725", "4,773", "4,545", "83.8%", "2.00 ms", "1.50 ms",
        "4.00 ms", "1.00 ms", "75%", "32 MB (computed)"
    ]


def test_one_gpu_of_another_batch_is_no_comparison(scaling: Any) -> None:
    one, two = rows()
    assert scaling.single_of(two, [one]) is one
    assert scaling.single_of(two, [{**one, "batch": 256}]) is None


def test_what_the_processes_of_a_program_measure(scaling: Any, tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text("import argparse, json, pathlib\n"
                       "parser = argparse.ArgumentParser()\n"
                       "parser.add_argument('--worker', type=pathlib.Path)\n"
                       "parser.add_argument('--warm-up', type=int)\n"
                       "arguments = parser.parse_args()\n"
                       "arguments.worker.write_text(json.dumps({'warm_up': arguments.warm_up}))\n")
    options = scaling.flags(Namespace(warm_up=7), "warm_up")
    assert scaling.measure_in_processes(1, str(program), options) == {"warm_up": 7}
    assert scaling.measure_in_processes(1, str(program), ["--warm-up", "long"]) is None
    assert "invalid int value: 'long'" in capsys.readouterr().err


def test_files(scaling: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = rows()
    scaling.write(measured, 2, tmp_path)
    for row in measured:
        scaling.publish(row, measured, tmp_path)
    figure = "resnet50_fp16_b100_synthetic_2gpu.json"
    assert {path.name for path in tmp_path.iterdir()} == {
        figure, "allreduce_timeline_b100_2gpu.png", "scaling_b100_2gpu.jsonl", "scaling_b100_2gpu.md",
        "scaling_b100_2gpu.png",
    }
    result = json.loads((tmp_path / figure).read_text())
    result["commit"] = result["commit"] or "0" * 40
    assert faults(result, figure) == []
    assert result["ratio"] == 0.8
    assert [json.loads(line) for line in (tmp_path / "scaling_b100_2gpu.jsonl").read_text().splitlines()] == measured
    for name in ("scaling_b100_2gpu.png", "allreduce_timeline_b100_2gpu.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "0.800 times 2 times one GPU" in capsys.readouterr().out
    assert (tmp_path / "scaling_b100_2gpu.md").read_text() == scaling.table(measured) + "\n"


def test_a_kill_leaves_the_rows_that_were_there(scaling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling.write(rows()[:1], 2, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def killed(*names: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)  # where a new file replaces an old one
    with pytest.raises(KeyboardInterrupt):
        scaling.write(rows(), 2, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_redraw(scaling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                capsys: pytest.CaptureFixture[str]) -> None:
    """Redrawing needs no GPU, reads the rows of an earlier run, and does not write them again."""
    rows_file = write_rows(tmp_path / "earlier.jsonl", rows())
    results = tmp_path / "results"
    monkeypatch.setattr("sys.argv", ["scaling.py", "--redraw", str(rows_file), "--results", str(results)])
    scaling.main()
    assert capsys.readouterr().out == (results / "scaling_b100_2gpu.md").read_text()
    assert {path.name for path in results.iterdir()} == {
        "allreduce_timeline_b100_2gpu.png", "scaling_b100_2gpu.md", "scaling_b100_2gpu.png"}


def test_redraw_beside_its_own_rows(scaling: Any, tmp_path: Path) -> None:
    scaling.write(rows(), 2, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "scaling_b100_2gpu.md").write_text("damaged")
    scaling.redraw(tmp_path / "scaling_b100_2gpu.jsonl", tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.long(but=["trial.jsonl"])
@pytest.mark.parametrize("name", ["trial.jsonl", "scaling_b100_2gpu.jsonl"])
def test_redraw_keeps_what_another_run_has_left(scaling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str], name: str) -> None:
    results = tmp_path / "results"
    scaling.write(rows(), 2, results)
    before = {path.name: path.read_bytes() for path in results.iterdir()}
    one, two = rows()
    trial = write_rows(tmp_path / name, [one, {**two, "step_ms": [26.0] * 8}])
    monkeypatch.setattr("sys.argv", ["scaling.py", "--redraw", str(trial), "--results", str(results)])
    assert exit_code_of(scaling.main) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error == (f"error: --redraw {trial} would overwrite the table and plots of another run, "
                     f"{results / 'scaling_b100_2gpu.jsonl'}: give another --results")
    assert {path.name: path.read_bytes() for path in results.iterdir()} == before


def test_redraw_of_a_run_that_was_stopped(scaling: Any, tmp_path: Path) -> None:
    """The name of the run's file states for how many GPUs the run was."""
    stopped = tmp_path / "scaling_b100_4gpu.jsonl"
    stopped.write_text(json.dumps(rows()[0]) + "\n")
    scaling.redraw(stopped, tmp_path)
    assert (tmp_path / "scaling_b100_4gpu.png").exists() and not list(tmp_path.glob("*_1gpu*"))


@pytest.mark.parametrize("text", ["", "# A page\n", '{"gpus": 2}\n', '{"gpus": 2, "step', "3\n"])
def test_redraw_of_another_file(scaling: Any, tmp_path: Path, text: str) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(text)
    with pytest.raises(UserError, match="other.jsonl is not a file of scaling.py, or is cut off"):
        scaling.redraw(other, tmp_path)
    assert [*tmp_path.iterdir()] == [other]


TIMELINE = rows()[1]["timeline"]


@pytest.mark.parametrize("damage", [
    {"batch": 64}, {"batch": "100"}, {"gpus": 0}, {"gpus": 2.0}, {"gpus": True}, {"gpus": 3}, {"what": None},
    {"step_ms": []}, {"step_ms": [25.0, 0.0]}, {"step_ms": [25.0, -1.0]}, {"step_ms": [25.0, float("nan")]},
    {"step_ms": [float("inf")]}, {"step_ms": ["25"]}, {"step_ms": None}, {"watts": 0},
    pytest.param({"step_ms": [10**400]}, id="more than a float holds"),
    {"all_reduce_ms": []}, {"all_reduce_ms": [0.0, 0.5]}, {"all_reduce_ms": [3.5]}, {"each_alone_ms": [20.0]},
    {"pass_ms": [0.0]}, {"exposed_ms": []}, {"exposed_ms": [-1.0]}, {"wait_ms": [float("nan")]}, {"buckets": []},
    {"buckets": [["weights 1", 30_000_000], ["others", 2_000_000]]}, {"timeline": None},
    {"timeline": {"parts": TIMELINE["parts"]}}, {"timeline": {**TIMELINE, "buckets": TIMELINE["buckets"][:1]}},
    {"timeline": {**TIMELINE, "buckets": [[15.0, 19.0], [24.0]]}}, {"timeline": {**TIMELINE, "parts": [24.0, 24.5]}},
    {"timeline": {**TIMELINE, "parts": [24.0, 24.5, "25"]}},
], ids=str)
def test_redraw_of_damaged_rows(scaling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                capsys: pytest.CaptureFixture[str], damage: dict[str, Any]) -> None:
    one, two = rows()
    file = write_rows(tmp_path / "scaling_b100_2gpu.jsonl", [one, {**two, **damage}])
    results = tmp_path / "results"
    monkeypatch.setattr("sys.argv", ["scaling.py", "--redraw", str(file), "--results", str(results)])
    assert exit_code_of(scaling.main) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: --redraw {file} is not a file of scaling.py, or is cut off (")
    assert not results.exists()


def test_waits_may_be_none(scaling: Any) -> None:
    one, two = rows()
    waitless = [{**one, "loader_wait_ms": [0.0]}, {**two, "exposed_ms": [0.0] * 8, "wait_ms": [0.0] * 8}]
    assert scaling.read_rows("\n".join(map(json.dumps, waitless))) == waitless


@pytest.mark.parametrize("name", ["scaling_b64_4gpu.jsonl", "scaling_b256_4gpu.jsonl"])
def test_what_was_measured_is_not_damaged(scaling: Any, name: str) -> None:
    assert scaling.read_rows((RESULTS / name).read_text())


class Clock:
    """A fake GPU, on which only requested work takes time; an event is a dict."""

    device_id = 0

    def __init__(self) -> None:
        self.now = 0.0  # ms

    def timing_event(self) -> dict[str, float]:
        return {}

    def record(self, event: dict[str, float]) -> None:
        event["ms"] = self.now

    def elapsed_ms(self, start: dict[str, float], end: dict[str, float]) -> float:
        return end["ms"] - start["ms"]


class Executor:
    """A pass takes 20 ms, of which the last bucket needs the last 2 ms; the optimizer takes 0.5 ms."""

    gpu_bus_id = "none"

    def __init__(self, gpu: Clock) -> None:
        self.gpu = gpu
        buckets = [SimpleNamespace(name=name, num_bytes=num_bytes, dtype="float16", ready={}, done={})
                   for name, num_bytes in (("weights 1", 50e6), ("others", 2e5))]
        self.step, self.optimizer = SimpleNamespace(buckets=buckets), SimpleNamespace(
            step=self.update, scalars={"loss_scale": 1024.0})

    def forward_backward(self, data: Any, label: Any, on_bucket: Any = None) -> None:
        for bucket, ms in zip(self.step.buckets, (18.0, 2.0), strict=True):
            self.gpu.now += ms
            self.gpu.record(bucket.ready)
            if on_bucket:
                on_bucket(bucket)

    def update(self, learning_rate: float) -> None:
        self.gpu.now += 0.5

    def read_metrics(self) -> Metrics:
        return Metrics(700.0, 0.0, 1.0, 100.0)

    def end_step(self) -> None: ...

    synchronize = end_step


class AllReduce:
    """An all-reduce takes 10 ns per kB, during the pass or after it."""

    def __init__(self, executor: Executor) -> None:
        self.gpu, self.free = executor.gpu, 0.0

    def start(self, bucket: Any) -> None:
        self.free = max(self.free, self.gpu.now) + 1e-8 * bucket.num_bytes
        bucket.done["ms"] = self.free

    def wait(self) -> None: ...

    def finish(self) -> None:
        self.gpu.now = max(self.gpu.now, self.free)


@pytest.mark.parametrize("size", [1, 2])
def test_measurement(scaling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The results that a process computes from the events of its steps; both processes have equal times."""
    workers = SimpleNamespace(size=size, rank=0, local_rank=0, alone=size == 1, sum=list,
                              gather=lambda value: [value] * size,
                              bucket_all_reduce=AllReduce)
    monkeypatch.setattr(scaling, "Workers", lambda: workers)
    monkeypatch.setattr(scaling, "make_step", lambda *_, **options: (Executor(Clock()), [(options, None)] * 2))
    counter = iter(range(0, 10_000, 700))
    monkeypatch.setattr(scaling, "nvlink_bytes", lambda device_id: next(counter))
    options = Namespace(batch=256, steps=7, warm_up=3, buckets=2, wire_dtype="auto", worker=tmp_path / "row.json")
    scaling.measure_synthetic(options)
    row = json.loads(options.worker.read_text())
    assert (row["what"], row["gpus"], row["batch"]) == ("synthetic", size, 256)
    assert len(row["step_ms"]) == scaling.TURNS * (options.steps - 1)
    if size == 1:
        assert row["step_ms"] == pytest.approx([20.5] * len(row["step_ms"]))
        return
    # the first bucket's 0.5 ms are hidden by the remaining 2 ms of the pass; the second bucket's 2 us are not
    assert row["step_ms"] == pytest.approx([20.502] * len(row["step_ms"]))
    assert row["exposed_ms"] == pytest.approx([0.002] * scaling.TURNS * options.steps)
    assert row["each_alone_ms"] == pytest.approx([20.5] * 2)
    for name in ("pass_alone_ms", "pass_ms"):
        assert row[name] == pytest.approx([20.0] * scaling.TURNS * options.steps)
    assert row["wait_ms"] == pytest.approx(row["exposed_ms"])  # the processes are alike: none waits for another
    assert row["all_reduce_ms"] == pytest.approx([0.5, 0.002])
    assert row["timeline"]["buckets"] == [pytest.approx([18, 18.5]), pytest.approx([20, 20.002])]
    assert row["timeline"]["parts"] == pytest.approx([20, 20.002, 20.502])
    assert row["nvlink_bytes"] == 100


@pytest.mark.parametrize("has_meters", [True, False])
def test_row_from_jpegs(scaling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_meters: bool) -> None:
    """A row leaves out the warm-up, and has the power of one GPU."""
    def program(command: list[Any]) -> str:
        report = Path(command[command.index("--output") + 1]) / "report" / "report.json"
        report.parent.mkdir(parents=True)
        report.write_text(json.dumps({
            "step_ms": [900.0, 25.0, 26.0], "loader_wait_ms": [800.0, 0.0, 0.5],
            "summary": {"gpu_power": 1380.0, "gpu_clock": 1850.0} if has_meters else {"gpu_power": None}}))
        return ""

    monkeypatch.setattr(scaling, "run_command", program)
    (row,) = scaling.run_jpeg(2, scaling.Options(warm_up=1), tmp_path, tmp_path / "records")
    assert row == {"what": "jpeg", "gpus": 2, "batch": 256, "step_ms": [25.0, 26.0], "loader_wait_ms": [0.0, 0.5],
                   **({"watts": 690.0, "sm_mhz": 1850.0} if has_meters else {})}

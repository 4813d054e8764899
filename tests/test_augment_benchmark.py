"""benchmarks/augment_gpu.py and its GPU tracing, tested without a GPU."""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from pipelines import LoaderConfig
from pipelines.samples import make_samples
from pipelines.sources import open_source


def kernel_record(name: ctypes.c_char_p, start: int, end: int) -> ctypes.Array[ctypes.c_char]:
    """An activity record as CUPTI writes it (CUpti_ActivityKernel of CUDA 12 and 13)."""
    address = ctypes.cast(name, ctypes.c_void_p).value
    return ctypes.create_string_buffer(struct.pack("<I12xQQ72xQ", 10, start, end, address), 200)


def test_records_are_read(benchmark_module: Callable[[str], Any]) -> None:
    trace_gpu = benchmark_module("trace_gpu")
    name = ctypes.c_char_p(b"resample")
    record = kernel_record(name, 10**18, 10**18 + 1500)
    assert trace_gpu.parsed(ctypes.addressof(record)) == ("resample", 10**18, 10**18 + 1500)
    copy = ctypes.create_string_buffer(struct.pack("<I12xQQ", 1, 5, 7), 100)
    assert trace_gpu.parsed(ctypes.addressof(copy)) == ("copy", 5, 7)


def test_without_cupti(benchmark_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUPTI the benchmark prints one sentence, and measures everything else."""
    pathfinder = pytest.importorskip("cuda.pathfinder")

    def nowhere(name: str) -> None:
        raise RuntimeError(name)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", nowhere)
    with pytest.raises(UserError, match="CUPTI, .*, is missing: install the CUDA toolkit"), \
            benchmark_module("trace_gpu").KernelTrace():
        pass
    assert benchmark_module("augment_gpu").traced(lambda: None) == {}


def test_launches_are_counted_for_a_batch(benchmark_module: Callable[[str], Any],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    augment_gpu, trace_gpu = benchmark_module("augment_gpu"), benchmark_module("trace_gpu")

    class Trace(trace_gpu.KernelTrace):  # type: ignore[misc, name-defined]
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            for _ in range(augment_gpu.BATCHES):
                self.launches += [trace_gpu.Launch("resize", 0, 250_000), trace_gpu.Launch("copy", 0, 10**9),
                                  trace_gpu.Launch("finish_images", 0, 50_000)]

    monkeypatch.setattr(augment_gpu, "KernelTrace", Trace)
    found = augment_gpu.traced(lambda: None)
    assert found["longest_ms"] == {"resize": 0.25, "finish_images": 0.05}
    assert (found["launches"], found["gpu_ms"], found["our_launches"], found["our_ms"]) == (2, 0.3, 1, 0.05)
    assert "2.0 launches,  0.300 ms a batch; of ours 1,  0.050 ms" in augment_gpu.shown({"name": "plain", **found})


@pytest.mark.long
def test_no_batch_is_under_way_where_a_trace_begins(benchmark_module: Callable[[str], Any], tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace would count only a part of a batch that is computed while the trace begins or ends."""
    augment_gpu = benchmark_module("augment_gpu")
    make_samples(tmp_path, num_train=12, num_val=12)
    config = LoaderConfig(data=str(tmp_path), batch_size=2, image_size=32, num_threads=1)
    made = []

    def traced(batch: Callable[[], Any]) -> dict[str, Any]:
        for _ in range(3):
            made.append(batch.__self__._planned)  # type: ignore[attr-defined]
            batch()
        return {}

    monkeypatch.setattr(augment_gpu, "traced", traced)
    augment_gpu.traced_loader(config, open_source(str(tmp_path), "train"))
    assert made == [1, 2, 3]


def test_lines_are_written_as_they_are_measured(benchmark_module: Callable[[str], Any], tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    augment_gpu = benchmark_module("augment_gpu")
    monkeypatch.setattr(sys.modules["loader_gpu"], "RESULTS", tmp_path)
    monkeypatch.setattr(augment_gpu, "measure_loaders", lambda _: iter([{"name": "plain", "images_per_sec": 2e4}]))
    monkeypatch.setattr(augment_gpu, "measure_families", lambda _: iter([{"name": "all images: warp"}]))
    monkeypatch.setattr(sys, "argv", ["augment_gpu.py", "--batch", "64"])
    augment_gpu.main()
    monkeypatch.setattr(sys, "argv", ["augment_gpu.py", "--augmentations", "swirl"])
    with pytest.raises(UserError, match="--augmentations swirl: choose from crop and flip, random erasing, "):
        augment_gpu.main()
    lines = [json.loads(line) for line in (tmp_path / "augment_1gpu.jsonl").read_text().splitlines()]
    assert [(line["name"], line["batch"]) for line in lines] == [("plain", 64), ("all images: warp", 64)]

"""ResNet-50 in INT8 against fp32, both in ONNX Runtime on this CPU, alternating.

    python benchmarks/int8_cpu.py

Writes results/resnet50_int8_cpu.json. `python -m train export --onnx` writes both files from one untrained network, the
INT8 file with `--int8 onnxruntime`. INT8 is calibrated on random images, because speed does not depend on the values.
ONNX Runtime applies its default optimisations to both files, and uses all physical cores. A CPU with VNNI has
instructions for sums of INT8 products; the JSON names the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
from record import Peer, run, times_in_turn, write_result

from common.command_line import Positive, read_options
from common.errors import UserError
from train.commands.export import export_onnx
from train.commands.quantize import untrained


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    batch: Positive = 8
    """Images per pass."""
    size: Positive = 224
    """Height and width of an image."""
    rounds: Positive = 60
    """Timed passes in each precision."""
    model: str = "resnet50"
    """The network; the figure is named after it."""
    classes: Positive = 1000
    """Number of classes."""


def network_files(model: str, classes: int, size: int) -> dict[str, bytes]:
    """The content of both ONNX files, keyed by precision."""
    trained, int8 = untrained(model, classes, size)
    return {"int8": export_onnx(trained, int8)[0], "fp32": export_onnx(trained)[0]}


def passes(contents: dict[str, bytes], images_nchw: np.ndarray, threads: int) -> dict[str, Callable[[], object]]:
    """For each precision, a function that runs the network once. Raises UserError without ONNX Runtime."""
    try:
        import onnxruntime
    except ImportError:
        raise UserError("this needs onnxruntime, which is not installed: run make setup") from None
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads

    def of(content: bytes) -> Callable[[], object]:
        session = onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, {"data": images_nchw})

    return {name: of(content) for name, content in contents.items()}


def main() -> None:
    import psutil

    options = read_options(Options)
    images = np.random.default_rng(1).standard_normal((options.batch, 3, options.size, options.size), dtype=np.float32)
    contents = network_files(options.model, options.classes, options.size)
    programs = passes(contents, images, psutil.cpu_count(logical=False) or 1)
    times = times_in_turn(programs, options.rounds, warm_up=5)
    versions = {"onnxruntime": version("onnxruntime")}
    write_result(f"{options.model}_int8_cpu", times["int8"], options.batch,
                 Peer("ONNX Runtime fp32", times["fp32"], versions))


if __name__ == "__main__":
    run(main)

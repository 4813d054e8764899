"""Peak figures from the makers' datasheets, without sparsity: TFLOP/s (TOP/s in int8) and memory bandwidth in GB/s.

Datasheets of Ampere and later GPUs state figures with sparsity; the figures here are half of these. The 16-bit and
8-bit figures are those of tensor cores where a GPU has them, with sums in fp32 or int32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Datasheet:
    """A datasheet. `names`: beginnings of the driver's names for the GPU. `source`: the address of the figures."""

    names: tuple[str, ...]
    tflops: Mapping[str, float]  # precision -> TFLOP/s
    gigabytes_per_second: float
    source: str


def _tensor_cores(fp32: float, tf32_sparse: float, fp16_sparse: float, fp8_sparse: float) -> dict[str, float]:
    """TFLOP/s by precision, without sparsity. The arguments are the datasheet's figures, which include sparsity for
    tensor cores.
    """
    fp16, fp8 = fp16_sparse / 2, fp8_sparse / 2
    return {"fp32": fp32, "tf32": tf32_sparse / 2, "fp16": fp16, "bf16": fp16, "fp8": fp8, "int8": fp8}


_SXM, _NVL = _tensor_cores(67, 989, 1979, 3958), _tensor_cores(60, 835, 1671, 3341)  # Hopper
_AMPERE = {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0, "int8": 624.0}

# Longer names come before their own beginnings, because the first match counts.
DATASHEETS = (
    Datasheet(("NVIDIA H200 NVL",), _NVL, 4800, "https://www.nvidia.com/en-us/data-center/h200/"),
    Datasheet(("NVIDIA H200",), _SXM, 4800, "https://www.nvidia.com/en-us/data-center/h200/"),
    Datasheet(("NVIDIA H100 PCIe",), _tensor_cores(51, 756, 1513, 3026), 2000,
              "https://www.nvidia.com/en-us/data-center/h100/"),
    Datasheet(("NVIDIA H100 NVL",), _NVL, 3900, "https://www.nvidia.com/en-us/data-center/h100/"),
    Datasheet(("NVIDIA H100",), _SXM, 3350, "https://www.nvidia.com/en-us/data-center/h100/"),
    Datasheet(("NVIDIA A100-SXM4-80GB",), _AMPERE, 2039, "https://www.nvidia.com/en-us/data-center/a100/"),
    Datasheet(("NVIDIA A100 80GB PCIe",), _AMPERE, 1935, "https://www.nvidia.com/en-us/data-center/a100/"),
    Datasheet(("NVIDIA A100",), _AMPERE, 1555, "https://www.nvidia.com/en-us/data-center/a100/"),
    Datasheet(("NVIDIA L40S",), _tensor_cores(91.6, 366, 733, 1466), 864,
              "https://www.nvidia.com/en-us/data-center/l40s/"),
    Datasheet(("NVIDIA L4",), _tensor_cores(30.3, 120, 242, 485), 300, "https://www.nvidia.com/en-us/data-center/l4/"),
    Datasheet(("Tesla T4", "NVIDIA T4"), {"fp32": 8.1, "fp16": 65.0, "int8": 130.0}, 320,
              "https://www.nvidia.com/en-us/data-center/tesla-t4/"),
    Datasheet(("Tesla V100-PCIE", "Tesla V100-FHHL"), {"fp32": 14.0, "fp16": 112.0}, 900,
              "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"),
    Datasheet(("Tesla V100",), {"fp32": 15.7, "fp16": 125.0}, 900,
              "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"),
    Datasheet(("Tesla P100",), {"fp32": 10.6, "fp16": 21.2}, 732,
              "https://www.nvidia.com/en-us/data-center/tesla-p100/"),
)


def datasheet_of(device: str) -> Datasheet | None:
    """The datasheet of a GPU, found by the driver's name for the GPU; None if no datasheet is listed."""
    return next((sheet for sheet in DATASHEETS for name in sheet.names if _is(device, name)), None)


def _is(device: str, name: str) -> bool:
    """Whether the device's name contains `name` as a whole word: an L40 is not an L4."""
    return device.startswith(name) and not device[len(name) :][:1].isalnum()

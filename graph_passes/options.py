"""Options of this package's commands. Imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal


@dataclass(frozen=True)
class ShowOptions:
    """Print a table of a network before and after the passes, and draw it after each of them.

    Examples:
      python -m graph_passes show --model resnet50_v1               a network of MXNet's model zoo
      python -m train export --symbol resnet50.json                 our own ResNet-50 as a Symbol JSON file ...
      python -m graph_passes show --symbol resnet50.json            ... and what the passes do to it
      python -m graph_passes show --symbol resnet50.json --step     ... up to the training step that will run
      python -m graph_passes show --symbol resnet50.json --gpu 0    ... and how this GPU computes it fastest
    """

    symbol: Annotated[Path | None, "FILE"] = None
    """A Symbol JSON file, as symbol.save() writes it."""
    model: str | None = None
    """A network of MXNet's Gluon model zoo, such as resnet50_v1."""
    batch_size: int = 256
    """Images in a batch."""
    image_size: int = 224
    """Pixels, height and width."""
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Type of the tensors."""
    inference: bool = False
    """Show the graph of inference, with BatchNorm folded into the convolutions."""
    int8: bool = False
    """Show the graph of inference in INT8, with all scales 1 instead of calibrated ones."""
    step: bool = False
    """Show the graph of a training step, forward and backward in one: with --gpu as that GPU runs it; otherwise as an
    H100 would by its saved times, with rival kernels, or with the fewest operators if no times are saved."""
    output: Annotated[Path | None, "FOLDER"] = None
    """Write before.svg, a drawing after each pass, after.svg and after.json into this folder; default: no files."""
    gpu: int | None = None
    """Build the training step on this GPU, and list the kernels that it takes where there are several candidates, with
    all times; default: no GPU."""

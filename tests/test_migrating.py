"""docs/migrating.md: its program runs with MXNet, and its commands go on from what that has left."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from train_fixtures import light_run, run_train, undrawn  # noqa: F401  # fixtures

from common.mxnet_compat import mx
from pipelines.__main__ import main as pipelines

PAGE = (Path(__file__).resolve().parents[1] / "docs/migrating.md").read_text()
EXAMPLE = PAGE.partition("## What does an example look like?")[2]


def test_the_example(
    run_train: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,  # noqa: F811
    rng: np.random.Generator,
) -> None:
    monkeypatch.chdir(tmp_path)
    for label in range(3):
        folder = tmp_path / "images" / f"class{label}"
        folder.mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 120, (70, 80, 3), np.uint8)
            pixels[..., label] += 120
            Image.fromarray(pixels).save(folder / f"{number}.jpg")
    Image.fromarray(pixels).save("photo.jpg")
    assert pipelines(["make-records", "images", "data", "--val-split", "0.25"]) == 0
    (program,) = re.findall(r"(?:^(?:    .*)?\n)*?(^    import mxnet as mx\n(?:(?:    .*)?\n)+)", EXAMPLE, re.MULTILINE)
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, capture_output=True)
    commands = re.findall(r"^ +python -m train (.*)$", EXAMPLE, re.MULTILINE)
    assert len(commands) == 8
    top1 = []
    for command in commands:
        arguments = shlex.split(command)
        if arguments[0] not in ("export", "predict", "embed"):
            arguments += ["--device", "cpu", "--num-threads", "1", "--batch-size", "7"]
        code, out, err = run_train(*arguments)
        assert code == 0, f"{command}\n{out}\n{err}"
        top1 += re.findall(r"top-1 ([\d.]+)%", out) if arguments[0] == "validate" else []
    assert float(top1[0]) > 60  # three tints are told apart after four epochs
    symbol, params, aux = mx.model.load_checkpoint("new", 0)
    assert set(symbol.list_arguments()) - {"data", "softmax_label"} == set(params) and len(aux) == 6

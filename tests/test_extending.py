"""docs/extending.md: its examples, inserted into a copy of the code as the page says, work as the page says; its
plug-ins work with the code as it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/extending.md"
# `file`, new:  |  `file`, above `a line that begins so`:  |  `file`, below `...`:
PLACE = re.compile(r"^`([^`]+)`, (?:new|(above|below) `([^`]+)`):$")


class Piece(NamedTuple):
    """A piece of code of the page, and its place."""

    file: str
    side: str | None  # None: the whole file
    anchor: str
    code: str


def pieces(page: str) -> Iterator[tuple[str, Piece]]:
    """All pieces of the page, with their headings."""
    heading, lines = "", page.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        if found := PLACE.match(line):
            code = []
            for below in lines[number + 1 :]:
                if below and not below.startswith("    "):
                    break
                code.append(below)
            text = textwrap.dedent("\n".join(code)).strip("\n")
            yield heading, Piece(found[1], found[2], found[3], text)


def insert(text: str, piece: Piece) -> str:
    """Insert a piece into a file, with the indentation of the line above or below which it goes."""
    lines = text.splitlines()
    at = [number for number, line in enumerate(lines) if piece.anchor in line]
    assert len(at) == 1, f"{piece.file} has {len(at)} lines with {piece.anchor!r}, which a reader would search for"
    depth = len(lines[at[0]]) - len(lines[at[0]].lstrip())
    code = textwrap.indent(piece.code, depth * " ").splitlines()
    if not depth and "\n" in piece.code:
        code = [*code, ""] if piece.side == "above" else ["", *code]
    lines[at[0] + (piece.side == "below") : at[0] + (piece.side == "below")] = code
    return "\n".join(lines) + "\n"


FUSED_OPERATOR = """
import numpy as np
from common.mxnet_compat import mx
from graph_passes import Graph, Ref, pipeline
from graph_passes.choice import fewest
from graph_passes.executors.cuda.kernels import LAUNCHES
from graph_passes.executors.reference import backward, forward, run

def norm(x, name):
    x = mx.sym.Convolution(x, num_filter=8, kernel=(1, 1), no_bias=True, layout="NHWC", name=name)
    return mx.sym.BatchNorm(x, axis=3, fix_gamma=False, name=name + "_bn")

x = mx.sym.Variable("data")
x = mx.sym.elemwise_add(mx.sym.elemwise_add(norm(x, "a"), norm(x, "b")), norm(x, "c"))
x = mx.sym.FullyConnected(mx.sym.Flatten(norm(x, "d")), num_hidden=5, name="fc")
graph = Graph.from_json(mx.sym.SoftmaxOutput(x, normalization="batch", name="softmax").tojson())
shapes = {"data": (4, 3, 2, 3), "softmax_label": (4,)}
step = pipeline.training_step(graph, shapes, "bfloat16", fewest)
assert step.operators()["AddAdd"] == 1 and "AddAdd" in LAUNCHES
rng, sizes = np.random.default_rng(0), graph.infer_shapes(shapes)
values = {name: np.abs(rng.standard_normal(sizes[Ref(name)])) for name in graph.variables}
values["softmax_label"] = np.arange(4.0)
got = run(step, values)
wanted = backward(graph, forward(graph, {Ref(name): value for name, value in values.items()}, training=True))
for name in ("a_weight", "c_weight", "fc_weight"):
    np.testing.assert_allclose(got[name + "_grad"], wanted[Ref(name)], rtol=1e-5, atol=1e-9)
"""
MODEL = """
import train.models
network = train.models.create("resnet50c", 7)
assert "stem_conv3" in network.graph.nodes and "stage2_block1_shortcut_pool" not in network.graph.nodes
params, _ = network.initial_values(seed=0)
assert train.models.num_classes("resnet50c", params) == 7
(names,) = train.models.published("resnet50c")
assert names.name("stem_bn3_gamma") == "bn1.weight"
assert names.name("stage2_block1_shortcut_conv_weight") == "layer2.0.downsample.0.weight"
"""
OPTIMIZER = """
import numpy as np
from common.mxnet_compat import mx
from graph_passes import optimizers
from train import TrainError
from train.command_line import read
from train.config import Config, configure
from train.presets import load_preset
values = read(Config, ["--optimizer", "qhm", "--nu", "0.5", "--momentum", "0.75"], command="train")
configured = configure(values, load_preset("cpu_sample"))
rule = optimizers.create(configured.optimizer, vars(configured))
assert rule.kernel_constants == (0.75, 0.25, 0.5, 0.5)
for convert in (np.array, mx.nd.array):
    weight, gradient = convert(np.full(8, 2.0, np.float32)), convert(np.full(8, 3.0, np.float32))
    optimizer = optimizers.ArrayOptimizer(rule, {"w": weight}, {"w": gradient}, {"w"})
    optimizer.step(0.1, scale=2.0)  # g = 6, m = 1.5
    wanted = 2.0 - 0.1 * (0.5 * 6.0 + 0.5 * 1.5 + rule.weight_decay * 2.0)
    got = weight if convert is np.array else weight.asnumpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
try:
    configure({"nu": 0.25}, load_preset("cpu_sample"))
except TrainError as error:
    assert str(error).startswith("--nu is for --optimizer qhm"), error
else:
    raise AssertionError("--nu is not refused with other optimizers")
"""
DATA_FORMAT = """
import numpy as np
from pipelines import DataError, LoaderConfig, open_loader
images = np.random.default_rng(0).integers(0, 256, (6, 40, 48, 3), np.uint8)
np.savez("train.npz", images=images, labels=np.arange(6) % 3)
with open_loader(LoaderConfig(data=".", split="train", batch_size=3, image_size=32, num_threads=1)) as loader:
    assert loader.class_names == ["0", "1", "2"] and loader.num_images == 6
    labels = np.concatenate([batch.label.asnumpy() for batch in loader])
assert sorted(labels) == [0, 0, 1, 1, 2, 2]
np.savez("train.npz", pixels=images)
try:
    open_loader(LoaderConfig(data=".", split="train", batch_size=3, image_size=32))
except DataError as error:
    assert "is no .npz file with images and labels" in str(error)
else:
    raise AssertionError("a file without images is not refused")
"""
AUGMENTATION = """
import numpy as np
from pipelines import ImageTransform, LoaderConfig, open_loader
from pipelines.graph import GraphConfig
from PIL import Image
from train.command_line import read
from train.config import Config, configure
from train.presets import load_preset
for split, name in (("train", "a"), ("train", "b"), ("val", "a"), ("val", "b")):
    __import__("os").makedirs(f"{split}/{name}")
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:16] = 255  # the sky
    for number in range(8):
        Image.fromarray(pixels).save(f"{split}/{name}/{number}.png")
values = read(Config, ["--upside-down", "--random-area", "1", "1", "--random-ratio", "1", "1"], command="train")
transform = configure(values, load_preset("cpu_sample")).transform
def above(split, transform):
    settings = LoaderConfig(data=".", split=split, batch_size=16, image_size=32, num_threads=1, transform=transform)
    with open_loader(settings) as loader:
        (batch,) = loader
    return batch.data.asnumpy()[:, :8].mean(axis=(1, 2, 3)) > 0
assert above("train", ImageTransform(random_area=(1, 1))).all()
assert 0 < above("train", transform).sum() < 16
assert above("val", transform).all()
GraphConfig.is_resized_by_kernels = property(lambda graph: graph.training)  # so a GPU's graph ends
assert 0 < above("train", transform).sum() < 16
"""
RUN = """
import json, sys
from pathlib import Path
import numpy as np
from PIL import Image
from train.__main__ import main
rng = np.random.default_rng(0)
for split, name in ((split, name) for split in ("train", "val") for name in "abc"):
    Path(split, name).mkdir(parents=True)
    for number in range(8):
        pixels = rng.integers(0, 256, (40, 48, 3), np.uint8)
        Image.fromarray(pixels).save(f"{split}/{name}/{number}.png")
def run(*options):
    code = main(["--data", ".", "--plugin", sys.argv[1], "--output", "run", "--device", "cpu", "--image-size", "32",
                 "--batch-size", "8", "--no-tensorboard", "--model", "tiny", "--plugin", sys.argv[2],
                 "--warmup-epochs", "0", *options])
    assert code == 0, code
    return [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
"""
MODEL_FROM_OUTSIDE = RUN + """
run("--max-steps", "2")
assert main(["predict", "--checkpoint", "run", "--json", "val/a/0.png"]) == 0
assert main(["validate", "--checkpoint", "run"]) == 0
"""
AUGMENTATION_FROM_OUTSIDE = RUN + """
from common import plugins
from pipelines import ImageTransform, LoaderConfig, open_loader
plugins.load([sys.argv[1]])
def batch(*names, epoch=0):
    crop = {"random_area": (1, 1), "random_ratio": (1, 1), "mirror": False}
    settings = LoaderConfig(data=".", split="train", batch_size=24, image_size=32, num_threads=1,
                            transform=ImageTransform(augment=names, **crop))
    with open_loader(settings) as loader:
        for _ in range(epoch):
            list(loader)
        return next(iter(loader)).data.asnumpy()
plain, tilted, again = batch(), batch("tilt"), batch("tilt", epoch=1)
assert plain.shape == tilted.shape
assert (tilted[:, 0, 0] != plain[:, 0, 0]).any(axis=1).mean() > 0.9  # corners are filled
assert np.abs(tilted[:, 16, 16] - plain[:, 16, 16]).mean() < np.abs(tilted[:, 0, 0] - plain[:, 0, 0]).mean()
assert (tilted == batch("tilt")).all() and (tilted != again).any()
run("--augment", "tilt", "--max-steps", "1")
"""
METRIC = RUN + """
(epoch,) = [line for line in run("--epochs", "1") if line["event"] == "epoch"]
# the probabilities of an untrained network are nearly equal: (1 - 1/3)^2 + 2 (1/3)^2 = 2/3
assert 0.6 < epoch["plugin_metrics"]["brier"] < 0.75, epoch
"""
LOSS = RUN + """
from common.mxnet_compat import mx
from train import losses
from train.build import with_loss
from train.checkpoint import load
run("--loss", "focal", "--epochs", "2", "--learning-rate", "0.5", "--label-smoothing", "0")
(epoch,) = [line for line in run("--resume", "run", "--epochs", "3")[-20:] if line.get("epoch") == 3 and
            line["event"] == "epoch"]
# an untrained network has nearly equal probabilities: (1 - 1/3)^2 * ln 3 = 0.488
assert 0.3 < epoch["val_loss"] < 0.6, epoch
assert load(Path("run/checkpoints/best.npz")).config.loss == "focal"
"""
CALLBACK = RUN + """
lines = run("--epochs", "5", "--learning-rate", "1e-9", "--validate-every", "0")
log = Path("run/watch.txt").read_text().splitlines()
assert [line.partition(":")[0] for line in log] == ["epoch 1", "epoch 2", "saved step-00000006.npz", "end"], log
assert log[-1] == "end: callback", log
assert "two epochs, and hardly better than chance" in [line for line in lines if line["event"] == "stop"][-1]["reason"]
"""
CHECKS = {
    "A model from outside": MODEL_FROM_OUTSIDE,
    "An augmentation from outside": AUGMENTATION_FROM_OUTSIDE,
    "A loss": LOSS,
    "A metric": METRIC,
    "A callback": CALLBACK,
    "A fused operator": FUSED_OPERATOR,
    "A model": MODEL,
    "An optimizer": OPTIMIZER,
    "An augmentation": AUGMENTATION,
    "A data format": DATA_FORMAT,
}
PLUGINS = ("A model from outside", "An augmentation from outside", "A loss", "A metric", "A callback")
NUM_FILES = {**dict.fromkeys(PLUGINS, 1), "A fused operator": 2, "A model": 2, "An optimizer": 3, "An augmentation": 2,
             "A data format": 2}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages with all pieces in it, and beside it the folder `outside` with the plug-ins."""
    root = tmp_path_factory.mktemp("extended")
    for package in ("common", "graph_passes", "gpu_report", "pipelines", "train"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    for heading, piece in pieces(PAGE.read_text()):
        path = root / piece.file
        if heading in PLUGINS:
            (outside := root / "outside").mkdir(exist_ok=True)
            path = outside / piece.file
        assert path.exists() == (piece.side is not None), f"{piece.file}: should be new, or should be there"
        path.write_text(insert(path.read_text(), piece) if piece.side else f"{piece.code}\n")
    return root


@pytest.mark.long
@pytest.mark.parametrize("heading", CHECKS)
def test_walk(heading: str, extended: Path, tmp_path: Path) -> None:
    files = {piece.file for under, piece in pieces(PAGE.read_text()) if under == heading}
    assert len(files) == NUM_FILES[heading], files
    environment = {**os.environ, "PYTHONPATH": str(extended), "RESNET_CACHE": str(tmp_path / "cache")}
    arguments: list[str] = []
    if heading in PLUGINS:  # with the code as it is
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "light"), str(ROOT)])
        (file,) = files
        arguments = [str(extended / "outside" / name) for name in (file, "tiny.py")]
    done = subprocess.run([sys.executable, "-c", CHECKS[heading], *arguments], cwd=tmp_path, env=environment, text=True,
                          stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr


def test_kernels_compile(extended: Path) -> None:
    from graph_passes.executors.cuda import kernel_library

    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    sources = extended / "graph_passes/executors/cuda/kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_library, "SOURCES", sources)
        for source, kernel in (("add_add.cu", "add_add<half>"), ("optimizer.cu", "update<half, Qhm>")):
            try:
                cubin, _ = kernel_library.compile_kernel(source, kernel, "sm_90a")
            except (ImportError, RuntimeError, OSError) as error:
                if "nvrtc" in str(error).lower() and "COMPILATION" not in str(error):
                    pytest.skip(f"NVRTC is not installed: {error}")
                raise
            assert cubin[:4] == b"\x7fELF"


def test_page_passes_lint(extended: Path) -> None:
    """The pieces follow the style of the code around them."""
    shutil.copy(ROOT / "pyproject.toml", extended)
    files = sorted({f"outside/{piece.file}" if heading in PLUGINS else piece.file
                    for heading, piece in pieces(PAGE.read_text()) if piece.file.endswith(".py")})
    done = subprocess.run([sys.executable, "-m", "ruff", "check", *files], cwd=extended, text=True,
                          stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stdout

"""Export of a trained network: ONNX, PyTorch's state_dict, or MXNet's own Symbol JSON and .params.

    python -m train export --checkpoint runs/my-run --onnx resnet50.onnx
    python -m train export --checkpoint runs/my-run --torchvision resnet50.safetensors
    python -m train export --symbol resnet50.json                 # a network without weights, for graph_passes show
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common import files
from common.command_line import option_name
from common.mxnet_compat import mx
from graph_passes import Graph, Ref, onnx_writer, passes
from train import models, weights
from train.build import build_executor, with_loss
from train.checkpoint import Checkpoint
from train.commands.options import ExportOptions
from train.devices import Placement
from train.errors import TrainError
from train.weights import onnx_file, publish, record

# Largest difference allowed between the probabilities of ONNX Runtime and of our executor. Both compute in fp32, in
# another order; 1e-4 is far above what that makes (about 1e-6) and far below what a wrong weight makes.
TOLERANCE = 1e-4

CPU = Placement("mxnet", "cpu(0)", "")

Arrays = dict[str, np.ndarray]


def main(values: Mapping[str, Any]) -> None:
    """Export, by the options given. Raises UserError."""
    options = ExportOptions(**values)
    trained_kinds = [name for name in ("onnx", "torchvision", "params") if getattr(options, name)]
    if not (options.symbol or trained_kinds):
        raise TrainError("nothing to export: give --onnx FILE, --torchvision FILE, --symbol FILE or --params FILE")
    if trained_kinds and not options.checkpoint:
        raise TrainError(f"--{trained_kinds[0]} needs trained weights: give --checkpoint with a run folder, a "
                         "checkpoint or a file of weights")
    for name in ("model", "num_classes"):
        if options.checkpoint and name in values:
            raise TrainError(f"{option_name(name)} {values[name]} is for --symbol without a checkpoint, and "
                             f"{options.checkpoint} has its own: leave it out")
    record_file = Path(options.torchvision).with_suffix(".json") if options.torchvision else None
    if record_file and options.symbol and record_file == Path(options.symbol):
        raise TrainError(f"--symbol {options.symbol} has the name of the file that --torchvision {options.torchvision} "
                         "writes beside it: give another one")
    trained = weights.load(options.checkpoint) if options.checkpoint else None
    if options.onnx:
        assert trained
        model, difference = export_onnx(trained)
        files.write(Path(options.onnx), model)
        size = trained.config.inference_image_size
        print(
            f"{options.onnx}: {trained.network}, input data float32 (N, 3, {size}, {size}), output probabilities; "
            f"largest difference between ONNX Runtime and this program: {difference:.1e}"
        )
    if options.torchvision:
        assert trained
        export_torchvision(trained, Path(options.torchvision))
    graph, params = network(trained, options)
    if options.symbol:
        files.write(Path(options.symbol), graph.to_json().encode())
        print(f"{options.symbol}: {len(graph)} nodes, {options.layout}")
    if options.params:
        files.write(Path(options.params), mxnet_params(params))
        print(f"{options.params}: {len(params)} arrays, {options.layout}")


def export_torchvision(trained: Checkpoint, file: Path) -> None:
    """Write a state_dict for torchvision or timm, and beside it the record of the images. Raises UserError."""
    tensors = publish.state_dict(trained)
    content = publish.content(tensors, file)
    about = file.with_suffix(".json")
    files.write(about, record.to_json(trained.config, trained.classes))
    files.write(file, content)
    print(f"{file}: {trained.network}, {len(tensors)} tensors, as torchvision or timm names them; {about}: how images "
          "are prepared, and the classes")


def network(trained: Checkpoint | None, options: ExportOptions) -> tuple[Graph, Arrays]:
    """The network of a checkpoint, or one without weights, in the layout asked for.

    Returns the graph and its arrays under MXNet's names in parameter files, `arg:<name>` and `aux:<name>`.
    """
    if trained:
        graph = models.create(trained.config.model, trained.num_classes).graph
        graph = passes.stock_loss(with_loss(trained.config, graph))
    elif options.num_classes < 1:
        raise TrainError(f"--num-classes {options.num_classes} must be at least 1")
    else:
        graph = models.create(options.model, options.num_classes).graph
    params, aux = (trained.params, trained.aux) if trained else ({}, {})
    if options.layout == "NCHW":
        graph = channels_first(graph)
        params = in_layout(graph, params)
    return graph, {f"arg:{name}": array for name, array in params.items()} | {
        f"aux:{name}": array for name, array in aux.items()
    }


def channels_first(graph: Graph) -> Graph:
    """The graph in NCHW throughout, its input `data` too: (N, C, H, W) instead of (N, H, W, C)."""
    graph = passes.layout(graph, "NCHW")
    transposed = {
        Ref(node.name): node.inputs[0] for node in graph if node.op == "transpose" and node.inputs[0] == Ref("data")
    }
    nodes = [node.replace(inputs=tuple(transposed.get(ref, ref) for ref in node.inputs)) for node in graph]
    return Graph(nodes, graph.outputs, graph.attrs)


def in_layout(graph: Graph, params: Mapping[str, np.ndarray]) -> Arrays:
    """Canonical parameters (convolution weights OHWI) in the layout of the graph's convolutions."""
    layouts = passes.weight_layouts(graph)
    return {
        name: np.ascontiguousarray(array.transpose(0, 3, 1, 2)) if layouts.get(name) == "OIHW" else array
        for name, array in params.items()
    }


def mxnet_params(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The content of an MXNet parameter file."""
    with tempfile.TemporaryDirectory() as folder:  # MXNet writes only to files that it opens itself
        path = Path(folder) / "network.params"
        mx.nd.save(str(path), {name: mx.nd.array(array, dtype="float32") for name, array in arrays.items()})
        return path.read_bytes()


def export_onnx(trained: Checkpoint) -> tuple[bytes, float]:
    """An ONNX file of a trained network, checked.

    Returns:
        The file's content, and the largest absolute difference between the probabilities that ONNX Runtime computes
        from it and those of our executor.

    Raises:
        TrainError: onnx or onnxruntime is not installed, or the two disagree by more than TOLERANCE.
    """
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise TrainError(f"--onnx needs {error.name}: run make setup, or pip install onnx onnxruntime") from None

    graph = with_loss(trained.config, models.create(trained.config.model, trained.num_classes).graph)
    size = trained.config.inference_image_size
    folded = channels_first(passes.fold_bn(graph))
    params = passes.fold_bn_params(graph, trained.params, trained.aux)
    arrays = {**in_layout(folded, params), **trained.aux}  # statistics: of BatchNorms that no convolution is before
    model = onnx_writer.to_onnx(folded, arrays, (3, size, size))
    model.producer_name = onnx_file.PRODUCER
    preparation = {
        "class_names": json.dumps(trained.class_names),
        "color_order": "RGB",
        "input_layout": "NCHW",
        "resize_shorter": str(max(size, round(size / trained.config.val_crop_fraction))),
        "center_crop": str(size),
        "interpolation": trained.config.interpolation,  # antialiased, as Pillow does it
        "rounding": "half up",  # of the longer side, whose scale stays that of the shorter; and of the crop's offset
        "mean": json.dumps(trained.config.mean),  # of pixels from 0 to 255: data = (pixel - mean) / std
        "std": json.dumps(trained.config.std),
        "network": trained.network,
        **onnx_file.metadata(trained),
    }
    onnx.helper.set_model_props(model, preparation)
    content = model.SerializeToString()

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    difference = 0.0
    for batch_size in (1, 3):
        images_nhwc = rng.standard_normal((batch_size, size, size, 3), dtype=np.float32)
        config = replace(trained.config, batch_size=batch_size)
        executor = build_executor(config, trained.num_classes, size, CPU, trained)
        ours = executor.forward(mx.nd.array(images_nhwc)).asnumpy()
        (theirs,) = session.run(None, {"data": np.ascontiguousarray(images_nhwc.transpose(0, 3, 1, 2))})
        difference = max(difference, float(np.abs(ours - theirs).max()))
    if not difference <= TOLERANCE:  # NaN is a disagreement too
        raise TrainError(
            f"ONNX Runtime's probabilities differ from this program's by {difference:.1e}, more than {TOLERANCE:.0e}: "
            "no file was written; please report this"
        )
    return content, difference


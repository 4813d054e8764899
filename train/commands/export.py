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
from common.phases import ONNX, phase
from graph_passes import Graph, calibration, onnx_writer, passes, pipeline
from graph_passes.executors import reference
from graph_passes.operators.quantised import dequantised, quantised
from graph_passes.passes import quantise
from train import models, weights
from train.build import build_executor, with_loss
from train.checkpoint import Checkpoint
from train.devices import Placement
from train.errors import TrainError
from train.features import Features, features_graph
from train.options.commands import ExportOptions
from train.weights import int8_file, onnx_file, publish, record
from train.weights.int8_file import Int8Network

# Tolerance between the probabilities of ONNX Runtime and of our executor. Both compute in fp32, but add in different
# orders. 1e-4 is far above the effect of the order (about 1e-6) and far below the effect of a wrong weight.
TOLERANCE = 1e-4

# Tolerance, in levels, between an integer of ONNX Runtime and our float result for one layer, computed from the
# integers that ONNX Runtime has at the layer's input. Rounding causes up to half a level. The order of sums added 6e-6
# in narrow networks, and would add about 0.005 in the largest sums of ResNets (4,608 products whose magnitudes add up
# to 1,000 levels: sqrt(4608) * 2^-24 * 1000). Whole networks are not compared: one integer near a rounding boundary may
# change later integers by any amount.
INT8_TOLERANCE = 0.5 + 0.1

PROBABILITIES, FEATURES = "probabilities", "features"  # names of outputs

CPU = Placement("mxnet", "cpu(0)", "")

Arrays = dict[str, np.ndarray]


def main(values: Mapping[str, Any]) -> None:
    """Export the network. Raises UserError."""
    options = ExportOptions(**values)
    trained_kinds = [name for name in ("onnx", "torchvision", "params") if getattr(options, name)]
    if not (options.symbol or trained_kinds):
        raise TrainError("nothing to export: give --onnx FILE, --torchvision FILE, --symbol FILE or --params FILE")
    if trained_kinds and not options.checkpoint:
        raise TrainError(f"--{trained_kinds[0]} needs trained weights: give --checkpoint with a run folder, a "
                         "checkpoint or a file of weights")
    for name in ("model", "num_classes"):
        if options.checkpoint and name in values:
            raise TrainError(f"{option_name(name)} {values[name]} is for --symbol without a checkpoint, but "
                             f"{options.checkpoint} has its own: leave it out")
    record_file = Path(options.torchvision).with_suffix(".json") if options.torchvision else None
    if options.int8 != "none" and not options.onnx:
        raise TrainError(f"--int8 {options.int8} is for --onnx, which is not given: add --onnx FILE, or leave out "
                         "--int8")
    if options.features and (not options.onnx or options.int8 != "none"):
        raise TrainError("--features works only with --onnx FILE and without --int8: add --onnx FILE and leave out "
                         "--int8, or leave out --features")
    writers = {record_file.resolve(): "torchvision"} if record_file else {}
    for name in ("torchvision", "onnx", "symbol", "params"):
        if (file := getattr(options, name)) and (other := writers.setdefault(Path(file).resolve(), name)) != name:
            raise TrainError(f"{option_name(name)} {file} is also a file that {option_name(other)} "
                             f"{getattr(options, other)} writes: give another one")
    for name in ("onnx", "torchvision", "symbol", "params"):
        if not (file := getattr(options, name)):
            continue
        if not options.overwrite and Path(file).is_file():
            raise TrainError(f"{option_name(name)} {file} exists already: give --overwrite to replace it, or another "
                             "name")
        files.check_place(Path(file), f"give another {option_name(name)}")
    trained = weights.load(options.checkpoint) if options.checkpoint else None
    if options.onnx:
        assert trained
        int8 = int8_file.load(options.checkpoint, trained) if options.int8 != "none" else None
        of_onnx = int8.prepared(trained) if int8 else trained
        model, difference = (export_features(of_onnx) if options.features else
                             export_onnx(of_onnx, int8, unsigned=options.int8 == "onnxruntime"))
        files.write(Path(options.onnx), model)
        size = of_onnx.config.inference_image_size
        print(
            f"{options.onnx}: {trained.network}{' in INT8' if int8 else ''}, "
            f"input data float32 (N, 3, {size}, {size}), output {FEATURES if options.features else PROBABILITIES}; "
            f"largest difference between ONNX Runtime and this program: {difference:.1e}"
            + ", given the same integers before" * bool(int8)
        )
    if options.torchvision:
        assert trained
        export_torchvision(trained, Path(options.torchvision), options.overwrite)
    graph, params = network(trained, options)
    if options.symbol:
        files.write(Path(options.symbol), graph.to_json().encode())
        print(f"{options.symbol}: {len(graph)} nodes, {options.layout}")
    if options.params:
        files.write(Path(options.params), mxnet_params(params))
        print(f"{options.params}: {len(params)} arrays, {options.layout}")


def export_torchvision(trained: Checkpoint, file: Path, overwrite: bool) -> None:
    """Write a state_dict for torchvision or timm, and beside it a file that records how images are prepared.
    `overwrite`: an existing record may be replaced. Raises UserError.
    """
    tensors = publish.state_dict(trained)
    content, written = publish.content(tensors, file), record.to_json(trained.config, trained.classes)
    about = file.with_suffix(".json")
    if about.exists():
        place = f"{about}, where --torchvision {file} writes how images are prepared,"
        if not record.is_one(about):
            raise TrainError(f"{place} already holds something else: move it, or give another name")
        # the record may belong to another file of the same network
        if not overwrite and about.read_bytes() != written:
            raise TrainError(f"{place} belongs to other weights: give --overwrite to replace it, or another name")
    files.write(about, written)
    files.write(file, content)
    print(f"{file}: {trained.network}, {len(tensors)} tensors, as torchvision or timm names them; {about}: how images "
          "are prepared, and the classes")


def network(trained: Checkpoint | None, options: ExportOptions) -> tuple[Graph, Arrays]:
    """The network of a checkpoint, or one without weights, in the requested layout.

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
    """Convert a graph to NCHW throughout. Its input `data` becomes (N, C, H, W) instead of (N, H, W, C)."""
    return passes.layout(graph, "NCHW", inputs=["data"])


def in_layout(graph: Graph, params: Mapping[str, np.ndarray]) -> Arrays:
    """Canonical parameters (convolution weights OHWI) in the layout of the graph's convolutions."""
    layouts = passes.weight_layouts(graph)
    return {
        name: np.ascontiguousarray(array.transpose(0, 3, 1, 2)) if layouts.get(name) == "OIHW" else array
        for name, array in params.items()
    }


def mxnet_params(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The content of an MXNet parameter file."""
    with tempfile.TemporaryDirectory() as folder:  # MXNet can only write to a file path
        path = Path(folder) / "network.params"
        mx.nd.save(str(path), {name: mx.nd.array(array, dtype="float32") for name, array in arrays.items()})
        return path.read_bytes()


@phase(ONNX)
def export_onnx(trained: Checkpoint, int8: Int8Network | None = None, unsigned: bool = True) -> tuple[bytes, float]:
    """Make and check the ONNX file of a trained network, or of its INT8 version. `unsigned`: see `onnx_writer.Qdq`.

    Returns:
        The file's content, and the largest absolute difference between ONNX Runtime's probabilities and ours.

    Raises: TrainError: onnx or onnxruntime is not installed, or the results differ by more than TOLERANCE or
        INT8_TOLERANCE.
    """
    _check_packages()
    graph = with_loss(trained.config, models.create(trained.config.model, trained.num_classes).graph)
    size = trained.config.inference_image_size
    folded, arrays = _for_onnx(graph, trained)
    qdq = None
    if int8:
        qdq = onnx_writer.Qdq(int8.graph(trained), in_layout(folded, int8.params), int8.scales, unsigned)
    model = onnx_writer.to_onnx(folded, arrays, (3, size, size), qdq)
    content = _described(model, preparation(trained) | {"class_names": json.dumps(trained.class_names)}
                         | onnx_file.metadata(trained))
    settings = _settings()
    session = _session(content, settings)
    rng = np.random.default_rng(0)
    difference, levels = 0.0, 0.0
    for batch_size in (1, 3):
        images_nhwc = rng.standard_normal((batch_size, size, size, 3), dtype=np.float32)
        if int8 and qdq:
            # these values are exactly representable in INT8, so neither network rounds or clips them
            scale = int8.scales["data"]
            images = dequantised(quantised(images_nhwc, scale), scale).transpose(0, 3, 1, 2)
            ours, theirs, level = _by_integers(model, folded, arrays, qdq, images, settings)
            levels = max(levels, level)
        else:
            config = replace(trained.config, batch_size=batch_size)
            executor = build_executor(config, trained.num_classes, size, CPU, trained)
            executor.infer(mx.nd.array(images_nhwc))
            ours = executor.request_probabilities()()
            (theirs,) = session.run(None, {"data": np.ascontiguousarray(images_nhwc.transpose(0, 3, 1, 2))})
        difference = max(difference, float(np.abs(ours - theirs).max()))
    for what, found, tolerance in (("integers", levels, INT8_TOLERANCE), (PROBABILITIES, difference, TOLERANCE)):
        _check_difference(what, found, tolerance)
    return content, difference


@phase(ONNX)
def export_features(trained: Checkpoint) -> tuple[bytes, float]:
    """Make and check the ONNX file of a trained network without its classifier. Return value and exceptions are those
    of `export_onnx`, but the difference is relative to the largest feature.
    """
    _check_packages()
    size = trained.config.inference_image_size
    folded, arrays = _for_onnx(features_graph(models.create(trained.config.model, trained.num_classes)), trained)
    content = _described(onnx_writer.to_onnx(folded, arrays, (3, size, size), output_name=FEATURES),
                         preparation(trained))
    images_nhwc = np.random.default_rng(0).standard_normal((3, size, size, 3), dtype=np.float32)
    ours = Features(trained, replace(trained.config, batch_size=len(images_nhwc)), CPU)
    ours.infer(mx.nd.array(images_nhwc))
    wanted = ours.request()()
    (found,) = _session(content, _settings()).run(
        None, {"data": np.ascontiguousarray(images_nhwc.transpose(0, 3, 1, 2))})
    # avoids a division by 0 if all features are 0
    largest = max(float(np.abs(wanted).max()), float(np.finfo(np.float32).tiny))
    difference = float(np.abs(wanted - found).max()) / largest
    _check_difference(FEATURES, difference, TOLERANCE)
    return content, difference


def preparation(trained: Checkpoint) -> dict[str, str]:
    """The metadata that say how an image becomes the input `data`."""
    config = trained.config
    size = config.inference_image_size
    return {
        "color_order": "RGB",
        "input_layout": "NCHW",
        "resize_shorter": str(max(size, round(size / config.val_crop_fraction))),
        "center_crop": str(size),
        "interpolation": config.interpolation,  # antialiased, as in Pillow
        "rounding": "half up",  # of the longer side (scaled by the shorter side's factor) and of the crop's offset
        "mean": json.dumps(config.mean),  # of pixels from 0 to 255: data = (pixel - mean) / std
        "std": json.dumps(config.std),
        "network": trained.network,
    }


def _check_packages() -> None:
    """Raise TrainError if onnx or onnxruntime is not installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise TrainError(f"--onnx needs {error.name}: run make setup, or pip install onnx onnxruntime") from None


def _for_onnx(graph: Graph, trained: Checkpoint) -> tuple[Graph, Arrays]:
    """The graph in NCHW with folded BatchNorms, and the arrays that the graph may read."""
    folded = channels_first(passes.unfuse(calibration.folded(graph)))
    params = passes.fold_bn_params(pipeline.run(pipeline.FUSED, graph), trained.params, trained.aux)
    # aux holds the statistics of BatchNorms that do not follow a convolution
    return folded, {**in_layout(folded, params), **trained.aux}


def _described(model: Any, metadata: Mapping[str, str]) -> bytes:
    """The content of the file of an onnx.ModelProto with these metadata."""
    import onnx

    model.producer_name = onnx_file.PRODUCER
    onnx.helper.set_model_props(model, dict(metadata))
    return model.SerializeToString()


def _settings() -> Any:
    """The onnxruntime.SessionOptions for the check."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    # Without this setting, a CPU without VNNI adds pairs of INT8 products in 16 bits, which saturates.
    settings.add_session_config_entry("session.x64quantprecision", "1")
    return settings


def _session(content: bytes, settings: Any) -> Any:
    """An onnxruntime.InferenceSession of a file's content."""
    import onnxruntime

    return onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])


def _check_difference(what: str, found: float, tolerance: float) -> None:
    """Raise TrainError for a difference between ONNX Runtime and this program above the tolerance."""
    if not found <= tolerance:  # NaN counts as a difference, too
        raise TrainError(f"ONNX Runtime's {what} differ from this program's by {found:.1e}, more than {tolerance:.0e}: "
                         "no file was written; please report this")


def _dequantised(qdq: onnx_writer.Qdq) -> Arrays:
    """The fp32 values that the integer weights and biases of a network represent."""
    found = {}
    for layer in quantise.layers(qdq.graph):
        weight = qdq.params[layer.weight]
        scale = qdq.params[layer.multiplier].astype(np.float64) * layer.node["scale"] / layer.data_scale
        found[layer.weight] = (weight * scale.reshape(-1, *(1,) * (weight.ndim - 1))).astype(np.float32)
        if layer.bias:
            found[layer.bias] = (qdq.params[layer.bias] * scale * layer.data_scale).astype(np.float32)
    return found


def _by_integers(model: Any, graph: Graph, arrays: Arrays, qdq: onnx_writer.Qdq, images: np.ndarray,
                 settings: Any) -> tuple[np.ndarray, np.ndarray, float]:
    """Compute each operator in floats. Inputs of the operator that are integers in ONNX Runtime are taken from there.

    Args:
        model: onnx.ModelProto in the QDQ form of the float `graph`, with the names of its nodes.
        arrays: parameters and running statistics in floats, used where `qdq` has no integers.
        images: (N, 3, H, W).
        settings: onnxruntime.SessionOptions.

    Returns: Our probabilities, ONNX Runtime's, and the largest difference, in levels, between ONNX Runtime's integers
        and our results before rounding.
    """
    import onnx
    import onnxruntime

    scales = {**qdq.scales, **{each.name: each["scale"] for each in qdq.graph if each.op == "QuantisedPooling"}}
    constants = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    readers = {node.name: set(node.input) for node in model.graph.node}
    rounding = {node.output[0]: node for node in model.graph.node if node.op_type == "QuantizeLinear"}
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    for name, node in rounding.items():
        kind = onnx.helper.np_dtype_to_tensor_dtype(constants[node.input[2]].dtype)
        watched.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    session = onnxruntime.InferenceSession(watched.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    theirs, *integers = session.run(None, {"data": np.ascontiguousarray(images)})
    found = dict(zip(rounding, integers, strict=True))

    values: Arrays = {**arrays, **_dequantised(qdq), "data": images}
    # the only missing variables are labels
    values |= {name: np.zeros(len(images), np.float32) for name in graph.variables if name not in values}
    levels = 0.0
    for node in graph:
        if not node.is_variable:
            rounded_inputs = [f"{ref.node}_quantized_dequantized" for ref in node.inputs]
            inputs = [values[back if back in readers[node.name] else ref.node]
                      for ref, back in zip(node.inputs, rounded_inputs, strict=True)]
            values[node.name] = reference.evaluate(node, inputs)[0]
        if (rounded := f"{node.name}_quantized") in found:
            scale, zero = np.float32(scales[node.name]), constants[rounding[rounded].input[2]]
            ends = np.iinfo(zero.dtype)
            exact = (values[node.name] / scale).clip(ends.min - float(zero), ends.max - float(zero))
            whole = found[rounded].astype(np.float32) - np.float32(zero)
            levels = max(levels, float(np.abs(whole - exact).max()))
            values[f"{rounded}_dequantized"] = whole * scale
    return values[graph.outputs[0].node], theirs, levels

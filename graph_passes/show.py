"""The command `show`: a network before and after the passes, as tables and pictures."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from common import files
from common.command_line import did_you_mean
from graph_passes import VARIABLE, Graph, GraphError, Node, Ref, passes, pipeline
from graph_passes.choice import Price, fewest, format_choices
from graph_passes.drawing import FUSED, draw_svg
from graph_passes.operators import LOSSES, Shape
from graph_passes.options import ShowOptions
from graph_passes.passes.precision import ITEM_BYTES
from graph_passes.saved_times import SavedPrices

if TYPE_CHECKING:
    from graph_passes.executors.cuda.training_step import TrainingStep

_MOVE_NOTHING = ("Flatten", "FlattenBackward", "Zeros", "GroupMean")
Stages = list[tuple[str, Graph]]  # name of each pass, and the resulting graph


def show(options: ShowOptions) -> None:
    """The command `show`. Raises UserError."""
    if (options.symbol is None) == (options.model is None):
        raise GraphError("give either --symbol FILE or --model NAME" + (", not both" if options.symbol else ""))
    if options.batch_size < 1 or options.image_size < 1:
        raise GraphError(f"batch size {options.batch_size}, image size {options.image_size}: both must be at least 1")
    shown = "--inference" if options.inference else "--int8" if options.int8 else ""
    if shown and (options.gpu is not None or options.step):
        raise GraphError(f"{'--step' if options.step else '--gpu'} shows a training step: leave out {shown}")
    if options.output:
        files.check_place(options.output / "before.svg", "give another --output")
    before = Graph.load(options.symbol) if options.symbol else _zoo_graph(options.model or "")
    name = options.symbol.stem if options.symbol else options.model
    if "data" not in before.arguments:
        raise GraphError(f"the graph has no input 'data': it has {', '.join(before.arguments[:3])} ...")
    console = Console(highlight=False, soft_wrap=True)

    nhwc = passes.layout(before, "NHWC", inputs=["data"])
    channels = 4 if options.step or options.gpu is not None else 3  # training pads images to 4 channels
    shapes = {"data": (options.batch_size, options.image_size, options.image_size, channels)}
    price, choices = _price(nhwc, shapes, options)
    listed: Mapping[str, pipeline.Pass] = pipeline.FUSED
    if options.int8:
        listed = pipeline.quantised_passes(options.dtype, defaultdict(lambda: 1.0))
    elif options.inference:
        listed = pipeline.inference_passes(options.dtype, price)
    elif options.step:
        nhwc = _with_loss(nhwc)
        listed = pipeline.training_passes(shapes, options.dtype, price)
    stages = _run({"layout": lambda graph: nhwc, **listed}, before)
    after = stages[-1][1]
    console.print(_pass_table(f"{name}: passes", before, stages))
    console.print(_count_table(before, after))

    drawn: dict[str, dict[Ref, Shape] | None] = dict.fromkeys(("before", *(stage for stage, _ in stages)))
    try:
        drawn["before"] = before.infer_shapes({"data": _data_shape(before, options.batch_size, options.image_size)})
        drawn |= {stage: graph.infer_shapes(shapes) for stage, graph in stages}
        if options.step:
            plain = passes.gradient(passes.draw_masks(nhwc, options.batch_size), shapes)
            _print_step_bytes(console, passes.precision(plain, options.dtype), after, shapes)
        else:
            _print_bytes(console, before, after, drawn, ITEM_BYTES[options.dtype],
                         options.inference or options.int8)
        setting = f"batch {options.batch_size}, {options.image_size}x{options.image_size} pixels, {options.dtype}"
        console.print(f"({setting}; each operator reads its input tensors and writes its result once)", style="dim")
    except GraphError as error:
        if not str(error).startswith("operator "):
            raise
        console.print(f"Bytes and shapes are left out: {error}")

    if text := choices():
        console.print(text, markup=False)
    if options.output:
        pictures = {options.output / "before.svg": draw_svg(before, f"{name}, before", drawn["before"])}
        for number, (stage, graph) in enumerate(stages, start=1):
            svg = draw_svg(graph, f"{name}, after {stage}", drawn[stage])
            pictures[options.output / f"{number:02}_{stage}.svg"] = svg
        pictures |= {options.output / "after.svg": svg, options.output / "after.json": after.to_json()}
        for path, text in pictures.items():
            files.write(path, text.encode())
        console.print(f"wrote {', '.join(map(str, pictures))}")


def _run(listed: Mapping[str, pipeline.Pass], graph: Graph) -> Stages:
    stages = []
    for name, function in listed.items():
        graph = function(graph)
        stages.append((name, graph))
    return stages


def _pass_table(title: str, before: Graph, stages: Stages) -> Table:
    table = Table("pass", "matched", "operators", title=title, title_justify="left", caption_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, graph in stages:
        table.add_row(name, _matched(name, before, graph),
                      f"{before.operators().total()} -> {graph.operators().total()}")
        before = graph
    return table


def _price(graph: Graph, shapes: Mapping[str, Shape], options: ShowOptions) -> tuple[Price, Callable[[], str]]:
    """The prices for the cover, and the text shown afterwards: times of a GPU, saved times of an equal step, or no
    times.
    """
    if options.gpu is not None:
        step = _built(graph, shapes, options.dtype, options.gpu)
        return step.price, lambda: f"Chosen on GPU {options.gpu}:\n{format_choices(step.choices)}"
    saved = SavedPrices(shapes, options.dtype)
    return (saved, saved.text) if options.step else (fewest, lambda: "")


def _built(graph: Graph, shapes: Mapping[str, Shape], dtype: str, gpu: int) -> TrainingStep:
    from graph_passes.executors.cuda.options import StepOptions
    from graph_passes.executors.cuda.training_step import TrainingStep

    return TrainingStep(_with_loss(graph), {**shapes, "softmax_label": shapes["data"][:1]}, StepOptions(dtype), gpu)


def _with_loss(graph: Graph) -> Graph:
    """The network with a loss added, if it ends in scores as the networks of the zoo do."""
    scores = graph.outputs[0]
    if graph[scores.node].op in LOSSES:
        return graph
    loss = Node("SoftmaxOutput", "softmax", (scores, Ref("softmax_label")), {"normalization": "batch"})
    return Graph([*graph, Node(VARIABLE, "softmax_label"), loss], [Ref(loss.name)], graph.attrs)


def _zoo_graph(name: str) -> Graph:
    from common.mxnet_compat import mx

    vision = mx.gluon.model_zoo.vision
    functions = (n for n in vars(vision) if n[0].islower() and callable(getattr(vision, n)))
    models = sorted(n for n in functions if not n.startswith("get_"))
    if name not in models:
        raise GraphError(f"MXNet's model zoo has no {name!r}{did_you_mean(name, models)} (for a network of this "
                         "program, write FILE with python -m train export --symbol FILE, then give --symbol FILE here)")
    return Graph.from_json(getattr(vision, name)()(mx.sym.var("data")).tojson())


def _data_shape(graph: Graph, batch_size: int, image_size: int) -> Shape:
    """Shape of the input `data`, in the layout in which the graph reads it."""
    layouts = [node["layout"] for node in graph if node.op == "Convolution"]
    size = (image_size, image_size)
    return (batch_size, *size, 3) if layouts and layouts[0] == "NHWC" else (batch_size, 3, *size)


def _matched(name: str, before: Graph, after: Graph) -> str:
    """How often a pass found its pattern."""
    if name == "layout":
        changed = sum(before[n.name]["layout"] != n["layout"] for n in after if n.op == "Convolution")
        return f"{changed} convolutions" if changed else "0 (is NHWC)"
    if name == "fold_bn":
        folded = sum(n.op == "Convolution" and n.name not in before.nodes for n in after)
        return f"{folded} convolutions"
    if name == "precision":
        return "all" if "dtype" in after[after.outputs[0].node].attrs else "0 (is fp32)"
    known = {(node.name, node.op, tuple(node.attrs.items())) for node in before}
    return str(sum((node.name, node.op, tuple(node.attrs.items())) not in known for node in after
                   if not node.is_variable))


def _count_table(before: Graph, after: Graph) -> Table:
    table = Table("operator", "before", "after", title="operators", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    counts = before.operators(), after.operators()
    for op in sorted(set(counts[0]) | set(counts[1]), key=lambda op: (-counts[0][op], op)):
        table.add_row(op, *(str(c[op] or "") for c in counts), style="bold" if op in FUSED else "")
    table.add_section()
    table.add_row("all", *(str(c.total()) for c in counts))
    return table


def forward_bytes(graph: Graph, shapes: dict[Ref, Shape], item_bytes: int) -> int:
    """Bytes of activations that the forward pass reads and writes, if each operator reads its inputs and writes its
    first output once. `item_bytes`: bytes of a float. Parameters do not count, nor does Flatten, which moves
    nothing."""
    dtypes, total = passes.tensor_dtypes(graph), 0
    for node in graph:
        if node.is_variable or node.op in _MOVE_NOTHING:
            continue
        tensors = [ref for ref in node.inputs if not graph[ref.node].is_variable or ref.node == "data"]
        total += sum((1 if dtypes[ref] == "int8" else item_bytes) * math.prod(shapes[ref])
                     for ref in (*tensors, Ref(node.name)))
    return total


def step_bytes(graph: Graph, shapes: dict[Ref, Shape]) -> int:
    """Bytes that a training step reads and writes, if each operator reads its inputs once and writes once those outputs
    that have readers. Parameters count."""
    dtypes, total = passes.tensor_dtypes(graph), 0
    used = {*graph.consumers, *graph.outputs}
    for node in graph:
        if node.is_variable or node.op in _MOVE_NOTHING:
            continue
        tensors = [*node.inputs, *(ref for ref in node.refs() if ref in used)]
        total += sum(ITEM_BYTES[dtypes[ref]] * math.prod(shapes[ref]) for ref in tensors)
    return total


def _print_step_bytes(console: Console, unfused: Graph, step: Graph, shapes: Mapping[str, Shape]) -> None:
    old, new = (step_bytes(graph, graph.infer_shapes(shapes)) for graph in (unfused, step))
    console.print(f"Read and written in a training step: {old / 1e9:.2f} -> {new / 1e9:.2f} GB, "
                  f"[bold]{_saved(old, new)}[/bold]")


def _saved(old: int, new: int) -> str:
    """The bytes that the passes save or cost: if they fuse nothing, a change of layout remains."""
    return f"{abs(old - new) / 1e9:.2f} GB ({abs(1 - new / old):.0%}) {'saved' if new <= old else 'more'}"


def _print_bytes(console: Console, before: Graph, after: Graph, shapes: Mapping[str, dict[Ref, Shape] | None],
                 item_bytes: int, inference: bool) -> None:
    *_, last = shapes
    old, new = (forward_bytes(graph, shapes[stage] or {}, item_bytes)
                for graph, stage in ((before, "before"), (after, last)))
    console.print(f"Activations read and written, forward: {old / 1e9:.2f} -> {new / 1e9:.2f} GB, "
                  f"[bold]{_saved(old, new)}[/bold]")
    if new < old and not inference:
        console.print(f"Backward saves at least as much again, on the gradients of the same tensors: "
                      f"{2 * (old - new) / 1e9:.2f} GB a training step")

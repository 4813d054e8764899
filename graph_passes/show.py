"""The command `show`: a network before and after the passes, as tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from common import files
from common.command_line import did_you_mean
from graph_passes import VARIABLE, Graph, GraphError, Node, Ref, passes
from graph_passes.drawing import FUSED, draw_svg
from graph_passes.operators import Shape
from graph_passes.options import ShowOptions
from graph_passes.passes.precision import ITEM_BYTES

PASSES: dict[str, Callable[[Graph], Graph]] = {
    "layout": lambda graph: passes.layout(graph, "NHWC", inputs=["data"]),
    "add_relu": passes.add_relu,
    "bn_relu": passes.bn_relu,
    "bn_add_relu": passes.bn_add_relu,
}


def show(options: ShowOptions) -> None:
    """The command `show`. Raises UserError."""
    if (options.symbol is None) == (options.model is None):
        raise GraphError("give either --symbol FILE or --model NAME" + (", not both" if options.symbol else ""))
    if options.batch_size < 1 or options.image_size < 1:
        raise GraphError(f"batch size {options.batch_size}, image size {options.image_size}: both must be at least 1")
    if options.inference and options.gpu is not None:
        raise GraphError("--gpu builds a training step: leave out --inference")
    before = Graph.load(options.symbol) if options.symbol else _zoo_graph(options.model or "")
    name = options.symbol.stem if options.symbol else options.model
    if "data" not in before.arguments:
        raise GraphError(f"the graph has no input 'data': it has {', '.join(before.arguments[:3])} ...")
    console = Console(highlight=False, soft_wrap=True)

    table = Table("pass", "matched", "operators", title=f"{name}: passes", title_justify="left", caption_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    graph = before
    chosen = PASSES | ({"fold_bn": passes.fold_bn} if options.inference else {})
    for pass_name, function in chosen.items():
        rewritten = function(graph)
        table.add_row(pass_name, _matched(pass_name, graph, rewritten),
                      f"{graph.operators().total()} -> {rewritten.operators().total()}")
        graph = rewritten
    decisions = "" if options.gpu is None else _decisions(graph, options, options.gpu)
    console.print(table)
    console.print(_count_table(before, graph))

    shapes_before = shapes_after = None
    try:
        shapes_before, shapes_after = (g.infer_shapes({"data": _data_shape(g, options.batch_size, options.image_size)})
                                       for g in (before, graph))
        _print_bytes(console, before, graph, shapes_before, shapes_after, ITEM_BYTES[options.dtype], options.inference)
        setting = f"batch {options.batch_size}, {options.image_size}x{options.image_size} pixels, {options.dtype}"
        console.print(f"({setting}; each operator reads its input tensors and writes its result once)", style="dim")
    except GraphError as error:
        if not str(error).startswith("operator "):
            raise
        console.print(f"Bytes and shapes are left out: {error}")

    if decisions:
        console.print(f"Chosen on GPU {options.gpu}, of the ways that were timed:\n{decisions}", markup=False)
    if options.output:
        pictures = {
            options.output / "before.svg": draw_svg(before, f"{name}, before", shapes_before),
            options.output / "after.svg": draw_svg(graph, f"{name}, after {', '.join(chosen)}", shapes_after),
            options.output / "after.json": graph.to_json(),
        }
        for path, text in pictures.items():
            files.write(path, text.encode())
        console.print(f"wrote {', '.join(map(str, pictures))}")


def _decisions(graph: Graph, options: ShowOptions, gpu: int) -> str:
    from graph_passes.executors.cuda.profile import format_decisions
    from graph_passes.executors.cuda.training_step import TrainingStep

    scores = graph.outputs[0]
    if graph[scores.node].op != "SoftmaxOutput":  # as networks of the zoo end in scores
        loss = Node("SoftmaxOutput", "softmax", (scores, Ref("softmax_label")), {"normalization": "batch"})
        graph = Graph([*graph, Node(VARIABLE, "softmax_label"), loss], [Ref(loss.name)])
    size = options.image_size
    shapes = {"data": (options.batch_size, size, size, 3), "softmax_label": (options.batch_size,)}
    return format_decisions(TrainingStep(graph, shapes, options.dtype, gpu).training.decisions)


def _zoo_graph(name: str) -> Graph:
    from common.mxnet_compat import mx

    vision = mx.gluon.model_zoo.vision
    functions = (n for n in vars(vision) if n[0].islower() and callable(getattr(vision, n)))
    models = sorted(n for n in functions if not n.startswith("get_"))
    if name not in models:
        raise GraphError(f"MXNet's model zoo has no {name!r}{did_you_mean(name, models)} (our own networks: python -m "
                         "train export --symbol FILE, and here --symbol FILE)")
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
    return str(sum(node.op in FUSED and node.name not in before.nodes for node in after))


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
    first output once. Parameters are left out, and Flatten, which moves nothing."""
    total = 0
    for node in graph:
        if node.is_variable or node.op == "Flatten":
            continue
        tensors = [ref for ref in node.inputs if not graph[ref.node].is_variable or ref.node == "data"]
        total += sum(item_bytes * math.prod(shapes[ref]) for ref in (*tensors, Ref(node.name)))
    return total


def _print_bytes(console: Console, before: Graph, after: Graph, shapes_before: dict[Ref, Shape],
                 shapes_after: dict[Ref, Shape], item_bytes: int, inference: bool) -> None:
    old = forward_bytes(before, shapes_before, item_bytes)
    new = forward_bytes(after, shapes_after, item_bytes)
    console.print(f"Activations read and written, forward: {old / 1e9:.2f} -> {new / 1e9:.2f} GB, "
                  f"[bold]{(old - new) / 1e9:.2f} GB ({1 - new / old:.0%}) saved[/bold]")
    if not inference:
        console.print(f"Backward saves at least as much again, on the gradients of the same tensors: "
                      f"{2 * (old - new) / 1e9:.2f} GB a training step")

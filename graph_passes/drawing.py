"""A graph as an SVG picture: operators as boxes in layers from top to bottom, tensors as lines with their shapes.

The longest path through the network runs straight down; branches and shortcuts run in lanes beside this path. A deep
network is cut into strips, which are drawn side by side. Each cut crosses a single tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import OPERATORS, Shape, is_relu, shown_name, window

FUSED = frozenset(name for name, operator in OPERATORS.items() if operator.fused)
_BOX_WIDTH, _BOX_HEIGHT, _ROW, _LANE = 190, 34, 58, 34  # pixels; _ROW is the distance from one layer to the next
_MARGIN, _STRIP_GAP, _TITLE = 24, 60, 64
_COLOURS = {  # operator -> (fill, border)
    "Convolution": ("#dbe9f6", "#4a7fb5"),
    "FullyConnected": ("#dbe9f6", "#4a7fb5"),
    "BatchNorm": ("#e9e4f4", "#8b78b8"),
    "Pooling": ("#e3f1e4", "#5d9a63"),
    "ReLU": ("#fdf1d8", "#c69a3b"),
    "elemwise_add": ("#f6e1e4", "#b9616f"),
    **dict.fromkeys(FUSED, ("#ffd9a8", "#d4690a")),
}
_OTHER = ("#eeeeee", "#888888")
_STYLE = """
  text { font-family: system-ui, 'Helvetica Neue', Arial, sans-serif; fill: #222; }
  .title { font-size: 20px; font-weight: 600; }
  .kind { font-size: 12px; font-weight: 600; text-anchor: middle; }
  .name { font-size: 9px; fill: #666; text-anchor: middle; }
  .shape { font-size: 9px; fill: #667; }
  .legend { font-size: 12px; }
  .edge { fill: none; stroke: #778; stroke-width: 1.3; }
"""


@dataclass
class _Placed:
    """The position of every operator: layer (row) and lane; lane 0 is the main path."""

    rows: dict[str, int] = field(default_factory=dict)
    lanes: dict[str, int] = field(default_factory=dict)
    edge_lanes: dict[tuple[str, str], int] = field(default_factory=dict)  # edge that skips layers -> its lane


def draw_svg(graph: Graph, title: str, shapes: Mapping[Ref, Shape] | None = None, rows_per_strip: int = 44) -> str:
    """The picture as SVG text. `shapes`, from `graph.infer_shapes`, are written along the lines, if given.

    Parameters and labels are left out. Fused operators have colours of their own.
    """
    nodes = {node.name: node for node in graph if not node.is_variable}
    reads = {name: [ref for ref in node.inputs if ref.node in nodes] for name, node in nodes.items()}
    placed = _place(list(nodes), {name: [ref.node for ref in refs] for name, refs in reads.items()}, graph)
    edges = [(ref.node, name) for name, refs in reads.items() for ref in refs]
    strips = _cut(placed, edges, rows_per_strip)
    strip_of = {row: number for number, strip in enumerate(strips) for row in strip}

    widths = [_strip_width(placed, strip) for strip in strips]
    lefts = [_MARGIN + sum(widths[:i]) + i * _STRIP_GAP for i in range(len(strips))]
    top = _TITLE + 40

    def centre(name: str) -> tuple[float, float]:
        strip = strip_of[placed.rows[name]]
        x = lefts[strip] + _BOX_WIDTH / 2 + _lane_offset(placed.lanes[name])
        return x, top + (placed.rows[name] - strips[strip][0]) * _ROW + _BOX_HEIGHT / 2

    legend, legend_width = _legend(graph)
    body = [legend]
    for name, refs in reads.items():
        for ref in refs:
            label = "×".join(map(str, shapes[ref])) if shapes and ref in shapes else ""
            ends = *centre(ref.node), *centre(name)
            strip = strip_of[placed.rows[name]]
            lane = placed.edge_lanes.get((ref.node, name))
            lane_x = None if lane is None else lefts[strip] + _BOX_WIDTH / 2 + _lane_offset(lane)
            if strip_of[placed.rows[ref.node]] == strip:
                body.append(_edge(*ends, lane_x, label))
            else:
                body.append(_cut_edge(*ends, lane_x, top, label))
    body += [_box(node, *centre(name)) for name, node in nodes.items()]

    width = max(lefts[-1] + widths[-1], legend_width) + _MARGIN
    height = top + max(len(strip) for strip in strips) * _ROW + _MARGIN
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}">',
        f"<style>{_STYLE}</style>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 1 L7 4 L0 7 z" fill="#778"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text class="title" x="{_MARGIN}" y="36">{escape(title)}</text>',
        *body,
        "</svg>\n",
    ])


# --- positions ---


def _place(names: list[str], reads: dict[str, list[str]], graph: Graph) -> _Placed:
    placed = _Placed()
    for name in names:  # topological order; a node's layer is its longest distance from an input
        placed.rows[name] = 1 + max((placed.rows[source] for source in reads[name]), default=-1)

    main, name = [], graph.outputs[0].node
    while True:
        main.append(name)
        if not reads[name]:
            break
        name = max(reads[name], key=lambda source: placed.rows[source])
    placed.lanes.update(dict.fromkeys(main, 0))

    readers: dict[str, list[str]] = {name: [] for name in names}
    for name in names:
        for source in reads[name]:
            readers[source].append(name)
    taken: list[list[tuple[int, int]]] = []  # lane - 1 -> intervals of rows in use

    def free_lane(first: int, last: int) -> int:
        for number, intervals in enumerate(taken):
            if all(last < start or first > end for start, end in intervals):
                intervals.append((first, last))
                return number + 1
        taken.append([(first, last)])
        return len(taken)

    for name in names:
        # a branch: the chain of operators from here down to the operator that joins it with another branch
        if name not in placed.lanes:
            chain = [name]
            while len(readers[chain[-1]]) == 1 and readers[chain[-1]][0] not in placed.lanes and (
                placed.rows[readers[chain[-1]][0]] == placed.rows[chain[-1]] + 1
            ):
                chain.append(readers[chain[-1]][0])
            joins = max((placed.rows[reader] for reader in readers[chain[-1]]), default=placed.rows[chain[-1]] + 1)
            lane = free_lane(placed.rows[name], max(joins - 1, placed.rows[chain[-1]]))
            placed.lanes.update(dict.fromkeys(chain, lane))
        for source in reads[name]:
            first, last = placed.rows[source] + 1, placed.rows[name] - 1
            if first <= last and placed.lanes[source] == placed.lanes[name] == 0:
                placed.edge_lanes[source, name] = free_lane(first, last)
            elif first <= last:  # the line runs in the lane of its branch
                placed.edge_lanes[source, name] = placed.lanes[source] or placed.lanes[name]
    return placed


def _cut(placed: _Placed, edges: list[tuple[str, str]], rows_per_strip: int) -> list[range]:
    """Rows of each strip: as even as possible, cut only between rows where a single tensor crosses."""
    last = max(placed.rows.values(), default=0)
    crossing: list[set[str]] = [set() for _ in range(last + 1)]  # crossing[i]: tensors between row i and row i + 1
    for source, name in edges:
        for row in range(placed.rows[source], placed.rows[name]):
            crossing[row].add(source)
    num_strips = -(-(last + 1) // rows_per_strip)
    cuts = [0]
    for i in range(1, num_strips):
        ideal = round(i * (last + 1) / num_strips)
        allowed = [row for row in range(cuts[-1] + 1, last + 1) if len(crossing[row - 1]) <= 1]
        if allowed:
            cuts.append(min(allowed, key=lambda row: abs(row - ideal)))
    cuts.append(last + 1)
    return [range(start, stop) for start, stop in itertools.pairwise(cuts) if stop > start]


def _lane_offset(lane: int) -> float:
    """The x offset of a lane. A lane is as wide as a box plus room for a line that enters the box at its side."""
    return lane * (_BOX_WIDTH + _LANE)


def _strip_width(placed: _Placed, strip: range) -> float:
    boxes = [lane for name, lane in placed.lanes.items() if placed.rows[name] in strip]
    lines = [lane for (_, name), lane in placed.edge_lanes.items() if placed.rows[name] in strip]
    return _BOX_WIDTH + max([_lane_offset(max(boxes)), *(_lane_offset(lane) - _BOX_WIDTH / 2 for lane in lines)])


# --- appearance ---


def _kind(node: Node) -> str:
    return "ReLU" if is_relu(node) else node.op


def _colours(kind: str) -> tuple[str, str]:
    """Fill and border colour of a box. The gradient of an operator has the operator's colours."""
    return _COLOURS.get(kind) or _COLOURS.get(shown_name(kind), _OTHER)


def _describe(node: Node) -> str:
    """The text of a box: the operator and its most important attributes."""
    if node.op in ("Convolution", "Pooling"):
        kind = node.op if node.op == "Convolution" else f"{node['pool_type']} pooling".capitalize()
        if node.op == "Pooling" and node["global_pool"]:
            return f"Global {kind.lower()}"
        kernel, stride, _, _ = window(node)
        step = "" if stride == (1, 1) else f" / {stride[0]}"
        return f"{kind} {kernel[0]}×{kernel[1]}{step}" + (f", {node['num_filter']}" if node.op == "Convolution" else "")
    if node.op == "FullyConnected":
        return f"FullyConnected, {node['num_hidden']}"
    return {"elemwise_add": "Add", "transpose": "Transpose"}.get(node.op, _kind(node))


def _box(node: Node, x: float, y: float) -> str:
    fill, border = _colours(_kind(node))
    thick = 2.4 if node.op in FUSED else 1
    name = node.name if len(node.name) <= 36 else f"{node.name[:17]}…{node.name[-18:]}"
    return (
        f'<g><title>{escape(node.op)} {escape(node.name)}</title>'
        f'<rect x="{x - _BOX_WIDTH / 2:.1f}" y="{y - _BOX_HEIGHT / 2:.1f}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" '
        f'rx="6" fill="{fill}" stroke="{border}" stroke-width="{thick}"/>'
        f'<text class="kind" x="{x:.1f}" y="{y - 2:.1f}">{escape(_describe(node))}</text>'
        f'<text class="name" x="{x:.1f}" y="{y + 11:.1f}">{escape(name)}</text></g>'
    )


def _edge(x0: float, y0: float, x1: float, y1: float, lane_x: float | None, label: str) -> str:
    """A line from a box to a lower box: straight, or out at the side, down a lane, and in at the side."""
    if x0 == x1 and lane_x is None:
        path = f"M{x0:.1f} {y0 + _BOX_HEIGHT / 2:.1f} V{y1 - _BOX_HEIGHT / 2 - 1:.1f}"
        text_x, text_y = x0 + 5, y1 - _BOX_HEIGHT / 2 - 9
    elif x0 < x1:  # into a branch: out at the side, down onto the box
        path = f"M{x0 + _BOX_WIDTH / 2:.1f} {y0:.1f} H{x1 - 8:.1f} q8 0 8 8 V{y1 - _BOX_HEIGHT / 2 - 1:.1f}"
        text_x, text_y = x1 + 5, y1 - _BOX_HEIGHT / 2 - 9
    else:  # a shortcut, or the line at the end of a branch
        x = max(x0, x1) if lane_x is None else lane_x
        start = f"M{x0:.1f} {y0 + _BOX_HEIGHT / 2:.1f}" if x == x0 else (
            f"M{x0 + _BOX_WIDTH / 2:.1f} {y0:.1f} H{x - 8:.1f} q8 0 8 8")
        path = f"{start} V{y1 - 8:.1f} q0 8 -8 8 H{x1 + _BOX_WIDTH / 2 + 1:.1f}"
        text_x, text_y = x + 5, y1 - _BOX_HEIGHT / 2 - 9
    text = f'<text class="shape" x="{text_x:.1f}" y="{text_y:.1f}">{label}</text>' if label else ""
    return f'<path class="edge" d="{path}" marker-end="url(#arrow)"/>{text}'


def _cut_edge(x0: float, y0: float, x1: float, y1: float, lane_x: float | None, top: float, label: str) -> str:
    """A line from the foot of one strip to the head of the next, whose first box begins at `top`."""
    foot, head = y0 + _BOX_HEIGHT / 2, top - 18
    if lane_x is None:
        x, path = x1, f"M{x1:.1f} {head:.1f} V{y1 - _BOX_HEIGHT / 2 - 1:.1f}"
    else:
        x, path = lane_x, f"M{lane_x:.1f} {head:.1f} V{y1 - 8:.1f} q0 8 -8 8 H{x1 + _BOX_WIDTH / 2 + 1:.1f}"
    return (
        f'<path class="edge" d="M{x0:.1f} {foot:.1f} v18" marker-end="url(#arrow)"/>'
        f'<text class="shape" x="{x0 + 5:.1f}" y="{foot + 14:.1f}">{label} (next column)</text>'
        f'<path class="edge" d="{path}" marker-end="url(#arrow)"/>'
        f'<text class="shape" x="{x + 5:.1f}" y="{top - 9:.1f}">{label}</text>'
    )


def _legend(graph: Graph) -> tuple[str, float]:
    """Draw the kinds of operators with their counts, most frequent first. Returns the SVG text, and the x coordinate of
    the legend's right end.
    """
    counts: dict[str, int] = {}
    for node in graph:
        if not node.is_variable:
            counts[_kind(node)] = counts.get(_kind(node), 0) + 1
    parts, x = [], float(_MARGIN)
    for kind, count in sorted(counts.items(), key=lambda item: -item[1]):
        fill, border = _colours(kind)
        thick = 2.4 if kind in FUSED else 1
        text = f"{count} {kind}"
        parts.append(f'<rect x="{x:.0f}" y="52" width="14" height="14" rx="3" fill="{fill}" stroke="{border}" '
                     f'stroke-width="{thick}"/><text class="legend" x="{x + 20:.0f}" y="64">{escape(text)}</text>')
        x += 38 + 7 * len(text)
    return "".join(parts), x

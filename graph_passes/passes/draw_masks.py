"""Dropout in a training step, as operators that read a seed."""

from __future__ import annotations

from graph_passes.errors import GraphError
from graph_passes.graph import VARIABLE, Graph, Node, Ref
from graph_passes.operators.dropout import PER_BATCH, PER_IMAGE, SEED


def draw_masks(graph: Graph, images: int) -> Graph:
    """Write each Dropout as a product with factors drawn from the step's seed.

        before    x -> Dropout(p, axes=(1, 2, 3)) `d`
        after     dropout_seed -> DropoutFactors `dropout_factors` -> factors;  x, factors -> DropoutImages(row) `d`

        before    x -> Dropout(p) `d`
        after     x, dropout_seed -> DropoutElements(p, number) `d`

    One DropoutFactors draws for all Dropouts of whole images, for a batch of `images`. Dropouts are numbered in the
    graph's order, and each number has its own random bits. A Dropout with `p` 0 is removed.

    Raises GraphError for axes other than (1, 2, 3) (whole images), (0, 1, 2, 3) (whole batches) and none.
    """
    nodes: list[Node] = []
    moved: dict[Ref, Ref] = {}
    # axes -> Dropouts with their numbers
    rows: dict[tuple[int, ...], list[tuple[Node, int]]] = {PER_IMAGE: [], PER_BATCH: []}
    dropouts = [node for node in graph if node.op == "Dropout"]
    for number, node in enumerate(dropouts):
        axes = tuple(sorted(node["axes"]))
        if not node["p"]:
            moved[Ref(node.name)] = node.inputs[0]
        elif axes in rows:
            rows[axes].append((node, number))
        elif not axes:
            nodes.append(Node("DropoutElements", node.name, (*node.inputs, Ref(SEED)),
                              {"p": node["p"], "number": number}))
        else:
            raise GraphError(f"Dropout '{node.name}' has axes={node['axes']}: give {PER_IMAGE}, {PER_BATCH} or none")
    for axes, found in rows.items():
        if found:
            numbers = tuple(number for _, number in found)
            name = graph.unused_name("dropout_factors" if axes == PER_IMAGE else "dropout_factors_of_batch")
            nodes.append(Node("DropoutFactors", name, (Ref(SEED),), {
                "rates": tuple(node["p"] for node, _ in found), "numbers": numbers, "images": images,
                "per_batch": axes == PER_BATCH}))
            nodes += [Node("DropoutImages", node.name, (*node.inputs, Ref(name)), {"row": row})
                      for row, (node, _) in enumerate(found)]
    if nodes:
        nodes.append(Node(VARIABLE, SEED, attrs={"dtype": "uint32"}))
    return graph.replace(nodes, moved)

"""An executor's outputs, at sampled places, against float64 applied to its inputs.

`samples` has a rule for each operator of a training step that computes a few elements of an output from the inputs: for
images all channels of some pixels (or some whole images), for sums over the batch every channel. So a full-size step is
checked in minutes of one core, and every channel of every tensor is covered. This module uses one core; nodes are
independent, so callers can check them in parallel.

Bounds are per element. A stored value is rounded once, by at most half the distance of two numbers of its type; sums
and products before that are in fp32. `norm` is the norm of the n terms of a sum.

    the sum           UNIT * (32 + sqrt(n) / 8) * sqrt(n) * norm, where sqrt(n) * norm is at least the sum of the
                      terms' sizes. Partial sums of terms with any sign grow as sqrt(i), so that rounding adds a few
                      UNIT of it. Tensor cores cut off instead, 16 terms at a time, which is biased: sqrt(n) / 24 UNIT,
                      of which three times are allowed. One missing term is 1 / sqrt(n) of the norm.
    its terms         16 roundings of the network's type times the norm, if a kernel sums values that it rounds for the
                      tensor cores, or that are rounded only when written: these errors are independent.
    recomputed ReLU  where fp32 cannot decide the sign, either result is right: such elements are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from graph_passes.executors.cuda.kernels.batch_norm_relu_max_pool import NOBODY, WINDOW
from graph_passes.executors.reference import evaluate
from graph_passes.graph import Node
from graph_passes.operators import OPERATORS, window
from graph_passes.operators.base import with_all_pixels
from graph_passes.operators.batch_norm import ATTRIBUTES, data_gradient, masked, normalised, positive_bits, scaled
from graph_passes.operators.elementwise import relu, relu_backward
from graph_passes.operators.pooling import max_pooling, max_pooling_backward
from graph_passes.operators.softmax import smoothed_targets
from graph_passes.operators.windows import Places

Array = np.ndarray
Named = Mapping[str, Array]  # inputs or outputs by their names in the operator's description

PIXELS = 256  # sampled pixels of a tensor, each with all channels
IMAGES = 4  # sampled images if whole images are needed
THROUGH_NORMS = "NormBackwardReduce", "NormDgrad"  # from one BatchNorm to the sums of the preceding one
FILTERS = 32  # filters of a weight's gradient, and as many of its other elements
CHUNK = 2**18  # elements processed at once if all of a tensor is: 2 MB in float64, which caches hold
WHOLE = 2**27  # elements of the largest tensor that is computed as a whole

UNIT = 2.0**-24  # relative rounding error of fp32
FEW = 16  # roundings of fp32 in an expression, with a margin
# relative rounding error, and the smallest number
STORED = {"float16": (2.0**-11, 2.0**-25), "float32": (2.0**-24, 2.0**-150)}


class Sample(NamedTuple):
    """Elements of one output: as written, as expected, and the allowed difference."""

    output: str
    got: Array
    wanted: Array
    bound: Array

    @property
    def excess(self) -> float:
        """The largest difference in units of its bound: more than 1 is wrong. Infinite for NaN."""
        distance = np.abs(self.got.astype(np.float64) - self.wanted)
        ratio = np.divide(distance, self.bound, out=np.where(distance == 0, 0.0, np.inf), where=self.bound > 0)
        return float(np.nan_to_num(ratio, nan=np.inf, posinf=np.inf).max(initial=0.0))

    @property
    def decided(self) -> float:
        """Share of the elements with a finite bound."""
        return float(np.mean(np.isfinite(self.bound)))


def samples(node: Node, inputs: Sequence[Array], outputs: Sequence[Array | None],
            rng: np.random.Generator) -> list[Sample]:
    """Samples of all written outputs of a node. Arrays are float16 or float32, images NHWC; None: not written."""
    operator = OPERATORS[node.op]
    given = dict(zip(operator.input_names(node), inputs, strict=True))
    written = {name: array for name, array in zip(operator.output_names(node), outputs, strict=True)
               if array is not None}
    if not written:
        return []
    if node.get("grad_stride"):
        given["out_grad_2"] = with_all_pixels(node, given["out_grad_2"], given["data"].shape)
    found = [sample for rule in RULES.get(node.op, (_whole,)) for sample in rule(node, given, written, rng)]
    assert {sample.output for sample in found} == written.keys(), f"{node.op}: an output has no rule"
    return found


# --- bounds ---


def _stored(wanted: Array, dtype: np.dtype) -> Array:
    """Half the distance of two neighbouring numbers of the type."""
    relative, absolute = STORED[dtype.name]
    return relative * np.abs(wanted) + absolute


def _summed(terms: int, norm: Array) -> Array:
    return UNIT * (32 + math.sqrt(terms) / 8) * math.sqrt(terms) * norm


def _rounded_terms(norm: Array, dtype: np.dtype) -> Array:
    return 16 * STORED[dtype.name][0] * norm


def _sample(name: str, written: Named, got: Array, wanted: Array, error: Array) -> Sample:
    """A sample. `error`: of the computation; the rounding of the stored value is added."""
    return Sample(name, got, wanted, error + _stored(wanted, written[name].dtype))


def _absolute(given: Named) -> dict[str, Array]:
    """Absolute values of a BatchNorm operator's inputs, such that the terms of each result have one sign: the result is
    then the sum of the terms' magnitudes."""
    changed = {}
    for name, array in given.items():
        if name.startswith("mask") and array.dtype == np.uint8:
            changed[name] = np.full_like(array, 255)
        elif name.startswith(("gamma_grad", "beta_grad")):
            changed[name] = -np.abs(array)  # backward operators subtract these sums
        elif name.startswith("saved"):
            changed[name] = np.stack([-np.abs(array[0]), array[1]])  # the mean is subtracted, too
        else:
            changed[name] = np.abs(array) if array.dtype.kind == "f" else array
    return changed


def _of_batch_norm(given: Named, suffix: str = "") -> tuple[Array, Array, Array]:
    """gamma, beta and saved in float64."""
    gamma, beta, saved = (given[name + suffix].astype(np.float64) for name in ("gamma", "beta", "saved"))
    return gamma, beta, saved


def _activation(node: Node, x: Array, gamma: Array, beta: Array, saved: Array) -> tuple[Array, Array]:
    """BatchNorm of x, and the bound for fp32's error."""
    signs = _absolute({"data": x, "gamma": gamma, "beta": beta, "saved": saved})
    return scaled(node, x, gamma, beta, saved), FEW * UNIT * scaled(node, *signs.values())


# --- the sampled places ---


def _pixels(shape: Sequence[int], rng: np.random.Generator) -> tuple[Array, ...]:
    """Image, row and column of each sampled pixel, including the tensor's first and last."""
    places = tuple(rng.integers(0, size, PIXELS) for size in shape[:3])
    for at, size in zip(places, shape[:3], strict=True):
        at[:2] = 0, size - 1
    return places


def _at(array: Array, places: tuple[Array, ...]) -> Array:
    """(pixels, 1, 1, C): each pixel as an image."""
    pixels = array[places][:, None, None, :]
    return pixels.astype(np.float64) if array.dtype.kind == "f" else pixels


def _of_images(given: Named, read: Callable[[Array], Array]) -> dict[str, Array]:
    """`read` applied to the tensors that have pixels."""
    return {name: read(array) if array.ndim == 4 and name != "weight" else array for name, array in given.items()}


def _as_rows(array: Array) -> Array:
    """(N * H * W, 1, 1, C): each pixel as an image, so that chunks need not contain whole images."""
    return array.reshape(-1, 1, 1, array.shape[-1])


def _chunks(shape: Sequence[int]) -> list[slice]:
    images = max(1, CHUNK // math.prod(shape[1:]))
    return [slice(first, first + images) for first in range(0, shape[0], images)]


def _fraction(given: Named, share: float) -> dict[str, Array]:
    """Inputs in float64, with BatchNorm's backward sums scaled to a share of the pixels: the operators divide them by
    the number of pixels that they get."""
    return {name: array.astype(np.float64) * (share if name.startswith(("gamma_grad", "beta_grad")) else 1)
            if array.dtype.kind == "f" else array for name, array in given.items()}


# --- element by element ---


def _elementwise(node: Node, given: Named, written: Named, rng: np.random.Generator) -> Iterator[Sample]:
    """The operator itself, applied to the sampled pixels."""
    images = {name: array for name, array in written.items() if array.ndim == 4}
    if not images:
        return
    shape = next(iter(images.values())).shape
    places = _pixels(shape, rng)
    here = _of_images(given, lambda array: _at(array, places))
    here = _fraction(here, PIXELS / math.prod(shape[:3]))
    names = OPERATORS[node.op].output_names(node)
    wanted = dict(zip(names, evaluate(node, list(here.values())), strict=True))
    terms = dict(zip(names, evaluate(node, list(_absolute(here).values())), strict=True))
    open_ = np.zeros(())
    if "beta" in here and "out_grad" in here:
        y, error = _activation(node, here["data"], *_of_batch_norm(here))
        open_ = np.where(np.abs(y) <= error, np.inf, 0)
    for name, array in images.items():
        yield _sample(name, written, _at(array, places), wanted[name], FEW * UNIT * np.abs(terms[name]) + open_)


def _apply(node: Node, given: Named, written: Named, rng: np.random.Generator) -> Iterator[Sample]:
    """BatchNorm's forward half: elements from the statistics that the GPU has saved, and these from the sums."""
    yield from _statistics_kept(node, given, written)
    if "output" not in written:
        return
    places = _pixels(written["output"].shape, rng)
    y, error = np.zeros(()), np.zeros(())
    for suffix in ("", "_2") if "data_2" in given else ("",):
        parts = (*_of_batch_norm(given | {f"saved{suffix}": written[f"saved{suffix}"]}, suffix),)
        part, its_error = _activation(node, _at(given[f"data{suffix}"], places), *parts)
        y, error = y + part, error + its_error
    if "addend" in given:
        addend = _at(given["addend"], places)
        y, error = y + addend, error + FEW * UNIT * np.abs(addend)
    wanted = y if node.op == "BatchNormApply" else relu(y)
    yield _sample("output", written, _at(written["output"], places), wanted, error)
    if "mask" in written:
        # A positive number may also be too small for the type.
        smallest = STORED[written["output"].dtype.name][1]
        bits = [np.unpackbits(mask, axis=-1, count=y.shape[-1], bitorder="little").astype(float)
                for mask in (_at(written["mask"], places), positive_bits(y))]
        yield Sample("mask", *bits, np.where(np.abs(y) <= error + smallest, np.inf, 0))


def _apply_and_convolve(node: Node, given: Named, written: Named, rng: np.random.Generator) -> Iterator[Sample]:
    """BatchNorm's forward half, and the convolution of its output (which the kernel may not write)."""
    names = {"convolved": "output", "sums": "sums"}
    of_convolution = {name: written[its] for its, name in names.items()}
    of_norm = {name: array for name, array in written.items() if name not in names}
    yield from _apply(node, given, of_norm, rng)
    made = written["output"] if "output" in written else _normalised_again(node, given, written["saved"])
    data = {"data": made, "weight": given["weight"]}
    for sample in (*_fprop(node, data, of_convolution, rng), *_statistics(node, data, of_convolution, rng)):
        yield sample._replace(output="convolved" if sample.output == "output" else sample.output)


def _normalised_again(node: Node, given: Named, saved: Array) -> Array:
    """The output of BatchNorm + ReLU, rounded; sometimes to the other side, since the GPU computes in fp32."""
    x, parts = given["data"], _of_batch_norm({**given, "saved": saved})
    return np.concatenate([relu(scaled(node, x[chunk].astype(np.float64), *parts)).astype(x.dtype)
                           for chunk in _chunks(x.shape)])


def _statistics_kept(node: Node, given: Named, written: Named) -> Iterator[Sample]:
    """`saved` and the running statistics, from the sums."""
    for suffix in ("", "_2") if "data_2" in given else ("",):
        data = given[f"data{suffix}"]
        sums = given[f"sums{suffix}"].astype(np.float64)
        from_near, mean_square = sums[:2] / math.prod(data.shape[:3])
        near = sums[2] if len(sums) == 3 else np.zeros_like(from_near)
        mean, var = near + from_near, np.maximum(mean_square - from_near**2, 0)
        # Bounds for the mean and for the variance.
        error = FEW * UNIT * np.stack([np.abs(near) + np.abs(from_near), mean_square])
        inverse = 1 / np.sqrt(var + node["eps"])
        # Twice the derivative of 1 / sqrt(var + eps), because the error may be a large part of var.
        slope = inverse / (var + node["eps"])
        name = f"saved{suffix}"
        yield _sample(name, written, written[name], np.stack([mean, inverse]),
                      np.stack([error[0], slope * error[1] + FEW * UNIT * inverse]))
        keep = node["momentum"]
        for statistic, new, its_error in zip(("moving_mean", "moving_var"), (mean, var), error, strict=True):
            name = f"{statistic}{suffix}"
            if name in written:
                old = keep * given[name].astype(np.float64)
                yield _sample(name, written, written[name], old + (1 - keep) * new,
                              its_error + FEW * UNIT * np.abs(old))


# --- sums over the batch, of every channel ---


# For a slice of the rows: each kind of terms, and those terms whose ReLU is undecided, which may be missing (or None).
Terms = Callable[[slice], Sequence[tuple[Array, Array | None]]]


def _sums(chunks: Sequence[slice], terms: Terms) -> list[tuple[Array, Array, Array]]:
    """For each kind of terms, by channel: the sum, the norm, and the sum of the terms that may be missing."""
    def work(chunk: slice) -> list[tuple[Array, Array, Array]]:
        results = []
        for values, open_ in terms(chunk):
            values = values.reshape(-1, values.shape[-1])
            missing = np.zeros(()) if open_ is None else np.abs(open_).reshape(values.shape).sum(axis=0)
            results.append((values.sum(axis=0), np.einsum("rc,rc->c", values, values), missing))
        return results

    totals = [[sum(parts) for parts in zip(*kind, strict=True)] for kind in zip(*map(work, chunks), strict=True)]
    return [(total, np.sqrt(squares), missing) for total, squares, missing in totals]


def _statistics(node: Node, given: Named, written: Named, rng: np.random.Generator) -> Iterator[Sample]:
    """Sums and sums of squares of a BatchNorm's input. If a convolution's kernel computes them, they may be of
    unrounded values."""
    x = _as_rows(written["output"] if "output" in written else given["data"])
    sums = written["sums"]
    near = sums[2].astype(np.float64) if len(sums) == 3 else np.zeros(sums.shape[1])

    def terms(chunk: slice) -> list[tuple[Array, None]]:
        values = x[chunk].astype(np.float64) - near
        return [(values, None), (values * values, None)]

    (plain, norm, _), (squares, norm_of_squares, _) = _sums(_chunks(x.shape), terms)
    norms = np.stack([norm, 2 * norm_of_squares])
    error = _summed(math.prod(x.shape[:3]), norms)
    if "output" in written:
        # The values are rounded, not their differences from `near`.
        sizes = np.stack([np.ones_like(norm), 2 * norm / math.sqrt(math.prod(x.shape[:3]))])
        shift = np.abs(near) * math.sqrt(math.prod(x.shape[:3])) * sizes
        error = error + _rounded_terms(norms + shift, x.dtype)
    wanted = [plain, squares]
    if len(sums) == 3:  # any value near the mean will do: the sums above are about the stored one
        mean = plain / math.prod(x.shape[:3])
        wanted.append(near + mean)
        error = np.stack([*error, 8 * norm / math.sqrt(math.prod(x.shape[:3]))])
    yield _sample("sums", written, sums, np.stack(wanted), error)


def _gradient_sums(node: Node, given: Named, written: Named, rng: np.random.Generator) -> Iterator[Sample]:
    """The gradients of gamma and beta, from the masked gradient: as written, or recomputed."""
    dz = _as_rows(written["masked_grad"] if "masked_grad" in written else given["out_grad"])
    rows = _of_images(given, _as_rows)
    roles = [("data_at_winner", "saved", "")] if "winner" in given else [("data", "saved", "")]
    if node.op in THROUGH_NORMS:
        roles = [("data_2", "saved_2", "")]
    elif "data_2" in given:
        roles.append(("data_2", "saved_2", "_2"))

    def terms(chunk: slice) -> list[tuple[Array, Array | None]]:
        values, open_ = dz[chunk].astype(np.float64), None
        if "masked_grad" not in written and "winner" in given:
            values *= rows["winner"][chunk] != NOBODY  # several times faster than np.where
        elif "masked_grad" not in written and "beta" in given:
            y, error = _activation(node, rows["data"][chunk].astype(np.float64), *_of_batch_norm(given))
            is_open = np.abs(y) <= error
            values, open_ = values * ((y > 0) & ~is_open), values * is_open
        found = []
        for data, saved, _ in roles:
            x = normalised(node, rows[data][chunk].astype(np.float64), given[saved].astype(np.float64))
            found += [(values * x, None if open_ is None else open_ * x), (values, open_)]
        return found

    results = iter(_sums(_chunks(dz.shape), terms))
    for _, _, suffix in roles:
        for name in (f"gamma_grad{suffix}", f"beta_grad{suffix}"):
            total, norm, missing = next(results)
            error = _summed(math.prod(dz.shape[:3]), norm) + (1 + FEW * UNIT) * missing
            if "masked_grad" in written:
                error = error + _rounded_terms(norm, dz.dtype)
            yield _sample(name, written, written[name], total, error)


# --- convolutions ---


def _grouped_product(a: Array, b: Array, groups: int) -> tuple[Array, Array]:
    """(rows, groups * inner) times (groups, inner, columns), group by group; and the norm of each result's terms."""
    rows, inner = len(a), b.shape[1]
    a = a.reshape(rows, groups, inner)
    product = np.concatenate([a[:, g] @ b[g] for g in range(groups)], axis=1)
    squares = np.concatenate([(a[:, g] ** 2) @ (b[g] ** 2) for g in range(groups)], axis=1)
    return product, np.sqrt(squares)


def _patches(node: Node, x: Array, places: tuple[Array, ...]) -> Array:
    """(pixels, KH, KW, C): the window of each output pixel, 0 outside the image."""
    size, (image, *corner) = window(node), places
    at = [corner[i][:, None] * size.stride[i] - size.pad[i] + size.dilate[i] * np.arange(size.kernel[i])
          for i in (0, 1)]
    inside = [(at[i] >= 0) & (at[i] < x.shape[1 + i]) for i in (0, 1)]
    row, column = (at[i].clip(0, x.shape[1 + i] - 1) for i in (0, 1))
    found = x[image[:, None, None], row[:, :, None], column[:, None, :]].astype(np.float64)
    return found * (inside[0][:, :, None] & inside[1][:, None, :])[..., None]


def _fprop(node: Node, given: Named, written: Named, rng: np.random.Generator) -> Iterator[Sample]:
    weight, groups = given["weight"].astype(np.float64), node["num_group"]
    places = _pixels(written["output"].shape, rng)
    patches = _patches(node, given["data"], places)
    patches = patches.reshape(PIXELS, -1, groups, weight.shape[3]).swapaxes(1, 2).reshape(PIXELS, -1)
    wanted, norm = _grouped_product(patches, weight.reshape(groups, len(weight) // groups, -1).swapaxes(1, 2), groups)
    error = _summed(math.prod(weight.shape[1:]), norm)
    if node.op.startswith("Norm"):  # the convolution reads a BatchNorm's output that stays on the chip
        error = error + _rounded_terms(norm, given["weight"].dtype)
    if "bias" in given:
        wanted, error = wanted + given["bias"], error + FEW * UNIT * np.abs(given["bias"])
    if node.op == "ConvolutionRelu":
        wanted = relu(wanted)
    yield _sample("output", written, written["output"][places], wanted, error)


def _gradient_patches(node: Node, places: tuple[Array, ...], out_shape: Sequence[int],
                      read: Callable[[tuple[Array, ...]], Array]) -> Array:
    """(pixels, KH, KW, K): for each pixel of the data and each position in the kernel, the output's gradient that meets
    the pixel there. `read` returns it at image, row and column; 0 if there is none."""
    size, (image, *corner) = window(node), places
    at, inside = [], []
    for i in (0, 1):
        reach = corner[i][:, None] + size.pad[i] - size.dilate[i] * np.arange(size.kernel[i])
        inside.append((reach % size.stride[i] == 0) & (reach >= 0) & (reach // size.stride[i] < out_shape[1 + i]))
        at.append((reach // size.stride[i]).clip(0, out_shape[1 + i] - 1))
    shape = (PIXELS, *size.kernel)
    indices = [np.broadcast_to(array, shape).ravel()
               for array in (image[:, None, None], at[0][:, :, None], at[1][:, None, :])]
    found = read(tuple(indices)).reshape(*shape, -1)
    return found * (inside[0][:, :, None] & inside[1][:, None, :])[..., None]


def _dgrad(node: Node, given: Named, written: Named, rng: np.random.Generator) -> Iterator[Sample]:
    """The gradient of a convolution's data, and its use in operators that continue to the preceding BatchNorm."""
    weight, groups = given["weight"].astype(np.float64), node["num_group"]
    name = "masked_grad" if "masked_grad" in written else "data_grad"
    places = _pixels(written[name].shape, rng)
    open_ = np.zeros((PIXELS, 1))
    if node.op in ("NormBackward", *THROUGH_NORMS):
        out_shape = given["masked_grad"].shape

        def read(at: tuple[Array, ...]) -> Array:
            dy, is_open = _norm_gradient(node, _of_images(given, lambda array: _at(array, at)), out_shape)
            open_[is_open.reshape(PIXELS, -1).any(axis=1)] = np.inf  # of a 1x1 convolution: pixel by pixel
            return dy
    else:
        dy = given["conv_grad" if "conv_grad" in given else "out_grad"]
        out_shape = dy.shape

        def read(at: tuple[Array, ...]) -> Array:
            return dy[at].astype(np.float64)

    patches = _gradient_patches(node, places, out_shape, read)
    filters, channels = len(weight), weight.shape[3]
    patches = patches.reshape(PIXELS, -1, groups, filters // groups).swapaxes(1, 2).reshape(PIXELS, -1)
    weight = weight.reshape(groups, filters // groups, -1, channels).swapaxes(1, 2).reshape(groups, -1, channels)
    wanted, norm = _grouped_product(patches, weight, groups)
    error = _summed(weight.shape[1], norm) + open_
    if node.op in ("NormBackward", *THROUGH_NORMS):
        error = error + _rounded_terms(norm, given["weight"].dtype)
    if "out_grad_2" in given:
        addend = given["out_grad_2"][places].astype(np.float64)
        wanted, error = wanted + addend, error + FEW * UNIT * np.abs(addend)
    if "mask" in given:
        wanted = masked(wanted, given["mask"][places])
    if node.op in ("Conv3x3DgradReduce", *THROUGH_NORMS):
        before = "_2" if node.op in THROUGH_NORMS else ""
        y, its_error = _activation(node, _at(given[f"data{before}"], places), *_of_batch_norm(given, before))
        wanted = relu_backward(wanted, y[:, 0, 0])
        error = error + np.where(np.abs(y[:, 0, 0]) <= its_error[:, 0, 0], np.inf, 0)
    yield _sample(name, written, written[name][places], wanted, error)


def _norm_gradient(node: Node, given: Named, shape: Sequence[int]) -> tuple[Array, Array]:
    """The gradient of a BatchNorm's input, which most kernels do not write, at some pixels of a tensor of this shape;
    and where its ReLU is undecided."""
    here = _fraction(given, math.prod(given["data"].shape[:3]) / math.prod(shape[:3]))
    dz, is_open = here["masked_grad"], np.zeros(here["masked_grad"].shape, bool)
    if not node.get("no_relu", True):
        y, error = _activation(node, here["data"], *_of_batch_norm(here))
        dz, is_open = relu_backward(dz, y), np.abs(y) <= error
    sums = here["gamma_grad"], here["beta_grad"]
    return data_gradient(node, dz, here["data"], here["gamma"], here["saved"], sums), is_open


def _conv_grad(node: Node, given: Named, written: Named, rng: np.random.Generator) -> Iterator[Sample]:
    """The gradient of a BatchNorm's input, if the kernel writes it, at sampled pixels."""
    shape = given["data"].shape
    places = _pixels(shape, rng)
    here = _of_images(given, lambda array: _at(array, places) if array.shape == shape else array)
    wanted, _ = _norm_gradient(node, here, shape)
    terms, _ = _norm_gradient(node, _absolute(here), shape)
    yield _sample("conv_grad", written, _at(written["conv_grad"], places), wanted, FEW * UNIT * np.abs(terms))


def _squared(array: Array) -> Array:
    """Squares in fp32, which is enough for a norm."""
    return np.square(array).astype(np.float32)


STEM_WGRADS = "StemWgrad", "StemWeights"
WGRADS = "ConvolutionWgrad", "Conv3x3Weights"  # of a gradient that is read, not computed internally


def _wgrad(node: Node, given: Named, written: Named, rng: np.random.Generator) -> Iterator[Sample]:
    """From a weight's gradient, all elements of some filters, and for all filters the elements of some positions and
    channels. So each filter, position and channel is covered."""
    weight, groups = written["weight_grad"], node["num_group"]
    images = given["data" if node.op in WGRADS else "image" if node.op in STEM_WGRADS else "data_2"]

    def operands(chunk: slice) -> tuple[Array, Array]:
        """For some images: the gradient of the convolution's output, and its data."""
        x = images[chunk].astype(np.float64)
        if node.op in WGRADS:
            return given["out_grad"][chunk].astype(np.float64), x
        here = _of_images(given, lambda array: array[chunk])
        if node.op in STEM_WGRADS:
            return _pool_gradient(node, here, given["data"].shape), x
        dy, _ = _norm_gradient(node, here, given["data"].shape)
        if node.op == "NormBackwardReduce":
            x = relu(scaled(node, x, *_of_batch_norm(given, "_2")))
        return dy, x

    filters_of_group, (height, width, channels) = len(weight) // groups, weight.shape[1:]
    filters = rng.choice(filters_of_group, min(FILTERS, filters_of_group), replace=False)  # of each group
    columns = rng.choice(height * width * channels, min(FILTERS, height * width * channels), replace=False)

    def work(chunk: slice) -> list[Array]:
        """The gradient in two parts: all elements of some filters, and some elements of all filters; likewise for the
        squares of the terms, in fp32."""
        gradient, data = operands(chunk)
        places = Places(node, data.shape)
        gradient, data = gradient.reshape(-1, groups, filters_of_group), places.padded(data)
        of_filters = np.empty((2, groups, len(filters), height * width, channels))
        of_columns = np.empty((2, groups, filters_of_group, len(columns)))
        for which, (dy, x) in enumerate(((gradient, data), (_squared(gradient), _squared(data)))):
            some = [np.ascontiguousarray(dy[:, g, filters].T) for g in range(groups)]
            chosen = np.empty((len(dy), groups, len(columns)), dy.dtype)
            for number, (_, region) in enumerate(places):
                patch = x[region].reshape(len(dy), groups, channels)
                here = columns // channels == number
                chosen[..., here] = patch[..., columns[here] % channels]
                for g in range(groups):
                    of_filters[which, g, :, number] = some[g] @ patch[:, g]
            for g in range(groups):
                of_columns[which, g] = dy[:, g].T @ chosen[:, g]
        return [of_filters, of_columns]

    of_filters, of_columns = (sum(parts) for parts in zip(*map(work, _chunks(images.shape)), strict=True))
    got = weight.reshape(groups, filters_of_group, height * width, channels)
    pixels = math.prod(given["out_grad" if node.op in WGRADS else "data"].shape[:3])
    for elements, (total, squares) in ((got[:, filters], of_filters),
                                       (got.reshape(groups, filters_of_group, -1)[..., columns], of_columns)):
        error = _summed(pixels, np.sqrt(squares))
        if node.op not in WGRADS:
            error = error + _rounded_terms(np.sqrt(squares), images.dtype)
        yield _sample("weight_grad", written, elements, total, error)


# --- the stem's pooling, whole images of it ---


def _pool_gradient(node: Node, given: Named, shape: Sequence[int]) -> Array:
    """The gradient of the input of the BatchNorm before the pooling, for some images of a tensor of this shape."""
    here = _fraction(given, len(given["data"]) / shape[0])
    attrs = {**WINDOW, "layout": "NHWC", **{name: node[name] for name in ATTRIBUTES}}
    pooling = node.replace(op="BatchNormReluMaxPoolBackwardApply", attrs=attrs)
    dz = max_pooling_backward(pooling, here["out_grad"], here["winner"], here["data"].shape)
    return data_gradient(node, dz, here["data"], here["gamma"], here["saved"], (here["gamma_grad"], here["beta_grad"]))


def _some_images(shape: Sequence[int], rng: np.random.Generator) -> Array:
    """Indices of images, in order, including the last one."""
    return np.union1d(rng.choice(shape[0], min(IMAGES, shape[0]) - 1, replace=False), shape[0] - 1)


def _pool_apply(node: Node, given: Named, written: Named, rng: np.random.Generator) -> Iterator[Sample]:
    yield from _statistics_kept(node, given, written)
    chosen = _some_images(given["data"].shape, rng)
    parts = _of_batch_norm({**given, "saved": written["saved"]})
    x = given["data"][chosen].astype(np.float64)
    largest, winner = max_pooling(node, scaled(node, x, *parts))
    windows = np.stack([Places(node, x.shape).padded(x)[region] for _, region in Places(node, x.shape)])
    at_winner = np.take_along_axis(windows, winner[None], axis=0)[0]
    _, error = _activation(node, at_winner, *parts)
    yield _sample("output", written, written["output"][chosen], relu(largest), error)
    yield Sample("data_at_winner", written["data_at_winner"][chosen], at_winner, np.zeros(at_winner.shape))
    yield Sample("winner", written["winner"][chosen], np.where(largest > 0, winner, NOBODY),
                 np.where(np.abs(largest) <= error, np.inf, 0))


def _pool_backward(node: Node, given: Named, written: Named, rng: np.random.Generator) -> Iterator[Sample]:
    chosen = _some_images(given["data"].shape, rng)
    here = _of_images(given, lambda array: array[chosen])
    wanted = _pool_gradient(node, here, given["data"].shape)
    terms = _pool_gradient(node, _absolute(here), given["data"].shape)
    yield _sample("data_grad", written, written["data_grad"][chosen], wanted, FEW * UNIT * np.abs(terms))


# --- small tensors, as a whole ---


def _whole(node: Node, given: Named, written: Named, rng: np.random.Generator) -> Iterator[Sample]:
    """The operator itself. Integers must be equal."""
    assert max(array.size for array in (*given.values(), *written.values())) <= WHOLE, f"{node.op} needs a rule"
    names, doubles = OPERATORS[node.op].output_names(node), _fraction(given, 1)
    results = evaluate(node, list(doubles.values())), evaluate(node, list(_absolute(doubles).values()))
    for name, wanted, terms in zip(names, *results, strict=True):
        if name in written and written[name].dtype.kind == "f":
            yield _sample(name, written, written[name], wanted, 4 * FEW * UNIT * np.abs(terms))
        elif name in written:
            yield Sample(name, written[name], wanted, np.zeros(wanted.shape))


def _cross_entropy(node: Node, given: Named, written: Named, rng: np.random.Generator) -> Iterator[Sample]:
    """The gradient of the scores (probabilities less targets), for losses without threshold and class weights; its
    bound adds probabilities and targets. Also the metrics, which are sums over the batch."""
    doubles = _fraction(given, 1)
    results = dict(zip(OPERATORS[node.op].output_names(node), evaluate(node, list(doubles.values())), strict=True))
    wanted = results["data_grad"]
    targets = smoothed_targets(node, doubles["label"], wanted.shape[1], wanted.dtype)
    scale = node["grad_scale"] * np.asarray(doubles.get("loss_scale", 1.0))
    scale = scale / (1 if node["normalization"] == "null" else len(wanted))
    scale = scale / (wanted.shape[1] if node.op == "SigmoidCrossEntropy" else 1)
    yield _sample("data_grad", written, written["data_grad"], wanted,
                  4 * FEW * UNIT * (np.abs(wanted) + 2 * targets * scale))
    for name in written.keys() & {"loss", "top1", "top5"}:
        yield Sample(name, written[name], results[name], 4 * FEW * UNIT * np.abs(results[name]))


Rule = Callable[[Node, Named, Named, np.random.Generator], Iterator[Sample]]

RULES: Mapping[str, Sequence[Rule]] = {
    **dict.fromkeys(("Convolution", "ConvolutionRelu"), (_fprop,)),
    **dict.fromkeys(("ConvolutionStatistics", "Conv1x1Statistics", "Conv3x3ForwardStatistics", "StemFprop",
                     "StemForward"),
                    (_fprop, _statistics)),
    **dict.fromkeys(("ConvolutionDgrad", "Conv3x3Dgrad"), (_dgrad,)),
    **dict.fromkeys(WGRADS, (_wgrad,)),
    "BatchNormStatistics": (_statistics,),
    **dict.fromkeys(("BatchNormApply", "BatchNormReluApply", "BatchNormAddReluApply", "BatchNormPairApply"), (_apply,)),
    **dict.fromkeys(("NormConv1x1", "NormConv1x1Pair", "NormReluConv1x1", "NormConv3x3"), (_apply_and_convolve,)),
    **dict.fromkeys(("BatchNormBackwardReduce", "BatchNormReluBackwardReduce", "BatchNormAddReluBackwardReduce",
                     "BatchNormPairBackwardReduce", "BatchNormReluMaxPoolBackwardReduce"),
                    (_elementwise, _gradient_sums)),
    **dict.fromkeys(("BatchNormBackwardApply", "BatchNormReluBackwardApply", "BatchNormBackwardApplyAdd",
                     "BatchNormReluBackwardApplyAdd", "BatchNormPairBackwardApply", "ReluBackward", "elemwise_add",
                     "AddRelu", "BiasAdd", "BiasRelu", "BiasAddRelu"), (_elementwise,)),
    **dict.fromkeys(("DgradReduce", "DgradStream", "Conv3x3DgradReduce"), (_dgrad, _gradient_sums)),
    "NormBackward": (_wgrad, _dgrad),
    "NormBackwardReduce": (_wgrad, _dgrad, _gradient_sums),
    "NormDgrad": (_conv_grad, _dgrad, _gradient_sums),
    "BatchNormReluMaxPool": (_pool_apply,),
    "BatchNormReluMaxPoolBackwardApply": (_pool_backward,),
    **dict.fromkeys(STEM_WGRADS, (_wgrad,)),
    **dict.fromkeys(("SoftmaxCrossEntropy", "SigmoidCrossEntropy"), (_cross_entropy,)),
}

"""Softmax and sigmoid with their losses and gradients against float64 NumPy: random values, odd sizes, poisoned
outputs, all dtypes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_arrays import PRECISION, Device, relative_error, rounded

from graph_passes.executors.cuda.kernel_library import C_TYPES
from graph_passes.executors.cuda.network import MetricsLayout

pytestmark = pytest.mark.gpu


def ranked_labels(labels: np.ndarray, own_share: float) -> np.ndarray:
    """The labels for which hits are counted, see `Draws`."""
    if own_share == 0.5:
        return np.minimum(labels, labels[::-1])
    return labels if own_share > 0.5 else labels[::-1]


@pytest.mark.parametrize("kernel", ["softmax", "weighted softmax", "sigmoid", "sigmoid above 0.3"])
@pytest.mark.parametrize("rows, classes, smoothing", [(33, 10, 0.0), (5, 1000, 0.1), (3, 2, 0.2)])
@pytest.mark.parametrize("own_share", [1.0, 0.625, 0.5, 0.25, 0.0])
def test_cross_entropy(device: Device, dtype: str, kernel: str, rows: int, classes: int, smoothing: float,
                       own_share: float) -> None:
    random = np.random.default_rng(classes)
    pitch, loss_scale, gradient_scale, valid = -(-classes // 8) * 8, 64.0, 1 / rows, rows - 1
    scores = rounded(random.normal(0, 3, (rows, pitch)), dtype)
    scores[0, :2] = 100, -100
    bias = rounded(random.normal(0, 1, classes), "float32")
    labels = random.integers(0, classes, rows)
    weights = rounded(random.uniform(0.2, 5, classes), "float32") if kernel == "weighted softmax" else None
    threshold = 0.3 if kernel.endswith("0.3") else 0.0
    is_softmax = kernel.endswith("softmax")
    probabilities, gradient = device.poisoned((rows, classes)), device.poisoned((rows, pitch), dtype)
    row_loss, row_rank = device.poisoned((rows,)), device.poisoned((rows,), "int32")
    metrics, dbias = device.zeros(32), device.poisoned((classes,))
    c_type = C_TYPES[dtype]
    device.run("softmax.cu" if is_softmax else "sigmoid.cu",
               f"softmax_cross_entropy<{c_type}, {'false' if weights is None else 'true'}>" if is_softmax
               else f"sigmoid_cross_entropy<{c_type}>", (rows, 1, 1), (256, 1, 1),
               device.put(scores, dtype), device.put(bias), device.put(labels), device.put(np.array([own_share])),
               probabilities, gradient, row_loss, row_rank, device.put(np.array([loss_scale])),
               ctypes.c_float(gradient_scale / (1 if is_softmax else classes)), ctypes.c_float(smoothing),
               ctypes.c_int(classes), ctypes.c_int(pitch),
               (0 if weights is None else device.put(weights)) if is_softmax else ctypes.c_float(threshold),
               shared_bytes=4 * classes if is_softmax else 0)
    device.run("softmax.cu", "add_metrics", (1, 1, 1), (256, 1, 1), row_loss, row_rank,
               device.put(np.array([valid]), "int32"), metrics)
    device.run("softmax.cu", f"bias_gradient<{c_type}>", (-(-classes // 32), 1, 1), (32, 32, 1), gradient,
               dbias, ctypes.c_int(rows), ctypes.c_int(classes), ctypes.c_int(pitch))

    z = scores[:, :classes] + bias
    target = np.full((rows, classes), smoothing / (classes - 1))
    target[np.arange(rows), labels] = 1 - smoothing
    target = own_share * target + (1 - own_share) * target[::-1]
    if is_softmax:
        target *= 1.0 if weights is None else weights
        log_p = z - z.max(1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
        p, loss = np.exp(log_p), -(target * log_p).sum(1)
        slope = p * target.sum(1, keepdims=True) - target
    else:
        target = target > threshold if threshold else target
        p = 1 / (1 + np.exp(-z))
        loss = (np.logaddexp(0, z) - z * target).mean(1)
        slope = (p - target) / classes
    wanted = np.zeros((rows, pitch))
    wanted[:, :classes] = slope * gradient_scale * loss_scale
    assert relative_error(device.get(probabilities, (rows, classes)), p) < 1e-5
    assert relative_error(device.get(row_loss, (rows,)), loss) < 1e-5
    got = device.get(gradient, (rows, pitch), dtype)
    assert relative_error(got, wanted) < PRECISION[dtype] + 1e-5
    assert relative_error(device.get(dbias, (classes,)), got[:, :classes].sum(0)) < 1e-5
    rank = (z > z[np.arange(rows), ranked_labels(labels, own_share)][:, None]).sum(1)[:valid]
    sums = MetricsLayout.from_buffer_copy(device.get(metrics, (32,), "uint8").tobytes())
    assert (sums.top1, sums.top5, sums.count) == ((rank < 1).sum(), (rank < 5).sum(), valid)
    assert abs(sums.loss_sum - loss[:valid].sum()) < 1e-4 * loss[:valid].sum()


@pytest.mark.parametrize("kernel", ["softmax", "sigmoid"])
def test_a_label_outside_the_classes_gives_nan(device: Device, kernel: str) -> None:
    flags, last = (", false", 0) if kernel == "softmax" else ("", ctypes.c_float(0))
    metrics, row_loss, row_rank = device.zeros(32), device.poisoned((1,)), device.poisoned((1,), "int32")
    device.run(f"{kernel}.cu", f"{kernel}_cross_entropy<float{flags}>", (1, 1, 1), (256, 1, 1),
               device.put(np.zeros((1, 16))), 0, device.put(np.array([10.0])), 0, 0, 0, row_loss, row_rank, 0,
               ctypes.c_float(1), ctypes.c_float(0), ctypes.c_int(10), ctypes.c_int(16), last, shared_bytes=40)
    device.run("softmax.cu", "add_metrics", (1, 1, 1), (256, 1, 1), row_loss, row_rank,
               device.put(np.array([1]), "int32"), metrics)
    sums = MetricsLayout.from_buffer_copy(device.get(metrics, (32,), "uint8").tobytes())
    assert np.isnan(sums.loss_sum) and sums.top5 == 0

"""The tests of plain kernels on GPUs once more, on the emulated one: pytest collects what is imported here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from emulation import COMPILER, EmulatedGpu, EmulatedKernels
from emulation.steps import emulate_steps
from gpu_arrays import Device
from test_batch_norm import (  # noqa: F401
    test_a_compact_gradient,
    test_batch_norm_backward,
    test_batch_norm_forward,
    test_statistics,
    test_sums_by_many_blocks,
)
from test_batch_norm_pair import test_batch_norm_pair_backward, test_batch_norm_pair_forward  # noqa: F401
from test_batch_norm_relu_max_pool import test_batch_norm_relu_max_pool  # noqa: F401
from test_dropout_kernels import test_factors, test_images_and_elements  # noqa: F401
from test_elementwise import test_elementwise, test_exchange_boxes, test_mix_images  # noqa: F401
from test_pooling import test_average_pool, test_global_average_pool, test_max_pool  # noqa: F401
from test_softmax import test_a_label_outside_the_classes_gives_nan, test_cross_entropy  # noqa: F401
from test_training_step import (  # noqa: F401
    cache,
    test_another_optimizer_begins_anew,
    test_fifty_optimizer_steps_against_numpy,
    test_small_network_against_the_reference,
)
from test_words import test_embedding  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not COMPILER, reason="there is no g++")]


@pytest.fixture
def device(seed: int) -> Iterator[Device]:
    gpu = EmulatedGpu(seed)
    kernels: Any = EmulatedKernels(gpu)
    yield Device(gpu, kernels)
    gpu.free_all()


@pytest.fixture(autouse=True)
def emulated_steps(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[None]:
    made = emulate_steps(monkeypatch, seed)
    yield
    for gpu in made:
        gpu.free_all()

"""Shared by the tests of graph_passes."""

import time

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random numbers for each test; pytest shows the seed where a test fails."""
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    return np.random.default_rng(seed)

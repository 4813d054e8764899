"""How dgrad_stream divides shared memory. Its results are tested in test_dgrad_reduce.py."""

from __future__ import annotations

import pytest

from graph_passes.executors.cuda.kernels.dgrad_stream import STREAM_CHANNELS, DgradStream


@pytest.mark.parametrize("read", [1, 2])
def test_division_of_shared_memory(read: int) -> None:
    """Everything fits, with two tiles in flight for each team."""
    for k in range(8, max(STREAM_CHANNELS) + 1, 8):
        way = DgradStream(k, read)
        assert 2 <= way.stages <= 12 and way.shared_bytes <= 227 << 10
    assert DgradStream(256, 2).stages == 4, "a whole tile of dy"

"""How dgrad_stream divides shared memory; test_dgrad_reduce.py has what it computes."""

from __future__ import annotations

import pytest

from graph_passes.executors.cuda.kernels.dgrad_stream import STREAM_CHANNELS, DgradStream


@pytest.mark.parametrize("read", [1, 2])
def test_division_of_shared_memory(read: int) -> None:
    """All that a block needs fits, with two tiles on their way for each team."""
    for k in range(8, max(STREAM_CHANNELS) + 1, 8):
        way = DgradStream(k, read)
        assert 2 <= way.stages <= 12 and way.shared_bytes <= 227 << 10
    assert DgradStream(256, 2).stages == 4, "a whole tile of dy"

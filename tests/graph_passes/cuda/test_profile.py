"""The tables of a profile, from rows with known times."""

from __future__ import annotations

from graph_passes.executors.cuda.profile import Row, format_summary


def test_summary_says_how_far_each_operation_is_from_the_least_it_could_take() -> None:
    rows = [
        Row("a", "dgrad", 2.0, num_bytes=4_000_000, flops=2_000_000_000_000),  # 1000 TFLOP/s, the highest of all
        Row("b", "dgrad", 3.0, num_bytes=8_000_000_000, flops=1_000_000_000_000),  # bound by bytes: 2 ms at 4000 GB/s
        Row("c", "apply", 0.5, num_bytes=1_000_000_000, flops=0)]
    lines = [line.split() for line in format_summary(rows, ceiling=4000.0).splitlines()]
    assert lines == [
        ["operation", "launches", "ms", "least", "TFLOP/s", "GB/s", "of", "copy"],
        ["dgrad", "2", "5.000", "4.000", "600.0", "1601", "40%"],
        ["apply", "1", "0.500", "0.250", "0.0", "2000", "50%"],
        ["sum", "3", "5.500", "4.250", "545.5", "1637", "41%"]]
    assert "3.125" in format_summary(rows[1:], ceiling=8000.0), "no launch of these multiplies faster than b"

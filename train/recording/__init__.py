"""What a live run writes: log lines, metrics.jsonl, TensorBoard's event file and MLPerf's lines."""

"""The outputs of a live run: log lines, metrics.jsonl, TensorBoard's event file and MLPerf's lines."""

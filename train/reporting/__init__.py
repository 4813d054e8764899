"""What a run tells: log lines, metrics, TensorBoard, MLPerf, and the report with its plots."""

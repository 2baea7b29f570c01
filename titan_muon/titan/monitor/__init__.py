"""Measurements of weights, updates and states during training, for `metrics.jsonl` and TensorBoard."""

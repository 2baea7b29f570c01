"""A step: its buckets, and the tensors of their calls."""

"""The optimizer of each parameter of a model."""

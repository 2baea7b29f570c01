"""Measurements of weights, updates and states during training."""

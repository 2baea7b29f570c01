"""Checks of a run: equal recipes and code on all ranks, the right data, sound loss and gradient norms."""

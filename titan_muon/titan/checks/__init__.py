"""Checks of a run: equal ranks, the right data, sound loss and gradient norms."""

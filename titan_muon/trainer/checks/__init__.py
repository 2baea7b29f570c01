"""Checks of a run: equal ranks, the right data, finite gradient norms."""

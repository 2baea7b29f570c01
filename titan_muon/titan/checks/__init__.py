"""Checks of a run: equal recipes, code and replicas on all ranks, the right data, a sound loss curve."""

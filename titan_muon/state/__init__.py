"""Momentum: where it is stored, how it is moved to the host, and how it is saved."""

"""Faults of a step that all ranks name together, replicas that must be equal, and clipping."""

"""Checkpoint files: checksums, a reader without code execution, and free space."""

"""Checkpoint files: checksums, and a reader without code execution."""

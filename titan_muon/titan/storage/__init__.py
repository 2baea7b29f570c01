"""Checkpoint files on the disk: checksums, a reader that runs no code, and free space."""

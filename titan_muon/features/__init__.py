"""Optional features of a step: each is a file, and a line in `FEATURES` of selection.py."""

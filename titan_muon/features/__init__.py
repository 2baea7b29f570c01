"""Optional features: each is a file, and if it changes a step a line in `FEATURES` of selection.py."""

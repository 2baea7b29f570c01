"""The algorithms besides Muon: each is a file, and a line in `ALGORITHMS` of selection.py."""

"""Trains a grid of recipes: `python scripts/sweep.py RECIPE KEY=VALUE,VALUE ...`."""

import sys

from titan_muon.command import main

if __name__ == "__main__":
    sys.exit(main(["sweep", *sys.argv[1:]]))

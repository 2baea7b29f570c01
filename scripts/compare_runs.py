"""Compares runs: `python scripts/compare_runs.py RUN RUN ...`."""

import sys

from titan_muon.command import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))

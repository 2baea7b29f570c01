"""Runs a training script under an audit: `python -m titan_muon.audit script.py`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())

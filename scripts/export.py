"""Writes a run's model as a Hugging Face folder: `python scripts/export.py runs/llama_muon exported`."""

import sys

from titan_muon.command import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))

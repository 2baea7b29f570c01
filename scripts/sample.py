"""Writes text from a run: `python scripts/sample.py runs/qwen_moe_muon --prompt "The owner"`."""

import sys

from titan_muon.command import main

if __name__ == "__main__":
    sys.exit(main(["sample", *sys.argv[1:]]))

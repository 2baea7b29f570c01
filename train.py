"""Trains a recipe, or shows the plan: `python train.py --config configs/qwen_moe_muon.toml [--dry-run]`."""

import sys

from titan_muon.command import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

"""Loss of a run on its held-out text: `python scripts/evaluate.py runs/qwen_moe_muon`."""

import sys

from titan_muon.command import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))

"""Rehearses a rank of a recipe, with keys of the recipe as for `train.py`.

python -m benchmarks.rehearsal --config configs/llama3_8b_muon.toml --world-size 8 --rank 0 --json seen.json
"""

import argparse
import tempfile
from pathlib import Path

import models  # noqa: F401 (registers the families)
from benchmarks.rehearsal.fake_gpu import fake_gpu
from titan_muon.trainer.recipe import load


def main() -> None:
    """Rehearse in this process, with a replaced torch.cuda."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    with fake_gpu() as gpu, tempfile.TemporaryDirectory() as folder:
        # TorchTitan copies the device on import.
        from titan_muon.trainer.torchtitan import compat

        compat.install()
        from benchmarks.rehearsal.training import rehearse

        recipe = load(options.config, overrides)
        rehearse(recipe, options.world_size, options.rank, gpu, folder).write(options.json)


if __name__ == "__main__":
    main()

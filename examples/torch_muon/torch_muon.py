"""torch.optim.Muon in recipes, an optimizer of another package: `optimizer = "torch_muon"` in a rule.

    pip install --no-deps --no-build-isolation examples/torch_muon
    python train.py --config examples/torch_muon/llama.toml

Trains on one rank. Muon on the same matrices has the same losses, digit for digit with `orthogonalize = "reference"`.
"""

from typing import Any

import torch

from titan_muon import registry


def build(groups: list[dict[str, Any]]) -> torch.optim.Muon:
    """The optimizer of parameter groups, which have names and the options of their rules."""
    for group in groups:
        group["params"] = list(zip(group.pop("param_names"), group["params"], strict=True))
    return torch.optim.Muon(groups)


entry = registry.OptimizerEntry(build)

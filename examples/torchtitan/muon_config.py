"""TorchTitan's own trainer with Muon: TorchTitan's small Qwen3 with experts, and another optimizer.

In a checkout of TorchTitan, which has the text and the tokenizer of this configuration:

    export PYTHONPATH=.../examples/torchtitan
    torchrun --nproc-per-node=2 -m torchtitan.train --module muon_config --config qwen3_moe

Degrees and all other options are TorchTitan's: `--parallelism.tensor_parallel_degree 2`. On a CPU, `launch.py` beside
this file takes the place of `-m torchtitan.train`.
"""

from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer

from titan_muon.trainer import HybridOptimizers, fit_to_machine


def qwen3_moe() -> Trainer.Config:
    """TorchTitan's configuration with Muon on its matrices. Any configuration of TorchTitan's takes its place."""
    config = qwen3_moe_debug()
    # In place of default_adamw(lr=3e-4).
    config.optimizer = HybridOptimizers.Config(tables={"muon": {"lr": 2e-3}, "adamw": {"lr": 8e-4}})
    return fit_to_machine(config)

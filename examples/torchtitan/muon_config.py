"""TorchTitan's own trainer with Muon: a mixture of experts on the text of Python's standard library.

    export PYTHONPATH=examples/torchtitan
    torchrun --nproc-per-node=2 -m torchtitan.train --module muon_config --config qwen3_moe

Degrees and all other options are TorchTitan's: `--parallelism.tensor_parallel_degree 2`. On a CPU, `launch.py` beside
this file takes the place of `-m torchtitan.train`.
"""

from titan_muon.trainer.torchtitan import compat

# Before other imports of torchtitan, which copy the device. On a GPU it closes gaps of older versions of PyTorch.
ON_CPU = compat.install()

from dataclasses import replace

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer

from models import qwen3
from titan_muon.trainer import HybridOptimizers
from titan_muon.trainer.data.loader import dataloader_config
from titan_muon.trainer.data.tokenizers import tokenizer_config
from titan_muon.trainer.model.attention import use_attention
from titan_muon.trainer.model.parallelize import wrap_parallelize
from titan_muon.trainer.recipe.sections import Data

SEQ_LEN, SEQUENCES = 256, 4
DATA = Data(source="python", tokenizer="bytes")


def qwen3_moe() -> Trainer.Config:
    """A small Qwen3 with 16 experts, and Muon on its matrices. Any ModelSpec of TorchTitan's takes its place."""
    spec = qwen3.build("moe_tiny", vocab_size=None)
    # FlexAttention has no backward on a CPU, and gloo no PREMUL_SUM.
    use_attention(spec.model, "auto", ON_CPU)
    spec = replace(spec, parallelize_fn=wrap_parallelize(spec.parallelize_fn, SEQ_LEN))
    return Trainer.Config(
        model_spec=spec,
        tokenizer=tokenizer_config(DATA),
        dataloader=dataloader_config(DATA),
        # In place of default_adamw(lr=8e-4).
        optimizer=HybridOptimizers.Config(tables={"muon": {"lr": 2e-3}, "adamw": {"lr": 8e-4}}),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(steps=10, seq_len=SEQ_LEN, local_batch_size=SEQUENCES, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend=compat.spmd_backend("auto")),
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=5, last_save_model_only=False),
        dump_folder="runs/torchtitan",
    )

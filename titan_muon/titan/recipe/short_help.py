"""The short help: the keys that most runs set, with a recipe's values, on one screen."""

from collections.abc import Mapping
from types import MappingProxyType

from titan_muon.titan.recipe.schema import keys, values
from titan_muon.titan.recipe.sections import Recipe
from titan_muon.titan.recipe.toml import value_text

KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": ("name", "flavor"),
        "data": ("source", "files", "tokenizer", "tokenizer_path"),
        "training": ("steps", "seq_len", "global_batch_size", "local_batch_size", "max_norm", "mixed_precision_param"),
        "parallelism": (
            *("data_parallel_shard_degree", "data_parallel_replicate_degree", "tensor_parallel_degree"),
            *("expert_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"),
        ),
        "placement": ("muon",),
        "muon": (
            *("lr", "momentum", "nesterov", "weight_decay", "ns_steps", "ns_coefficients", "adjust_lr_fn", "algorithm"),
            *("beta2", "momentum_start", "momentum_warmup_steps", "cautious", "overlap", "state", "state_dtype"),
        ),
        "adamw": ("lr", "betas", "weight_decay"),
        "optimizer": ("offload",),
        "lr_scheduler": ("warmup_steps", "decay_ratio", "min_lr_factor"),
        "activation_checkpoint": ("mode",),
        "validator": ("freq",),
        "checkpoint": ("enable", "interval", "load"),
        "metrics": ("log_freq", "enable_tensorboard", "enable_wandb"),
        "debug": ("seed",),
    }
)
"""By table. At most 60 keys, so that they and FLAGS fit a screen of 80 lines."""

FLAGS = """train.py --config RECIPE [--TABLE.KEY VALUE ...]

  --config FILE         a TOML file, or the name of a recipe of this package
  --dry-run             print the recipe's plan and stop; needs neither torchrun nor a GPU
  --world-size N        with --dry-run: ranks to plan for
  --compare KEY=A,B     with --dry-run: a table of alternatives
  --suggest             with --dry-run and --world-size: the fastest layouts that fit
  --quiet               print errors, warnings and the summary at the end only
  --help TABLE          every key of a table, with its meaning
  --help all            all {count} keys and all flags, with their meanings

The most used keys, with their values in this recipe:
"""


def short_help(recipe: Recipe) -> str:
    """FLAGS, and a line for each of KEYS with the value of `recipe`."""
    current = values(recipe)
    names = [f"{table}.{key}" for table, chosen in KEYS.items() for key in chosen]
    width = max(map(len, names))
    lines = [
        f"  --{name:<{width}}  {'not given' if current[name] is None else value_text(current[name])}" for name in names
    ]
    return FLAGS.format(count=len(keys(Recipe))) + "\n".join(lines)

"""Titan Muon: the Muon optimizer for parameters in any layout, and training recipes on TorchTitan."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .assignment.groups import assign, parameter_groups
    from .assignment.heads import head_splits
    from .assignment.rules import Assignment
    from .forecast.preview import Preview, preview
    from .hybrid import Hybrid
    from .muon import Muon
    from .options import Expert, Rule, Split
    from .owned import Owners, own
    from .plugins.clip import clip_grad_norm_
    from .plugins.forward_hooks import apply_in_forward
    from .plugins.huggingface_attention import transformers_qk_clip
    from .plugins.huggingface_trainer import trainer_optimizer
    from .plugins.megatron_fsdp import follow_megatron_fsdp
    from .plugins.migrate import as_torch, converted

__version__ = "0.2.0"

_MODULES: Mapping[str, str] = {
    "Assignment": "assignment.rules",
    "Expert": "options",
    "Hybrid": "hybrid",
    "Muon": "muon",
    "Owners": "owned",
    "Preview": "forecast.preview",
    "Rule": "options",
    "Split": "options",
    "apply_in_forward": "plugins.forward_hooks",
    "as_torch": "plugins.migrate",
    "assign": "assignment.groups",
    "clip_grad_norm_": "plugins.clip",
    "converted": "plugins.migrate",
    "follow_megatron_fsdp": "plugins.megatron_fsdp",
    "head_splits": "assignment.heads",
    "own": "owned",
    "parameter_groups": "assignment.groups",
    "preview": "forecast.preview",
    "trainer_optimizer": "plugins.huggingface_trainer",
    "transformers_qk_clip": "plugins.huggingface_attention",
}

__all__ = [
    "Assignment",
    "Expert",
    "Hybrid",
    "Muon",
    "Owners",
    "Preview",
    "Rule",
    "Split",
    "apply_in_forward",
    "as_torch",
    "assign",
    "clip_grad_norm_",
    "converted",
    "follow_megatron_fsdp",
    "head_splits",
    "own",
    "parameter_groups",
    "preview",
    "trainer_optimizer",
    "transformers_qk_clip",
]


# PyTorch takes seconds to import, and a recipe's --help or error needs none of it.
def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"titan_muon.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'titan_muon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

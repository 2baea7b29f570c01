"""Titan Muon: the Muon optimizer for parameters in any layout, and training recipes on TorchTitan."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .assignment.groups import assign, parameter_groups
    from .assignment.heads import head_splits
    from .assignment.rules import Assignment
    from .comm.clip import clip_grad_norm_
    from .dry_run.preview import Preview, preview
    from .fsdp.forward_hooks import apply_in_forward
    from .fsdp.megatron import follow_megatron_fsdp
    from .fsdp.training_arguments import trainer_optimizer
    from .fsdp.transformers_attention import transformers_qk_clip
    from .hybrid import Hybrid
    from .muon import Muon
    from .options import Expert, Rule, Split
    from .owned import Owners, own
    from .state.converted import as_torch, converted

__version__ = "0.2.0"

_MODULES: Mapping[str, str] = {
    "Assignment": "assignment.rules",
    "Expert": "options",
    "Hybrid": "hybrid",
    "Muon": "muon",
    "Owners": "owned",
    "Preview": "dry_run.preview",
    "Rule": "options",
    "Split": "options",
    "apply_in_forward": "fsdp.forward_hooks",
    "as_torch": "state.converted",
    "assign": "assignment.groups",
    "clip_grad_norm_": "comm.clip",
    "converted": "state.converted",
    "follow_megatron_fsdp": "fsdp.megatron",
    "head_splits": "assignment.heads",
    "own": "owned",
    "parameter_groups": "assignment.groups",
    "preview": "dry_run.preview",
    "trainer_optimizer": "fsdp.training_arguments",
    "transformers_qk_clip": "fsdp.transformers_attention",
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

"""Titan Muon: the Muon optimizer for parameters in any layout, and training recipes on TorchTitan."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .assignment.fused import head_splits as head_splits
    from .assignment.groups import assign as assign
    from .assignment.groups import parameter_groups as parameter_groups
    from .assignment.options import Rule as Rule
    from .assignment.rules import Assignment as Assignment
    from .forecast.preview import Preview as Preview
    from .forecast.preview import preview as preview
    from .hybrid import Hybrid as Hybrid
    from .muon import Muon as Muon
    from .options import Expert as Expert
    from .options import Split as Split
    from .owned import Owners as Owners
    from .owned import own as own
    from .plugins.clip import clip_grad_norm_ as clip_grad_norm_
    from .plugins.forward_hooks import apply_in_forward as apply_in_forward
    from .plugins.huggingface import trainer_optimizer as trainer_optimizer
    from .plugins.huggingface import transformers_qk_clip as transformers_qk_clip
    from .plugins.megatron_fsdp import follow_megatron_fsdp as follow_megatron_fsdp
    from .plugins.migrate import as_torch as as_torch
    from .plugins.migrate import converted as converted

__version__ = "0.3.0"

_MODULES: Mapping[str, str] = {
    "Assignment": "assignment.rules",
    "Expert": "options",
    "Hybrid": "hybrid",
    "Muon": "muon",
    "Owners": "owned",
    "Preview": "forecast.preview",
    "Rule": "assignment.options",
    "Split": "options",
    "apply_in_forward": "plugins.forward_hooks",
    "as_torch": "plugins.migrate",
    "assign": "assignment.groups",
    "clip_grad_norm_": "plugins.clip",
    "converted": "plugins.migrate",
    "follow_megatron_fsdp": "plugins.megatron_fsdp",
    "head_splits": "assignment.fused",
    "own": "owned",
    "parameter_groups": "assignment.groups",
    "preview": "forecast.preview",
    "trainer_optimizer": "plugins.huggingface",
    "transformers_qk_clip": "plugins.huggingface",
}

__all__ = [*_MODULES]


# PyTorch takes seconds to import, and a recipe's --help or error needs none of it.
def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"titan_muon.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'titan_muon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

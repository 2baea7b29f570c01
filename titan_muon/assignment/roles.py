"""The role of each parameter: by the type and place of the module that has it, by its name where these say nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..options import Split
from .fused import class_names, fused_split

Role = Literal[
    "",
    "embedding",
    "head",
    "router",
    "lora",
    "convolution",
    "norm",
    "bias",
    "table",
    "elementwise",
    "linear",
    "experts",
]
"""Empty where neither module nor name says anything."""

# Of parameters that are no module's weight, and of modules that PyTorch has no type for, names are all there is.
NAMES: tuple[tuple[Role, str], ...] = (
    ("lora", r"(^|\.)lora_"),
    ("bias", r"bias(_[A-Z]+)?$"),
    ("table", r"pos(itional|ition)?_?emb|position_|(_token|_tokens|latents|queries)$"),
    ("elementwise", r"(^|\.)(A_log|A|dt_bias|time_\w+)$"),
)
HEADS = r"(^|\.)lm_head\.weight$|^(output|classifier|score)\.weight$"
ROUTERS = r"(^|\.)(router|gate|gating)(\.|$)"
EXPERTS = re.compile("expert", re.IGNORECASE)


@dataclass(frozen=True)
class Seen:
    """What is known of a parameter before rules: its shape, its role, and the split of a known fused layout."""

    shape: tuple[int, ...]
    role: Role = ""
    split: Split | None = None


def see(parts: Iterable[nn.Module], canonical: Callable[[str], str] = str) -> dict[str, Seen]:
    """Every trained parameter of a model's parts by its name, without what `canonical` removes from it."""
    found = {}
    for part in parts:
        known = _known(part)
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                fqn, (path, _, _) = canonical(name), name.rpartition(".")
                owner = part.get_submodule(path)
                split = fused_split(fqn, parameter, owner, part.get_submodule(path.rpartition(".")[0]))
                role = known.role(fqn, parameter, owner)
                found[fqn] = Seen(tuple(parameter.shape), role, None if role in PLAIN else split)
    return found


PLAIN = ("embedding", "head", "router", "lora", "bias")
"""Roles of parameters that no fused layout is of."""


@dataclass(frozen=True)
class _Known:
    """Parameters of one model part, by identity, whose role follows from where they are used."""

    embeddings: frozenset[Tensor]
    heads: frozenset[Tensor]
    routers: frozenset[Tensor]
    knows_vocabulary: bool

    def role(self, fqn: str, parameter: Tensor, owner: nn.Module) -> Role:
        """The role of a parameter that `owner` has."""
        for role, members in (("embedding", self.embeddings), ("head", self.heads), ("router", self.routers)):
            if parameter in members:
                return role  # type: ignore[return-value]
        if isinstance(owner, _ConvNd) and parameter.ndim > 2:
            return "convolution"
        if parameter.ndim > 1 and any(name.endswith("Norm") for name in class_names(owner)):
            return "norm"
        named = next((role for role, pattern in NAMES if re.search(pattern, fqn)), "")
        if parameter.ndim > 1 and named and not (named == "table" and isinstance(owner, nn.Linear)):
            return named  # type: ignore[return-value]
        if isinstance(owner, nn.Linear) and self.knows_vocabulary:
            return "linear"
        if parameter.ndim > 2 and any(EXPERTS.search(name) for name in class_names(owner)):
            return "experts"
        return ""


def _known(part: nn.Module) -> _Known:
    tables = [module for module in part.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    embeddings = frozenset(module.weight for module in tables)
    vocabulary = max((module.num_embeddings for module in tables), default=0)
    heads, routers = _heads(part, vocabulary), _routers(part)
    return _Known(embeddings, frozenset(heads), frozenset(routers), vocabulary > 0)


def _heads(part: nn.Module, vocabulary: int) -> Iterator[Tensor]:
    """Weights of output heads: tied to the embedding or not, the linear layers onto the vocabulary."""
    for name, module in part.named_modules():
        if isinstance(module, nn.Linear):
            # Within repeated layers a width that happens to be the vocabulary's is no vocabulary.
            onto = module.out_features == vocabulary and not re.search(r"(^|\.)\d+(\.|$)", name)
            if onto or re.search(HEADS, f"{name}.weight"):
                yield module.weight


def _routers(part: nn.Module) -> Iterator[Tensor]:
    """Weights that score experts: of modules that are called routers, and beside experts."""
    for path, module in part.named_modules():
        if path.rpartition(".")[2] == "router" or any("Router" in name for name in class_names(module)):
            yield from (parameter for parameter in module.parameters() if parameter.ndim == 2)
        children = dict(module.named_children())
        if any(EXPERTS.search(name) for name in children):
            for name, child in children.items():
                if re.search(ROUTERS, name):
                    yield from (parameter for parameter in child.parameters() if parameter.ndim == 2)

"""The role of each parameter, by type and position of its module, or else by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..engine.tensors.names import canonical_fqn
from ..options import Split
from .fused import class_names, fused_split

Plain = Literal["embedding", "head", "router", "lora", "bias"]
"""Roles without fused layouts."""
Role = Plain | Literal["", "convolution", "norm", "table", "elementwise", "linear", "experts"]
"""Empty for unknown roles."""

# For parameters other than weights, and for module types unknown to PyTorch.
NAMES: tuple[tuple[Role, str], ...] = (
    ("lora", r"(^|\.)lora_"),
    ("bias", r"bias(_[A-Z]+)?$"),
    ("table", r"pos(itional|ition)?_?emb|position_|(_token|_tokens|latents|queries)$"),
    ("elementwise", r"(^|\.)(A_log|A|dt_bias|time_\w+)$"),
)
HEADS = r"(^|\.)lm_head\.weight$|^(output|classifier|cls|score|(\w+_)?head)\.weight$"
ROUTERS = r"(^|\.)(router|gate|gating)(\.|$)"
EXPERTS = re.compile("expert", re.IGNORECASE)


IsMuon = Callable[[str, Tensor], bool | None]
"""The argument `is_muon` of `inspect_model`."""


@dataclass(frozen=True)
class ParameterInfo:
    """Properties of a parameter. `split`: of a known fused layout. `is_muon`: the user's answer."""

    shape: tuple[int, ...]
    role: Role = ""
    split: Split | None = None
    is_muon: bool | None = None


def inspect_model(
    parts: Iterable[nn.Module], *, frozen: bool = False, is_muon: IsMuon | None = None
) -> dict[str, ParameterInfo]:
    """Every trained parameter of a model's parts, by canonical name. `frozen`: frozen parameters too.

    `is_muon` takes a name and a parameter, and returns whether Muon takes the parameter, or None for the defaults.
    """
    result = {}
    for part in parts:
        tables = [module for module in part.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
        vocabulary = max((module.num_embeddings for module in tables), default=0)
        # A tied head is the embedding.
        by_place: dict[Tensor, Role] = dict.fromkeys(_routers(part), "router")
        by_place |= dict.fromkeys(_heads(part, vocabulary), "head")
        by_place |= {module.weight: "embedding" for module in tables}
        for name, parameter in part.named_parameters():
            if frozen or parameter.requires_grad:
                fqn, (path, _, _) = canonical_fqn(name), name.rpartition(".")
                owner = part.get_submodule(path)
                split = fused_split(fqn, parameter, owner, part.get_submodule(path.rpartition(".")[0]))
                role = by_place.get(parameter) or _role(fqn, parameter, owner, knows_vocabulary=vocabulary > 0)
                answer = None if is_muon is None else is_muon(fqn, parameter)
                info = ParameterInfo(tuple(parameter.shape), role, None if role in get_args(Plain) else split, answer)
                result[fqn] = info
    return result


def _role(fqn: str, parameter: Tensor, owner: nn.Module, *, knows_vocabulary: bool) -> Role:
    """The role of a parameter by its module's type and its name."""
    kinds = class_names(owner)
    if isinstance(owner, _ConvNd) and parameter.ndim > 2:
        return "convolution"
    if parameter.ndim > 1 and any(name.endswith("Norm") for name in kinds):
        return "norm"
    named: Role = next((role for role, pattern in NAMES if re.search(pattern, fqn)), "")
    if parameter.ndim > 1 and named and not (named == "table" and isinstance(owner, nn.Linear)):
        return named
    if isinstance(owner, nn.Linear) and knows_vocabulary:
        return "linear"
    return "experts" if parameter.ndim > 2 and any(EXPERTS.search(name) for name in kinds) else ""


def _heads(part: nn.Module, vocabulary: int) -> Iterator[Tensor]:
    """Weights of output heads, tied or not: linear layers onto the vocabulary."""
    for name, module in part.named_modules():
        if isinstance(module, nn.Linear):
            path, _, last = name.rpartition(".")
            parent = part.get_submodule(path)
            # Layers within repeated blocks are not heads, even with a width equal to the vocabulary's.
            ends = not last.isdigit() or (isinstance(parent, nn.Sequential) and module is parent[-1])
            onto = module.out_features == vocabulary and ends and not re.search(r"(^|\.)\d+(\.|$)", path)
            if onto or re.search(HEADS, f"{name}.weight"):
                yield module.weight


def _routers(part: nn.Module) -> Iterator[Tensor]:
    """Weights that score experts: in modules named router, and beside experts."""
    for path, module in part.named_modules():
        if path.rpartition(".")[2] == "router" or any("Router" in name for name in class_names(module)):
            yield from (parameter for parameter in module.parameters() if parameter.ndim == 2)
        children = dict(module.named_children())
        if any(EXPERTS.search(name) for name in children):
            for name, child in children.items():
                if re.search(ROUTERS, name):
                    yield from (parameter for parameter in child.parameters() if parameter.ndim == 2)

"""Tokens by expert, and warnings for experts without tokens."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_muon.engine.tensors.dtensor import local
from titan_muon.engine.tensors.names import listed

DEAD_STEPS, DEAD_REPORTS = 100, 3
"""An expert is dead without a token over this many steps and reports."""


class ExpertLoads:
    """Token counts by expert in a step. `group`: ranks with different tokens; None for a single rank."""

    def __init__(self, parts: Sequence[nn.Module], group: dist.ProcessGroup | None, device: torch.device) -> None:
        named = (pair for part in parts for pair in part.named_modules())
        # TorchTitan counts tokens since the optimizers' last step.
        self._layers = {name: layer for name, layer in named if hasattr(layer, "tokens_per_expert_E")}
        self._group, self._device = group, device
        self._before: list[Tensor] = []
        self._silent: dict[tuple[str, int], list[int]] = {}

    def begin_step(self) -> None:
        self._before = self._counts()

    def of_step(self) -> dict[str, list[int]]:
        """Tokens of each expert since `begin_step`, by layer. Collective over the group; the host waits."""
        if not self._layers:
            return {}
        own = [now - before for now, before in zip(self._counts(), self._before, strict=True)]
        counts = torch.cat(own)
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        rows = counts.long().split([tokens.numel() for tokens in own])
        return {name: row.tolist() for name, row in zip(self._layers, rows, strict=True)}

    def dead(self, step: int, tokens: Mapping[str, Sequence[int]]) -> list[str]:
        """A line for each layer with newly dead experts. `tokens`: counts by layer."""
        lines = []
        for layer, counts in tokens.items():
            new = []
            for expert, count in enumerate(counts):
                steps = self._silent.setdefault((layer, expert), [])
                was_dead = _is_dead(steps)
                if count:
                    steps.clear()
                else:
                    steps.append(step)
                if _is_dead(steps) and not was_dead:
                    new.append(expert)
            if new:
                shown = listed([*map(str, new)], 8)
                lines.append(f"{layer}: experts {shown} got no token in any report of the last {DEAD_STEPS} steps")
        return lines

    def _counts(self) -> list[Tensor]:
        counts: list[Tensor] = [layer.tokens_per_expert_E for layer in self._layers.values()]
        return [local(tokens).detach().to(self._device, copy=True) for tokens in counts]


def _is_dead(steps: Sequence[int]) -> bool:
    return len(steps) >= DEAD_REPORTS and steps[-1] - steps[0] >= DEAD_STEPS

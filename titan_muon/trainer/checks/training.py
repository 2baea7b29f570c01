"""The checks of a training run, called by the trainer: each rank's place in the text, gradient norms and experts."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_muon.engine.tensors.dtensor import is_host, local
from titan_muon.engine.tensors.names import canonical_fqn, listed
from titan_muon.plugins.clip import NormCheck
from titan_muon.trainer.fault import RunFault

UNKNOWN = -1
DEAD_STEPS, DEAD_REPORTS = 100, 3
"""An expert is dead without a token over this many steps and reports."""
ADVICE = "Lower the learning rates, warm up for longer, or continue from an earlier checkpoint."


def check_places(step: int, place: tuple[int, int], group: dist.ProcessGroup | None) -> None:
    """Raise RunFault on all ranks if a rank reads the wrong text. Collective over `group` (gloo; None: one process).

    `place`: number of this rank's first block in the step, by the loader and as it should be, or UNKNOWN.
    """
    places = [place]
    if group is not None:
        places *= dist.get_world_size(group)
        dist.all_gather_object(places, place, group=group)
    if wrong := [(rank, read, right) for rank, (read, right) in enumerate(places) if read != right]:
        shown = ", ".join(f"rank {rank} read block {read} instead of {right}" for rank, read, right in wrong[:4])
        raise RunFault(
            f"step {step}: {shown}. Some training text was skipped or repeated; continue from a checkpoint with "
            "checkpoint.load."
        )


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


class TrainingChecks:
    """Compares the places of ranks in the text, and watches norms and experts. Returns warnings, raises faults.

    Args:
        names: this rank's parameters, in the order of the local norms.
        group: all ranks on gloo; None for a single process.
        token_group: ranks with different tokens; None for a single rank.
        tolerates_nonfinite: warn about a norm that is not finite, instead of raising.
    """

    def __init__(
        self,
        names: Sequence[str],
        parts: Sequence[nn.Module],
        device: torch.device,
        *,
        group: dist.ProcessGroup | None,
        token_group: dist.ProcessGroup | None,
        tolerates_nonfinite: bool,
    ) -> None:
        self.names, self._late = names, not is_host(device)
        self._norm: tuple[int, NormCheck] | None = None
        self._trained = [(name, p, p.requires_grad) for part in parts for name, p in part.named_parameters()]
        self.experts = ExpertLoads(parts, token_group, device)
        self.tolerates_nonfinite, self._group = tolerates_nonfinite, group
        self._place: tuple[int, int] | None = None
        self._tokens: dict[str, list[int]] = {}

    def begin_step(self, place: tuple[int, int] | None) -> None:
        """Start a step. `place`: as in `check_places`, for a reported step; None for another.

        Raises ValueError on this rank for a frozen or thawed parameter.
        """
        # Now, because FSDP would abort or hang in backward, in a collective of other sizes.
        if changed := [canonical_fqn(name) for name, p, trained in self._trained if p.requires_grad != trained]:
            raise ValueError(
                f"{listed(changed)}: requires_grad changed after the start of training; freeze and thaw parameters on "
                "all ranks, before the optimizers are made"
            )
        self._place = place
        if place is not None:
            self.experts.begin_step()

    def after_clip(self, step: int, norm: NormCheck) -> list[str]:
        """Take a step's norm, before the optimizers' step. Returns warnings; raises as `check_norm`."""
        # On a GPU the host reads the last step's norm without a wait.
        lines = self.check_norm() if self._late else []
        self._norm = step, norm
        if not self._late:
            lines = self.check_norm()
        if self._place is not None:
            self._tokens = self.experts.of_step()
        return lines

    def check_norm(self) -> list[str]:
        """Raise FloatingPointError on all ranks, or return a warning, if the last norm was not finite."""
        if self._norm is None:
            return []
        step, norm = self._norm
        causes, self._norm = norm.causes(), None
        if causes is None:
            return []
        fault = f"step {step}: the norm of the gradients is {norm.value}, because of {causes}"
        if self.tolerates_nonfinite:
            return [fault]
        raise FloatingPointError(f"{fault}; nothing is saved from this step. {ADVICE}")

    def report(self, step: int) -> list[str]:
        """Warnings of a reported step. Collective. Raises as `check_places`."""
        assert self._place is not None, "a reported step began with a place"
        check_places(step, self._place, self._group)
        return self.experts.dead(step, self._tokens)

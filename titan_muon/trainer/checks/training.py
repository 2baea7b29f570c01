"""The checks of a training run, called by the trainer: text of the ranks in a reported step, norms and experts."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_muon.engine.faults.skip import NormCheck
from titan_muon.engine.tensors.dtensor import is_host
from titan_muon.engine.tensors.names import canonical_fqn, listed
from titan_muon.trainer.checks.experts import ExpertLoads
from titan_muon.trainer.data.loader import NOT_COUNTED
from titan_muon.trainer.fault import RunFault

UNKNOWN = -1


@dataclass(frozen=True)
class RankReport:
    """A rank's part in a reported step; UNKNOWN for no number."""

    data_rank: int  # place among data-parallel ranks; ranks with equal places must read equal text
    position: int  # number of the step's first block
    expected: int  # the right number
    crc: int  # CRC-32 of all inputs, positions and labels
    wrong_tokens: int  # positions and labels that do not follow the inputs


RESUME = "continue from a checkpoint with checkpoint.load."


def gather(report: RankReport, group: dist.ProcessGroup | None) -> list[RankReport]:
    """Reports in rank order. Collective over `group` (gloo; None: a single process)."""
    if group is None:
        return [report]
    mine = torch.tensor(astuple(report), dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [RankReport(*row.tolist()) for row in rows]


def check_reports(step: int, reports: Sequence[RankReport]) -> None:
    """Raise RunFault for ranks with wrong text."""
    if wrong := [(rank, r) for rank, r in enumerate(reports) if r.position != r.expected]:
        shown = ", ".join(f"rank {rank} read block {r.position} instead of {r.expected}" for rank, r in wrong[:4])
        raise RunFault(f"step {step}: {shown}. Some training text was skipped or repeated; {RESUME}")
    if pair := differing_pair(reports, same="data_rank", field="crc"):
        raise RunFault(
            f"step {step}: ranks {pair[0]} and {pair[1]} train on the same sequences and read different text, because "
            "data.files or data.cache differ between them. Give all ranks the same files."
        )
    if bad := {rank: r.wrong_tokens for rank, r in enumerate(reports) if r.wrong_tokens}:
        counts = ", ".join(f"{count:+} on rank {rank}" for rank, count in [*bad.items()][:4])
        fault = f"trained on positions or labels that do not follow the inputs ({counts})"
        raise RunFault(f"step {step}: ranks {[*bad][:4]} {fault}; {RESUME}")


def differing_pair(reports: Sequence[RankReport], *, same: str, field: str) -> tuple[int, int] | None:
    """Two ranks with an equal field `same` and another value of `field`, or None."""
    first: dict[int, int] = {}
    for rank, report in enumerate(reports):
        peer = first.setdefault(getattr(report, same), rank)
        if getattr(reports[peer], field) != getattr(report, field):
            return peer, rank
    return None


def wrong_tokens(inputs: Tensor, positions: Tensor, labels: Tensor) -> int:
    """Number of positions and labels that do not follow the inputs in packed blocks, each (batch, seq_len)."""
    # The label at the end of a document is in no input.
    begins, next_positions = positions[:, 1:] == 0, positions[:, 1:]
    follows = labels[:, :-1] == inputs[:, 1:]
    other = ~follows & (labels[:, :-1] != NOT_COUNTED)
    wrong = ~begins & ((next_positions != positions[:, :-1] + 1) | other)
    # A label is followed by itself within a document, or where one mark closes a document and opens the next.
    inside = inputs[:, 1:][begins & follows]
    return int(wrong.sum() + (positions[:, 0] != 0).sum() + (inside != inside[:1]).sum())


ADVICE = "Lower the learning rates, warm up for longer, or continue from an earlier checkpoint."


class TrainingChecks:
    """Compares ranks and watches norms and experts. Returns warnings, raises faults on all ranks.

    Args:
        names: this rank's parameters, in the order of the local norms.
        data_rank: place among data-parallel ranks.
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
        data_rank: int,
        group: dist.ProcessGroup | None,
        token_group: dist.ProcessGroup | None,
        tolerates_nonfinite: bool,
    ) -> None:
        self.names, self._late = names, not is_host(device)
        self._norm: tuple[int, NormCheck] | None = None
        self._trained = [(name, p, p.requires_grad) for part in parts for name, p in part.named_parameters()]
        self.experts = ExpertLoads(parts, token_group, device)
        self.data_rank, self.tolerates_nonfinite = data_rank, tolerates_nonfinite
        self._group = group
        self._place, self._crc, self._wrong_tokens = (UNKNOWN, UNKNOWN), 0, 0
        self._same_data_named = self._reported = False
        self._tokens: dict[str, list[int]] = {}

    def begin_step(self, *, reported: bool, place: tuple[int, int]) -> None:
        """Start a step. `reported`: compare ranks, and count experts' tokens.

        `place`: number of this rank's first block in the step, by the loader and as it should be, or UNKNOWN.

        Raises ValueError on this rank for a frozen or thawed parameter.
        """
        # Now, because FSDP would abort or hang in backward, in a collective of other sizes.
        if changed := [canonical_fqn(name) for name, p, trained in self._trained if p.requires_grad != trained]:
            raise ValueError(
                f"{listed(changed)}: requires_grad changed after the start of training; freeze and thaw parameters on "
                "all ranks, before the optimizers are made"
            )
        self._tokens, self._reported = {}, reported
        if reported:
            self.experts.begin_step()
            self._place, self._crc, self._wrong_tokens = place, 0, 0

    def add_batch(self, inputs: Mapping[str, Tensor], labels: Tensor, *, seq_len: int | None) -> None:
        """Take a batch of a reported step. `seq_len`: of `TokenBlock`s; None for another loader's batch."""
        for tensor in (*inputs.values(), labels):
            self._crc = zlib.crc32(tensor.numpy().tobytes(), self._crc)
        if seq_len is not None:
            blocks = (tensor.view(-1, seq_len) for tensor in (inputs["input"], inputs["positions"], labels))
            self._wrong_tokens += wrong_tokens(*blocks)

    def after_clip(self, step: int, norm: NormCheck) -> list[str]:
        """Take a step's norm, before the optimizers' step. Returns warnings; raises as `check_norm`."""
        # On a GPU the host reads the last step's norm without a wait.
        lines = self.check_norm() if self._late else []
        self._norm = step, norm
        if not self._late:
            lines = self.check_norm()
        if self._reported:
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
        """Warnings of a reported step. Collective. Raises as `check_reports`."""
        report = RankReport(
            data_rank=self.data_rank,
            position=self._place[0],
            expected=self._place[1],
            crc=self._crc,
            wrong_tokens=self._wrong_tokens,
        )
        reports, lines = gather(report, self._group), list[str]()
        check_reports(step, reports)
        if not self._same_data_named and (pair := differing_pair(reports, same="crc", field="data_rank")):
            self._same_data_named = True
            lines.append(f"step {step}: ranks {pair[0]} and {pair[1]} trained on the same tokens")
        return [*lines, *self.experts.dead(step, self._tokens)]

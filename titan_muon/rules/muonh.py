"""MuonH, Muon with Hyperball (Wen et al., 2026, arXiv:2606.16899): each matrix keeps its Frobenius norm."""

# [Note: the sphere]
# - The rule is W <- R Norm(W - lr R Norm(O)), with R = |W| and Norm(X) = X / |X|. The learning rate is an angle.
# - R is the norm of the weights before the step, as in Marin's MuonH. A projected matrix keeps its norm up to the
#   rounding of a factor, so R stays the initial norm, and no state has to be saved.
# - The owner scales the update by R. Holders project their shards. Both need norms of sharded weights: two all-reduces
#   of one float32 number for each matrix that travels, at the start and at the end of the step.
# - An unchanged matrix has equal norms before and after, so the projection multiplies by exactly 1.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.agreement import Agreement
from ..comm.collectives import finish
from ..comm.faults import Fault
from ..options import MuonOptions, OptionError
from ..plan.terms.layout import Geometries, spans
from ..state.rule_states import StateSpec
from ..step import update
from ..step.feature import Feature
from ..step.foreach import rectangle_of
from ..step.gradients import Step
from ..step.rule import Group
from ..step.stages import RankStages, Stages
from ..step.update import Tensors
from .muon import MuonRule

RADIUS = "radius"


class MuonHRule(MuonRule):
    """Updates of the weights' own norm, and weights projected to this norm. See [Note: the sphere].

    Raises OptionError for options without a meaning on the sphere, or that read weights before the projection.
    """

    states: tuple[StateSpec, ...] = (StateSpec(RADIUS, "matrix", saved=False),)
    limits = "nothing"
    finish_bytes = 4

    def __init__(self, options: MuonOptions) -> None:
        super().__init__(options)
        for name in ("cautious", "decay_follows_lr"):
            if getattr(options, name):
                raise OptionError(name, "= True changes weight decay, and rule = 'muonh' has none; set False")
        if options.overlap == "forward":
            problem = "= 'forward' applies updates in forward, before rule = 'muonh' can project the weights"
            raise OptionError("overlap", f"{problem}; set 'none' or 'backward'")
        if options.offload == "parameters":
            raise OptionError("offload", "= 'parameters': rule = 'muonh' projects weights on the device; set 'state'")

    def check(self, group: Group) -> None:
        if group["weight_decay"] != 0:
            problem = f"= {group['weight_decay']}: rule = 'muonh' keeps the norm of each matrix instead"
            raise OptionError("weight_decay", f"{problem}; set 0")

    def feature(self, agreement: Agreement) -> Feature:
        return Sphere(agreement)

    def finish(self, whole: Tensor, states: Mapping[str, Tensor], group: Group, *, transposed: bool) -> None:
        wide = whole.float()
        norms = torch.linalg.vector_norm(wide.flatten(1), dim=1)
        whole.copy_(wide.mul_(torch.where(norms > 0, states[RADIUS][:, 0] / norms, 0.0)[:, None, None]))

    def apply(self, params: Tensors, updates: Tensors, group: Group, scale: float, scratch: Tensors = ()) -> None:
        """param <- param - lr update_factor update. `scale` is unused, because the owner has scaled the update."""
        update.apply(params, updates, update.rate(group["lr"]), self.options.update_factor, 0.0, scratch)


class Sphere(Feature):
    """See [Note: the sphere]."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._works: Sequence[dist.Work] = ()
        self._waiting = False

    def wrap(self, stages: Stages, rank: RankStages) -> Stages:
        """Wait for the norms before the first matrix is orthogonalized. Raises OptionError for 16-bit weights."""
        narrow = [trained.fqn for trained in rank.params if trained.param.dtype.itemsize < 4]
        if narrow:
            problem = f"= 'muonh' needs float32 weights, because 16 bits lose the projection: {', '.join(narrow[:5])}"
            raise OptionError("rule", problem)
        self._rank = rank
        self._place(rank)
        count = len(rank.plan.matrices)
        self._radii = torch.zeros(count, device=rank.device)
        for number, radius in enumerate(self._radii.split(1)):
            rank.states[number] = {**rank.states.get(number, {}), RADIUS: radius}

        def orthogonalize(bucket: int, step: Step) -> None:
            self._finish_radii()
            stages.orthogonalize(bucket, step)

        return stages._replace(orthogonalize=orthogonalize)

    def _place(self, rank: RankStages) -> None:
        """Find the weights of each matrix on this rank, and this rank's share of the sum of squares."""
        plan, geometries = rank.plan, Geometries(rank.plan.parameters)
        group = self._agreement.peers
        peers = {rank.program.rank} if group is None else set(dist.get_process_group_ranks(group))
        numbers, shares, self._weights = list[int](), list[float](), list[Tensor]()
        for bucket in rank.program.buckets:
            for parcel in bucket.stored:
                matrix = plan.matrices[parcel.matrix]
                stored = rank.storage[matrix.parameter].param
                # Replicas among the peers count once together. Local matrices are not summed over ranks.
                elements = geometries[matrix.parameter].elements(matrix.index)
                held = sum(count for holder, count in elements.items() if holder in peers)
                for span in spans(parcel.piece):
                    numbers.append(parcel.matrix)
                    shares.append(1.0 if bucket.local else matrix.numel / held)
                    self._weights.append(rectangle_of(matrix.parameter, span, stored).of(stored))
        device = rank.device
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device=device)
        self._parameters = torch.tensor([plan.matrices[n].parameter for n in numbers], dtype=torch.int64, device=device)
        self._shares = torch.tensor(shares, device=device)
        self._travels = torch.tensor([not ranks for ranks in plan.local], device=device)

    def before(self, step: Step) -> None:
        self._works, self._waiting = self._start(self._radii), True

    def _start(self, sums: Tensor) -> Sequence[dist.Work]:
        """Start to fill `sums` (matrices,) with the squared norms of travelling and local matrices."""
        sums.zero_()
        if self._weights:
            norms = torch.stack(torch._foreach_norm(self._weights)).float()
            sums.index_put_((self._numbers,), norms.square_().mul_(self._shares), accumulate=True)
        if self._agreement.peers is None or not self._rank.plan.buckets:
            return ()
        self._local = sums.masked_fill(self._travels, 0)
        sums.masked_fill_(~self._travels, 0)
        return self._rank.exchange.collectives.all_reduce(sums, self._agreement.peers)

    def _finish(self, sums: Tensor, works: Sequence[dist.Work]) -> None:
        finish(works)
        if works:
            sums.add_(self._local)
        sums.sqrt_()

    def _finish_radii(self) -> None:
        if self._waiting:
            self._finish(self._radii, self._works)
        self._waiting = False

    def after(self) -> None:
        self._finish_radii()
        norms = torch.empty_like(self._radii)
        self._finish(norms, self._start(norms))
        if not self._weights:
            return
        factors = torch.where(norms > 0, self._radii / norms, 1.0)[self._numbers]
        torch._foreach_mul_(self._weights, list(factors.unbind()))
        self._rank.report.add_where(self._parameters, self._radii[self._numbers] == 0, Fault.ZERO_WEIGHTS)

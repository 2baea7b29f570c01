"""MuonH, Muon with Hyperball (Wen et al., 2026, arXiv:2606.16899): each matrix keeps its Frobenius norm."""

# [Note: the sphere]
# - The update is W <- R Norm(W - lr R Norm(O)), with R = |W| and Norm(X) = X / |X|. The learning rate is an angle.
# - R is the norm of the weights before the step, as in Marin's MuonH. A projected matrix keeps its norm up to the
#   rounding of a factor, so R stays the initial norm, and no state has to be saved.
# - The owner scales the update by R, and the engine projects the weights of all holders.

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..engine.state.states import StateSpec
from ..engine.step.algorithm import WEIGHT_NORM, Group, PlanContext
from ..engine.step.foreach import UpdateCall
from ..engine.step.muon import MuonAlgorithm
from ..options import OptionError


class MuonH(MuonAlgorithm):
    """Updates of the weights' own norm, and weights projected to this norm. See [Note: the sphere].

    Raises OptionError for options without a meaning on the sphere, or that read weights before the projection.
    """

    temporary_bytes = 4
    sums_norms = True

    def states(self, rows: int, cols: int, *, transposed: bool) -> tuple[StateSpec, ...]:
        return (StateSpec(WEIGHT_NORM, (1,), saved=False),)

    def check_group(self, group: Group) -> None:
        if group["weight_decay"] != 0:
            problem = f"= {group['weight_decay']}: algorithm = 'muonh' keeps the norm of each matrix instead"
            raise OptionError("weight_decay", f"{problem}; set 0")

    def check(self, context: PlanContext) -> None:
        for name in ("cautious", "decay_follows_lr"):
            if getattr(self.options, name):
                raise OptionError(name, "= True changes weight decay, and algorithm = 'muonh' has none; set False")
        narrow = [fqn for fqn, tensor in context.named if tensor.dtype.itemsize < 4]
        if narrow:
            names = ", ".join(narrow[:5])
            problem = f"= 'muonh' needs float32 weights, because 16 bits lose the projection: {names}"
            raise OptionError("algorithm", f"{problem}; keep the weights in float32, or choose 'muon'")

    def rescale(self, whole: Tensor, states: Mapping[str, Tensor], group: Group, *, transposed: bool) -> None:
        wide = whole.float()
        norms = torch.linalg.vector_norm(wide.flatten(1), dim=1)
        whole.copy_(wide.mul_(torch.where(norms > 0, states[WEIGHT_NORM][:, 0] / norms, 0.0)[:, None, None]))

    def factor(self, call: UpdateCall) -> float:
        """1, because the owner has scaled the update."""
        return 1.0

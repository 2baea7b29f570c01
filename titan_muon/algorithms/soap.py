"""SOAP (Vyas et al., 2024, arXiv:2409.11321, Algorithm 3): Adam in the eigenbases of Shampoo's averages."""

# [Note: SOAP]
# - Holders send their gradients as they are, in float32. All states are on the owner: the averages L of G Gᵀ and R of
#   Gᵀ G, their eigenbases Q_L and Q_R, and Adam's moments: the first of G, the second of Q_Lᵀ G Q_R.
# - Every `soap_freq` steps a basis Q of an average P becomes the orthogonal factor of P Q. Matrices take turns, so
#   that no step pays for all. The first step makes all bases from I and changes no weight.
# - A ridge of RIDGE times the mean eigenvalue is added to P. Without a ridge a singular P, as of any matrix that is not
#   square in the first step, has no unique eigenbasis: a rounding of the gradient moved weights by 50 to 100 % more or
#   less after two steps, with the ridge by 0.05 %.
# - A side above `max_side` has neither average nor basis: SOAP is one-sided there, because a basis of a vocabulary
#   would be larger than the model.
# - A matrix without an update keeps its states, and has a count of its own steps for the bias of the moments.
# - Every matrix is computed alone, on aligned memory, so that bits do not depend on the batch.

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..engine.layout.work import Work
from ..engine.state.states import StateSpec
from ..engine.step.algorithm import Group, PlanContext, Tensors
from ..engine.step.foreach import MomentumCall, UpdateCall
from ..engine.step.muon import MuonAlgorithm
from ..engine.step.views import Batch
from ..engine.tensors.storage import STEP
from ..options import MuonOptions, OptionError

SIDES = "rows", "cols"
GRAM, BASIS = "soap_gram_", "soap_basis_"
"""Names of the average of products of gradients and of its eigenbasis, before the side."""
FIRST_MOMENT, SOAP_SECOND_MOMENT, STEPS = "soap_first_moment", "soap_second_moment", "soap_steps"
ADAM_EPS = 1e-8
RIDGE = 1e-3
QR_COST = 10
"""Time of a FLOP of a QR decomposition over a product's. An assumption: no GPU has measured it."""
UNUSED = ("ns_steps", "ns_coefficients", "eps", "adjust_lr_fn")
"""Hyperparameters of Newton-Schulz and of the scale of its result."""


class Soap(MuonAlgorithm):
    """See [Note: SOAP]. `momentum` is Adam's beta1, and `beta2` decays the squares and the averages L and R."""

    momentum = False
    wire_dtype: Literal["float32"] | None = "float32"
    counts_steps = True
    gather_kernel = "copy"
    max_side = 10_000

    def states(self, rows: int, cols: int, *, transposed: bool) -> tuple[StateSpec, ...]:
        sides = [(name, side) for name, side in zip(SIDES, (rows, cols), strict=True) if side <= self.max_side]
        return (
            *(StateSpec(GRAM + name, (side, side)) for name, side in sides),
            *(StateSpec(BASIS + name, (side, side), identity=True) for name, side in sides),
            StateSpec(FIRST_MOMENT, (rows, cols)),
            StateSpec(SOAP_SECOND_MOMENT, (rows, cols)),
            StateSpec(STEPS, (1,)),
        )

    def work(self, rows: int, cols: int, work: Work) -> Work:
        sides = [side for side in (rows, cols) if side <= self.max_side]
        # Three matrices change their basis, and the products of gradients are averaged.
        products = 8 * rows * cols * sum(sides)
        refresh = sum((2 + QR_COST * 8 / 3) * side**3 for side in sides) / self.options.soap_freq
        elements = rows * cols + max(4 * rows * cols, 4 * max(sides, default=0) ** 2)
        return replace(
            work,
            method=f"soap every {self.options.soap_freq}, beta2 {self.options.beta2}",
            flops=int(products + refresh),
            reason="",
            batch=1,
            bytes=4 * elements,
            dtype="float32",
            operators=30,
        )

    def check_group(self, group: Group) -> None:
        for name in UNUSED:
            default = getattr(MuonOptions, name)
            if group[name] != default:
                raise OptionError(name, f"= {group[name]!r} has no effect with algorithm = 'soap'; set {default!r}")

    def check(self, context: PlanContext) -> None:
        options = context.options
        for name, needed, reason in (
            ("state_dtype", "float32", "holders keep no momentum, and the owner's moments are float32"),
            ("offload", "none", "its states are on the owner's device, and CPUOffloadPolicy implies 'parameters'"),
            ("state", "replicated", "all states are on the owner already"),
            ("momentum_warmup_steps", 0, "the correction of the moments' bias needs a constant beta"),
            ("ns_dtype", "auto", "it has no Newton-Schulz"),
            ("ns_kernel", "auto", "it has no Newton-Schulz"),
        ):
            value = getattr(options, name)
            if value != needed:
                raise OptionError(name, f"= {value!r} does not fit algorithm = 'soap': {reason}; set {needed!r}")

    def kind(self, group: Group) -> Hashable:
        # Bases of the first step, matrices that refresh theirs, and beta1.
        return group[STEP] > 0, group[STEP] % self.options.soap_freq, group["momentum"]

    def before_gather(self, call: MomentumCall, momentum: Tensors, grads: Tensors) -> None:
        if call.packed:
            torch._foreach_copy_(call.packed, grads)

    def update(self, batch: Batch, norms: Tensor) -> None:
        self.orthogonalize(batch, self.prepare(batch, norms))

    def orthogonalize(self, batch: Batch, norms: Tensor) -> None:
        """Replace gradients by Adam's updates in the eigenbases."""
        has_update = (norms >= 0).float()
        for part in batch.parts:
            step, every = part.group[STEP], self.options.soap_freq
            for place, (matrix, key) in enumerate(zip(part.whole, part.keys, strict=True)):
                states = {name: tensors[place] for name, tensors in part.states.items()}
                updated = has_update[part.first + place]
                # A clone is aligned.
                grad = matrix.clone()
                matrix.zero_()
                if step > 0:
                    matrix.copy_(self.adam(grad, states, updated, part.group))
                refreshes = step == 0 or (step + key) % every == 0
                for side, basis_of in bases(states):
                    product = grad @ grad.mT if side == "rows" else grad.mT @ grad
                    average = states[GRAM + side].lerp_(product, (1 - self.options.beta2) * updated)
                    if refreshes:
                        basis_of.copy_(torch.where(updated > 0, refreshed(average, basis_of), basis_of))

    def adam(self, grad: Tensor, states: Mapping[str, Tensor], updated: Tensor, group: Group) -> Tensor:
        """The update of a (rows, cols) float32 gradient. Updates the moments; `updated` is 1.0, or 0.0 to keep them."""
        first, second = states[FIRST_MOMENT], states[SOAP_SECOND_MOMENT]
        beta1, beta2 = group["momentum"], self.options.beta2
        first.lerp_(grad, (1 - beta1) * updated)
        second.lerp_(rotated(grad, states).square(), (1 - beta2) * updated)
        # At least one, so that a matrix that never had an update has no 0 / 0.
        steps = states[STEPS].add_(updated).clamp(min=1)
        ratio = rotated(first, states) / (1 - beta1**steps)
        ratio.div_(second.div(1 - beta2**steps).sqrt_().add_(ADAM_EPS))
        return rotated(ratio, states, back=True).mul_(updated)

    def factor(self, call: UpdateCall) -> float:
        """1, because the update has the size of Adam's."""
        return 1.0


def bases(states: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(side, basis) of each side with a basis."""
    for side in SIDES:
        if BASIS + side in states:
            yield side, states[BASIS + side]


def rotated(matrix: Tensor, states: Mapping[str, Tensor], *, back: bool = False) -> Tensor:
    """Q_Lᵀ X Q_R, or with `back` Q_L X Q_Rᵀ."""
    for side, basis_of in bases(states):
        rotation = basis_of if back else basis_of.mT
        matrix = rotation @ matrix if side == "rows" else matrix @ rotation.mT
    return matrix


def refreshed(average: Tensor, basis_of: Tensor) -> Tensor:
    """The orthogonal factor of P Q, with P = average + RIDGE times its mean eigenvalue times I."""
    product = average @ basis_of
    return torch.linalg.qr(product.add_(RIDGE * average.diagonal().mean() * basis_of)).Q

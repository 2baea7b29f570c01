"""Gradient clipping over parameters that live on different device meshes: one all-reduce of two numbers a step.

Every rank adds up the squares of the gradients that it holds, each divided by the number of ranks that hold the same
numbers, so that one sum over the world counts every element once: dense parameters on fsdp x tp, experts on
ep x efsdp, plain tensors, and the stages of a pipeline alike.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..tensors.mesh import without_groups

EPS = 1e-6
"""Added to the norm that divides, as in torch.nn.utils.clip_grad_norm_."""


def replica_count(parameter: torch.Tensor, stage_ranks: int) -> int:
    """Ranks that hold the same elements of `parameter`, itself counted.

    `stage_ranks` is the number of ranks that have this parameter at all: the world, or one pipeline stage.
    """
    if not isinstance(parameter, DTensor):
        return stage_ranks
    mesh = parameter.device_mesh
    replicas = 1
    for axis, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            replicas *= mesh.size(axis)
    # A mesh smaller than the stage is repeated over the stage's other ranks. The mesh of an owned parameter is small
    # because only its owners hold it, and they are all in it.
    return replicas if without_groups(parameter) else replicas * stage_ranks // mesh.size()


class GradientClip:
    """Scales gradients down to a largest norm. Every rank of the default process group calls it at every step.

    Args:
        parameters: all that this rank trains, of any dtype, as DTensors or plain tensors.
        clipped: parameters among them whose gradients are scaled; the factor comes from their norm alone.
        max_norm: largest norm of the clipped gradients, > 0.
        stage_ranks: ranks that share these parameters (world size / pipeline stages).
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        clipped: Iterable[torch.Tensor],
        *,
        max_norm: float,
        stage_ranks: int,
    ) -> None:
        chosen = set(clipped)
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.clipped = [parameter in chosen for parameter in self.parameters]
        self.max_norm = max_norm
        device = self.parameters[0].device
        shares = [1 / replica_count(p, stage_ranks) for p in self.parameters]
        # Weights sum, not the tensors: each rank divides by the copies, so one all-reduce over the world counts every
        # element once. Norms by mesh, as torch takes them, would need a collective for each mesh. float64, because
        # float32 loses the small tensors of a large model.
        self._weights = torch.tensor(
            [shares, [share * is_clipped for share, is_clipped in zip(shares, self.clipped, strict=True)]],
            dtype=torch.float64,
            device=device,
        )
        self._zero = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        """Scale the chosen gradients. Returns the norm of all gradients before it, a float64 scalar on the device.

        Equal on every rank. Nothing waits for the device. A parameter without a gradient counts as zero.
        """
        gradients = [None if p.grad is None else local_gradient(p) for p in self.parameters]
        norm, clipped_norm = self._norms(gradients)
        pairs = zip(gradients, self.clipped, strict=True)
        scaled = [gradient for gradient, is_clipped in pairs if is_clipped and gradient is not None]
        # Clamped on the device instead of tested here: an `if` on the norm would make the host wait for it.
        if scaled:
            torch._foreach_mul_(scaled, (self.max_norm / (clipped_norm + EPS)).clamp(max=1.0).float())
        return norm

    def _norms(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Two norms over all ranks: of all gradients, and of the clipped ones. None, no gradient, counts as zero."""
        present = [gradient for gradient in gradients if gradient is not None]
        norms = iter(torch._foreach_norm(present, 2, torch.float32) if present else ())
        # A rank without a gradient adds zero and still joins the all-reduce: left out, the others would hang.
        every = torch.stack([self._zero if gradient is None else next(norms) for gradient in gradients])
        sums = self._weights @ every.double().square()
        dist.all_reduce(sums)
        return sums.sqrt()


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The piece of a parameter's gradient that this rank holds; writing to it changes the gradient."""
    gradient = parameter.grad
    assert gradient is not None, "only parameters with a gradient are asked for it"
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor), "a distributed gradient belongs to a distributed parameter"
    assert gradient.placements == parameter.placements, (
        f"the gradient's placements {gradient.placements} differ from the parameter's {parameter.placements}"
    )
    return gradient.to_local()

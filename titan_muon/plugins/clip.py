"""Gradient clipping over parameters on different device meshes.

One all-reduce of two numbers: each rank divides the squares of local gradients by the number of ranks with the same
elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.faults.faults import norm_dtype
from ..engine.faults.skip import SkipsSteps
from ..engine.tensors.dtensor import host_zeros, is_host, on_device
from ..engine.tensors.names import listed
from ..engine.tensors.process_groups import backends, ranks_of, without_groups
from ..selection import MARKS

EPS = 1e-6
"""Added to the norm before division, as in torch.nn.utils.clip_grad_norm_."""

OTHER_EXPERTS = "_other_ranks_have_other_experts"
"""Attribute of a parameter beside whose mesh are meshes with other experts, under the same name."""


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    stages: int = 1,
    optimizer: SkipsSteps | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients so that their total norm is at most `max_norm`, as torch.nn.utils.clip_grad_norm_.

    Accepts any mixture of plain tensors, DTensors on different meshes, and owned parameters. Plain tensors count as
    replicas on all ranks of a pipeline stage, as under DDP. Every rank of `process_group` calls this.

    Args:
        parameters: parameters of this rank, perhaps none. A missing gradient counts as zero.
        max_norm: largest norm.
        norm_type: p of the p-norm; `math.inf` for the largest absolute value.
        error_if_nonfinite: raise RuntimeError for a non-finite norm, which blocks the host.
        foreach: ignored; exists for torch's signature.
        stages: pipeline stages with separate parameters.
        optimizer: Muon, AdamW of titan_muon or Hybrid. If the norm is not finite, its next step changes no weight and
            no state, and the step after, or `check_last_step`, raises ValueError on all ranks (or warns, with
            `on_bad_gradient = "skip_step"`). The host waits only for an algorithm without kernels that read the flag.
        process_group: the ranks with the model; by default the optimizer's group, else all ranks.

    Returns the norm before scaling, () float32 on the gradients' device, equal on all ranks. Raises ValueError for a
    norm_type that is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type = {norm_type} is not accepted: it takes a positive number or inf")
    every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    group = optimizer.process_group if process_group is None and optimizer is not None else process_group
    ranks = len(ranks_of(group)) // stages
    clip = GradientClip(every, every, max_norm=max_norm, stage_ranks=ranks, norm_type=norm_type, process_group=group)
    norm = clip(error_if_nonfinite=error_if_nonfinite)
    if optimizer is not None:
        optimizer.skip_unless_finite(NormCheck(norm, optimizer.names_of(clip.parameters), clip.local_norms, group))
    return norm.float()


class GradientClip:
    """Scales gradients down to a largest norm. Collective over `process_group`.

    Args:
        parameters: all parameters of this rank.
        clipped: parameters to scale. Only their norm determines the factor.
        stage_ranks: ranks that share these parameters (ranks / pipeline stages).
        process_group: the ranks with the model, by default all.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        clipped: Iterable[Tensor],
        *,
        max_norm: float,
        stage_ranks: int,
        norm_type: float = 2.0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = process_group
        chosen = set(clipped)
        # As in torch, a frozen parameter with a gradient counts.
        self.parameters = [p for p in parameters if p.requires_grad or p.grad is not None]
        self.clipped = [parameter in chosen for parameter in self.parameters]
        self.max_norm, self.norm_type = max_norm, norm_type
        device = self.parameters[0].device if self.parameters else collective_device(process_group)
        shares = [1 / replica_count(p, stage_ranks) for p in self.parameters]
        # Weighted sums need one collective, unlike torch's norms by mesh. float32 would lose small tensors.
        weights = [shares, [share * is_clipped for share, is_clipped in zip(shares, self.clipped, strict=True)]]
        self._weights = on_device(torch.tensor(weights, dtype=torch.float64, device="cpu"), device)
        self._zero = torch.zeros((), dtype=torch.float32, device=device)
        self.local_norms = torch.zeros(len(self.parameters), dtype=torch.float64, device=device)
        """(len(parameters),) float64: of this rank's gradients in the last call, before scaling."""

    @torch.no_grad()
    def __call__(self, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the clipped gradients. Returns the norm of all gradients before, () float64, equal on every rank.

        `error_if_nonfinite`: raise RuntimeError for such a norm of the clipped gradients, which blocks the host.
        """
        gradients = [local_gradient(parameter) for parameter in self.parameters]
        norm, clipped_norm = self._norms(gradients)
        if error_if_nonfinite and not bool(clipped_norm.isfinite()):
            raise RuntimeError(
                f"the total norm of order {self.norm_type} of the gradients is not finite, so they cannot be clipped; "
                "set error_if_nonfinite = False to scale them by it anyway"
            )
        pairs = zip(gradients, self.clipped, strict=True)
        scaled = [gradient for gradient, is_clipped in pairs if is_clipped and gradient is not None]
        # A condition on the norm would block the host.
        if scaled:
            torch._foreach_mul_(scaled, (self.max_norm / (clipped_norm + EPS)).clamp(max=1.0).float())
        return norm

    def _norms(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """(2,) float64: the norms over all ranks of all gradients and of the clipped gradients."""
        present = [gradient for gradient in gradients if gradient is not None and gradient.numel() > 0]
        norms = iter(torch._foreach_norm(present, self.norm_type, norm_dtype(present)) if present else ())
        by_parameter = [self._zero if g is None or g.numel() == 0 else next(norms) for g in gradients]
        if by_parameter:
            self.local_norms = torch.stack(by_parameter).double()
        local_norms = self.local_norms
        if math.isinf(self.norm_type):
            weighted = torch.where(self._weights > 0, local_norms, 0.0)
            values = weighted.amax(1) if by_parameter else weighted.sum(1)
            operation, root = dist.ReduceOp.MAX, 1.0
        else:
            values, operation = self._weights @ local_norms.pow(self.norm_type), dist.ReduceOp.SUM
            root = 1 / self.norm_type
        if len(ranks_of(self._group)) > 1:
            # A rank without parameters joins, because the others wait for it.
            shared = values.to(collective_device(self._group))
            dist.all_reduce(shared, operation, group=self._group)
            values = shared.to(values.device)
        return values.pow(root)


def collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """The device of a collective of all ranks of a group, equal on ranks with and without parameters."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not dist.is_initialized() or accelerator.type not in backends(group):
        return torch.device("cpu")
    return torch.device(accelerator.type)


def replica_count(parameter: Tensor, stage_ranks: int) -> int:
    """The number of ranks with the same elements, of `stage_ranks`.

    Raises ValueError for an experimental Megatron-FSDP parameter on a smaller mesh.
    """
    if not isinstance(parameter, DTensor):
        return stage_ranks
    mesh = parameter.device_mesh
    replicas = math.prod(mesh.size(axis) for axis, p in enumerate(parameter.placements) if p.is_replicate())
    if hasattr(parameter, MARKS[1]) and mesh.size() < stage_ranks:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is on {mesh.size()} of {stage_ranks} ranks, and "
            "experimental Megatron-FSDP does not tell whether the other ranks have replicas or other experts, so that "
            "gradients cannot be clipped; shard by fully_shard_model, or do not clip"
        )
    # The other ranks of the stage have replicas on meshes like this one, other experts, or nothing of an owned matrix.
    is_single = hasattr(parameter, OTHER_EXPERTS) or without_groups(parameter)
    return replicas if is_single else replicas * stage_ranks // mesh.size()


def local_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's piece of a parameter's gradient, as a view."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor), "a distributed gradient belongs to a distributed parameter"
    assert gradient.placements == parameter.placements, (
        f"the gradient's placements {gradient.placements} differ from the parameter's {parameter.placements}"
    )
    return gradient.to_local()


class NormCheck:
    """The gradient norm of a step. `broken`, () bool on the device: whether the norm is not finite.

    `norm`: (), equal on all ranks. `names`, `local_norms`: this rank's parameters and (len(names),) gradient norms.
    """

    def __init__(
        self,
        norm: Tensor,
        names: Sequence[str],
        local_norms: Tensor,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = process_group
        self.broken, self._names = norm.isfinite().logical_not(), names
        self._local_norms: Tensor | None = local_norms
        self._on_host = host_zeros(norm.detach())
        self._on_host.copy_(norm.detach(), non_blocking=True)
        module: Any = torch.get_device_module(norm.device)
        self._copied = None if is_host(norm.device) else module.Event()
        if self._copied is not None:
            self._copied.record()

    @property
    def value(self) -> float:
        """The norm. The host waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._on_host)

    def causes(self) -> str | None:
        """The parameters and ranks of a norm that is not finite, once; else None. Collective."""
        local_norms, self._local_norms = self._local_norms, None
        if local_norms is None or math.isfinite(self.value):
            return None
        broken = [name for name, norm in zip(self._names, local_norms.tolist(), strict=True) if not math.isfinite(norm)]
        ranks = ranks_of(self._group)
        everywhere: list[Sequence[str]] = [broken] * len(ranks)
        if len(ranks) > 1:
            dist.all_gather_object(everywhere, broken, group=self._group)
        found = zip(ranks, everywhere, strict=True)
        where = "; ".join(f"{listed(names)} on rank {rank}" for rank, names in found if names)
        return where or "large values"

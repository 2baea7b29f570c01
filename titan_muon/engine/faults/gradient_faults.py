"""Missing and non-finite gradients of AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..exchange.agreement import Agreement
from ..tensors.dtensor import local, on_device, step_device
from .faults import Fault
from .report import FaultReport


class GradientFaults:
    """Reports missing and non-finite gradients of an AdamW: with the report of a Muon, or alone."""

    def __init__(self, adamw: Any) -> None:
        self._adamw = adamw
        self.reporter: Any = None
        self._follows = False
        self.expect_gradients()
        self._own: FaultReport | None = None
        self._places = list[int]()
        self._numbers = torch.empty(0, dtype=torch.int64, device="cpu")

    def report_with(self, muon: Any, *, follows: bool) -> None:
        """Use the report of `muon` from now on. `follows`: whether AdamW steps after `muon`."""
        self.reporter, self._follows = muon, follows

    @property
    def params(self) -> list[Tensor]:
        return [parameter for group in self._adamw.param_groups for parameter in group["params"]]

    def expect_gradients(self) -> None:
        """Expect gradients of the parameters that are not frozen now."""
        # By place, because for example Accelerate replaces the parameters of groups.
        self._frozen = [not parameter.requires_grad for parameter in self.params]

    def check(self, skipped: Tensor | None, *, scaled: bool) -> Tensor:
        """Raise ValueError for the last step, and report the gradients of this step.

        `skipped`: whether the step changes nothing anyway. `scaled`: whether a GradScaler has checked the gradients.
        Returns () bool on the device: whether a gradient on this rank is bad.
        """
        report, start = self._report()
        params = self.params
        grads, missing = [parameter.grad for parameter in params], False
        if any(grad is None for grad in grads) or any(self._frozen):
            faults = [self._fault(p, frozen=frozen) for p, frozen in zip(params, self._frozen, strict=True)]
            if report.is_shared:
                report.add(faults, start)
            else:
                self._adamw.on_faults(faults)
            missing = Fault.NO_GRADIENT in faults
        broken = torch.full((), missing, device=report.device)
        if not scaled:
            broken = broken | self._nonfinite(grads, report, start, skipped)
        if self.reporter is None:
            report.send()
        return broken

    def _report(self) -> tuple[FaultReport, int]:
        if self.reporter is not None:
            # A Muon that steps before AdamW has raised, and the host would wait for the report of this step.
            if not self._follows:
                self.reporter.engine.raise_pending()
            report = self.reporter.engine.rank.report
            return report, report.start_of(self._adamw)
        if self._own is None:
            device = step_device(self.params[0]) if self.params else torch.device("cpu")
            self._own = FaultReport(self._adamw.names(), {}, {}, device, Agreement())
        faults = self._own.read()
        self._own.clear()
        if any(faults):
            self._adamw.on_faults(faults)
        return self._own, 0

    def _fault(self, parameter: Tensor, *, frozen: bool) -> Fault:
        if frozen and parameter.requires_grad and self.reporter is not None:
            return Fault.THAWED
        if parameter.grad is not None or frozen or self._adamw.skips_missing:
            return Fault.NONE
        # Outside of the mesh, and where Megatron-FSDP keeps no rows.
        nothing = isinstance(parameter, DTensor) and local(parameter).numel() == 0
        return Fault.NONE if nothing else Fault.NO_GRADIENT

    def _nonfinite(
        self, grads: Sequence[Tensor | None], report: FaultReport, start: int, skipped: Tensor | None
    ) -> Tensor:
        stored = [(start + i, g) for i, grad in enumerate(grads) if grad is not None and (g := local(grad)).numel() > 0]
        if not stored:
            return torch.zeros((), dtype=torch.bool, device=report.device)
        norms = torch.stack(torch._foreach_norm([grad for _, grad in stored], math.inf))
        broken = norms.isfinite().logical_not_().to(report.device, non_blocking=True)
        places = [place for place, _ in stored]
        if self._places != places or self._numbers.device != report.device:
            self._places, self._numbers = places, on_device(torch.tensor(places, device="cpu"), report.device)
        # A norm over all gradients has its own error.
        faulty = broken if skipped is None else broken & ~skipped
        report.add_where(self._numbers, faulty, Fault.NOT_FINITE)
        return broken.any()

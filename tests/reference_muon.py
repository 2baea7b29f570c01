"""Muon and SOAP on full matrices in one process, a matrix at a time: the references for every layout.

Written from the definition and the papers, independent of the package. torch.optim.Muon is compared by its own test.
"""

import math
from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor


def newton_schulz(matrix: Tensor, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The quintic iteration with Keller Jordan's coefficients in a dtype; matrix (m, n) -> (m, n)."""
    x = matrix.to(dtype, copy=True)
    if matrix.size(0) > matrix.size(1):
        x = x.T
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if matrix.size(0) > matrix.size(1) else x


class ReferenceMuon:
    """Full parameters by name, (m, n) or (count, m, n), updated in place from full gradients.

    A step leaves out parameters without a gradient. The algorithms are those of the papers: Muon, NorMuon
    (arXiv:2510.05491, Algorithm 1), AdaMuon (arXiv:2507.11005, Algorithm 1, with beta2 and a Nesterov blend), MuonEq
    (arXiv:2603.28254, form R), MuonH (arXiv:2606.16899), cautious weight decay (arXiv:2510.12402) and AdamC's decay
    (arXiv:2506.02285).
    `moments[name]` are the second moments of the matrices of a parameter. `peak` is the highest learning rate of AdamC.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adjust_lr_fn: float | str | None = "match_rms_adamw",
        dtype: torch.dtype = torch.bfloat16,
        algorithm: str | tuple[str, ...] = "muon",
        beta2: float = 0.95,
        cautious: bool = False,
        decay_follows_lr: bool = False,
        momentum_warmup_steps: int = 0,
        momentum_start: float = 0.85,
        idle: str = "move",
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.params = dict(params)
        self.average = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.weight_decay, self.adjust_lr_fn, self.dtype = weight_decay, adjust_lr_fn, dtype
        self.algorithms = (algorithm,) if isinstance(algorithm, str) else algorithm
        self.beta2, self.cautious = beta2, cautious
        self.peak = lr if decay_follows_lr else None
        self.warmup, self.start, self.last = momentum_warmup_steps, momentum_start, momentum
        self.steps, self.holds, self.wire = 0, idle == "hold", wire_dtype or dtype
        self.moments = {
            name: [torch.zeros(p.shape[-2:] if "adamuon" in self.algorithms else p.size(-2)) for _ in self._matrices(p)]
            for name, p in self.params.items()
            if {"normuon", "adamuon"} & {*self.algorithms}
        }

    @staticmethod
    def _matrices(param: Tensor) -> list[Tensor]:
        return list(param) if param.ndim == 3 else [param]

    def step(self, grads: Mapping[str, Tensor]) -> None:
        if self.warmup:
            self.momentum = self.start + (self.last - self.start) * min(1, self.steps / self.warmup)
        self.steps += 1
        decay = self.weight_decay if self.peak is None else self.weight_decay * self.lr / self.peak
        for name, grad in grads.items():
            param, average = self.params[name], self.average[name]
            average.lerp_(grad, 1 - self.momentum)
            blended = grad.lerp(average, self.momentum) if self.nesterov else average
            matrices = zip(self._matrices(param), self._matrices(blended), self._matrices(grad), strict=True)
            for index, (target, matrix, gradient) in enumerate(matrices):
                update = newton_schulz(self.prepared(matrix), dtype=self.dtype)
                held = self.holds and not gradient.any()
                if held:
                    update = torch.zeros_like(update)
                if name in self.moments and not held:
                    update = self.normalized(update, self.moments[name][index])
                if "muonh" in self.algorithms:
                    self.turn(target, update)
                    continue
                if self.cautious:
                    target.add_(target * (target * update >= 0), alpha=-self.lr * decay)
                else:
                    target.mul_(1 - self.lr * decay)
                target.add_(update, alpha=-self.lr * self.scale(*matrix.shape))

    def scale(self, rows: int, cols: int) -> float:
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, cols))
        if self.adjust_lr_fn == "spectral_unclamped":
            return math.sqrt(rows / cols)
        if isinstance(self.adjust_lr_fn, float):
            return self.adjust_lr_fn * math.sqrt(max(rows, cols))
        return math.sqrt(max(1, rows / cols))

    def prepared(self, matrix: Tensor) -> Tensor:
        for name in self.algorithms:
            if name.startswith("muoneq"):
                wide, dims = matrix.to(self.wire).float(), {"muoneq_columns": [0], "muoneq_both": [1, 0]}.get(name, [1])
                for length in [torch.linalg.vector_norm(wide, dim=dim, keepdim=True) for dim in dims]:
                    wide = wide / (length + 1e-8)
                matrix = wide.to(self.wire)
        return matrix.sign() if "adamuon" in self.algorithms else matrix

    def normalized(self, update: Tensor, moment: Tensor) -> Tensor:
        wide = update.float().contiguous()
        squares = wide.square()
        moment.lerp_(squares if "adamuon" in self.algorithms else squares.mean(1), 1 - self.beta2)
        root = moment.sqrt() + 1e-8 if "adamuon" in self.algorithms else (moment.sqrt() + 1e-7)[:, None]
        rows = wide / root
        # 0.2 lr sqrt(m n) / norm is the papers' rate; the scale of Muon's rate, 0.2 sqrt(max), leaves sqrt(min) / norm.
        return (rows * (min(update.shape) ** 0.5 / rows.norm())).to(self.wire)

    def turn(self, weights: Tensor, update: Tensor) -> None:
        """Move weights on the sphere of constant norm."""
        wide, radius = update.float().contiguous(), weights.norm().square().sqrt()
        weights.add_((wide * (radius / wide.norm())).to(update.dtype), alpha=-self.lr)
        weights.mul_(radius / weights.norm().square().sqrt())


class ReferenceSoap:
    """Matrices by name ("parameter#index"), updated in place. A step leaves out matrices without a gradient.

    SOAP (arXiv:2409.11321, Algorithm 3), with a ridge on the averages, first bases from the first gradient, and turns
    for the refreshes of matrices.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        beta2: float = 0.95,
        soap_freq: int = 10,
        weight_decay: float = 0.1,
        cautious: bool = False,
        max_side: int = 10_000,
    ) -> None:
        self.params, self.lr, self.betas, self.every = dict(params), lr, (momentum, beta2), soap_freq
        self.weight_decay, self.cautious, self.t = weight_decay, cautious, 0
        self.soap: dict[str, dict[str, Tensor]] = {}
        for name, p in self.params.items():
            m, n = p.shape
            states = {"first_moment": torch.zeros(m, n), "second_moment": torch.zeros(m, n), "steps": torch.zeros(1)}
            for key, side in (("rows", m), ("cols", n)):
                if side <= max_side:
                    states |= {f"gram_{key}": torch.zeros(side, side), f"basis_{key}": torch.eye(side)}
            self.soap[name] = states

    def step(self, grads: Mapping[str, Tensor]) -> None:
        for name, grad in grads.items():
            param, s = self.params[name], self.soap[name]
            update = self.adam(grad, s) if self.t else torch.zeros_like(grad)
            decay = self.lr * self.weight_decay
            if self.cautious:
                param.sub_(decay * param * (param * update >= 0))
            else:
                param.mul_(1 - decay)
            param.add_(update, alpha=-self.lr)
            fqn, index = name.split("#")
            turn = (self.t + crc32(fqn.encode()) + int(index)) % self.every == 0
            for key, product in (("rows", grad @ grad.T), ("cols", grad.T @ grad)):
                if f"gram_{key}" in s:
                    average = s[f"gram_{key}"].lerp_(product, 1 - self.betas[1])
                    if turn or not self.t:
                        s[f"basis_{key}"] = self.basis(average, s[f"basis_{key}"])
        self.t += 1

    def adam(self, grad: Tensor, s: dict[str, Tensor]) -> Tensor:
        beta1, beta2 = self.betas
        left, right = (s.get(f"basis_{key}") for key in ("rows", "cols"))
        s["steps"] += 1
        s["first_moment"].lerp_(grad, 1 - beta1)
        s["second_moment"].lerp_(self.into(grad, left, right) ** 2, 1 - beta2)
        first = self.into(s["first_moment"], left, right) / (1 - beta1 ** s["steps"])
        ratio = first / ((s["second_moment"] / (1 - beta2 ** s["steps"])).sqrt() + 1e-8)
        ratio = ratio if left is None else left @ ratio
        return ratio if right is None else ratio @ right.T

    @staticmethod
    def into(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
        matrix = matrix if left is None else left.T @ matrix
        return matrix if right is None else matrix @ right

    @staticmethod
    def basis(average: Tensor, old: Tensor) -> Tensor:
        return torch.linalg.qr(average @ old + 1e-3 * average.diagonal().mean() * old)[0].contiguous()

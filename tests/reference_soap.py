"""SOAP on full matrices in one process (arXiv:2409.11321, Algorithm 3), written from the paper.

With a ridge on the averages, first bases from the first gradient, and turns for the refreshes of matrices.
"""

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor


class ReferenceSoap:
    """Matrices by name ("parameter#index"), updated in place. A step leaves out matrices without a gradient."""

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

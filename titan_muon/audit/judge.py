"""Judges the last step of a parameter from weights and gradients, without knowledge of the optimizer's code.

Muon's step is `before - after = decay * before + U f(S) V'`, with `M = U S V'` a weighted sum of gradients. For D, the
change without the decay, `D' M` and `D M'` are then symmetric. Antisymmetric parts are linear in the weights of the
gradients, so products with a few random vectors have the misfit of any momentum. Singular values are computed once, of
D and of the best sum: a flat f is Newton-Schulz, and an f proportional to S is SGD.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .ranks import Digest

FITS, DIFFERS, LINEAR, VARIANT = 0.05, 0.5, 0.1, 0.4
"""Misfit of an exact explanation, ratio of misfits that decides between two explanations, residual of SGD and Adam, and
misfit up to which an update is a variant of Muon. docs/results/audit.md has the cases that set them."""
MOMENTUM = "momentum", "mu", "momentum_beta", "muon_momentum", "beta"
PROBES, WHOLE = 32, (1, 1)
HEADS = tuple(split for n in (2, 3, 4, 8, 16) for split in ((n, 1), (1, n)))


@dataclass
class Seen:
    """A parameter on a rank, with digests, hyperparameters and pieces of tensors by step.

    `digests` also has the weight after the last step. `loaded`: digests of weight and states after a load. `passes`:
    backward passes since the last step. `round`: of the last step, among all optimizers' steps. `shards`: numbers of
    row and column blocks of the layout. `resumed`: an optimizer had states before the first step. `turns`: other
    optimizers stepped between the backward passes of a step. `tensors`: empty unless `sampled`.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sampled: bool = False
    optimizer: str = ""
    place: str = ""
    passes: int = 0
    round: int = 0
    shards: tuple[tuple[int, int], ...] = ()
    undecided: str = ""
    resumed: bool = False
    turns: bool = False
    loaded: dict[str, Digest] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[Any, Tensor] = field(default_factory=dict)

    def stated(self, *keys: str, step: int = -1) -> float | None:
        """The first number that the group of a step has under one of the keys."""
        group = self.groups[step] if self.groups else {}
        return next((float(x) for key in keys if isinstance(x := group.get(key), float | int)), None)


@dataclass(frozen=True)
class Verdict:
    """Explanation of a step. `wrong` has codes with evidence, and "undecided" with a reason.

    `weights`: of the gradients, and last of the weight, in the sum that was orthogonalized.
    """

    kind: str
    error: float = 0.0
    momentum: float | None = None
    nesterov: bool = False
    decay: float = 0.0
    noise: float = 0.0
    scale: float = 0.0
    blocks: tuple[int, int] = WHOLE
    wrong: tuple[tuple[str, str], ...] = ()
    weights: Sequence[float] = ()


class Step:
    """The last step of a parameter, from whole float32 tensors on the CPU. A convolution is one matrix.

    A step may orthogonalize a sum of `columns`: gradients, and last the weight. `steps` has the numbers of the
    gradients' steps, and -1 for a momentum of `start`, the states before the first step. `passes`: backward passes of
    the last step. `faults`: of the gradients.
    """

    def __init__(self, seen: Seen, tensors: Mapping[Any, Tensor]) -> None:
        if len(seen.shape) == 3:  # The matrix with the largest last gradient stands for a stack.
            gradients = [x for key, x in tensors.items() if key[0] in ("gradient", "pass")] or [tensors["before"]]
            index = int(gradients[-1].flatten(1).norm(dim=1).argmax())
            tensors = {key: x[index] for key, x in tensors.items()}
        tensors = {key: x.flatten(1) if x.ndim > 2 else x for key, x in tensors.items()}
        self.seen, self.before, self.moved = seen, tensors["before"], tensors["before"] - tensors["after"]
        self.start = {key[1]: x for key, x in tensors.items() if key[0] == "start"}
        columns = [(-1, x) for key, x in self.start.items() if "sq" not in key and x.any()][:1]
        faults, previous = list[str](), torch.zeros_like(self.before)
        for step in range(len(seen.groups)):
            passes = [x for key, x in tensors.items() if key[:2] == ("pass", step)]
            total = tensors.get(("gradient", step))
            if passes and total is not None:
                lost = f"the gradient has only the last of {len(passes)} backward passes"
                every = torch.stack(passes).sum(0)
                sums = {"": every, "the gradient has those of earlier steps, too": every + previous, lost: passes[-1]}
                fits = {text: regress(total, [x]) for text, x in sums.items() if text != lost or not seen.turns}
                # Clipping of the norm scales all passes. Clipping of values, or a hook, changes each element.
                text = "" if fits[""][1] < 0.15 else min(fits, key=lambda text: fits[text][1])
                (scale,), misfit = fits[text]
                faults.append(text if misfit < FITS else "")
                passes, previous = [x * scale for x in passes] if misfit < 0.15 and not text else [total], total
            columns += [(step, x) for x in passes or ([] if total is None else [total])]
        self.steps, self.columns = [step for step, _ in columns], [*(x for _, x in columns), self.before]
        self.passes = self.steps.count(len(seen.groups) - 1)
        # A step that was skipped drops the passes of a single step.
        self.faults = (("zero_grad", faults[-1]),) if all(faults[1:]) and len(faults) > 1 else ()

    def judge(self) -> Verdict:
        """The explanation of the step."""
        rounding = 0.3 * torch.finfo(self.seen.dtype).eps * float(self.before.norm() / self.moved.norm().clamp(1e-30))
        newest = self.columns[-2] if self.steps else torch.zeros_like(self.before)
        if not self.moved.any():
            return Verdict("still")
        reasons = {
            "weights or gradients are not finite": not all(x.isfinite().all() for x in (self.moved, *self.columns)),
            "the step is smaller than the rounding of the weights": rounding > 0.5,
            "no gradient was seen": not newest.any(),
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), ""):
            return _undecided(reason)
        matrix = self.moved.ndim == 2 and min(self.moved.shape) > 1
        weights, error = regress(self.moved, self.columns)
        if (adam := self._adam()).error < LINEAR + rounding:
            verdict = adam
        elif error < LINEAR + rounding and self.moved.numel() > 8 * len(weights):
            sizes = torch.linalg.svdvals(newest) if matrix else torch.zeros(1)
            flat = "the gradient of the step has equal singular values, as after Newton-Schulz in a hook"
            even = float(sizes.median()) > 0.6 * float(sizes.max())
            scale = math.copysign(max(map(abs, weights[:-1])), sum(weights[:-1]))
            verdict = _undecided(flat, error) if even else Verdict("sgd", error, scale=scale)
        elif not matrix:
            verdict = _undecided("neither Adam nor SGD explains the step", error)
        else:
            verdict = self._muon(FITS + rounding)
        return replace(verdict, wrong=self.faults + verdict.wrong)

    def _muon(self, fits: float) -> Verdict:
        rows, cols = self.before.shape
        claims = sorted(self._fit(self._claims(), WHOLE), key=lambda claim: claim.error)
        best, tried = next(claim for claim in claims if not claim.wrong), claims[:1]
        for split in (*self.seen.shards, *HEADS) if best.error > 0.3 * fits else ():
            if rows % split[0] == cols % split[1] == 0 and rows > split[0] and cols > split[1]:
                tried += self._fit([replace(best, blocks=split)], split)
        for other in tried:
            best = other if other.error < min(DIFFERS * best.error, 2 * fits) else best
        direction = self._sum(best.weights)
        if best.error > 0.3 * fits and self.passes > 1 and min(rows, cols) <= 2048:
            once = self._regressed(best, _newton_schulz(direction))
            each = min(self._each_pass(), key=lambda claim: claim.error)
            if each.error < DIFFERS * once.error:
                return replace(each, scale=each.scale * self.passes)
        scale, bent, twice = _spectral(self.moved - best.decay * self.before, direction, best.blocks)
        # The singular values of other coefficients differ by 0.25.
        wrong, error = best.wrong, math.hypot(best.error, max(0.0, bent - 0.25))
        if error > VARIANT:
            return _undecided(f"no sum of the seen gradients explains it (error {error:.2f})", error)
        if twice and error < 2 * fits:
            wrong += (("twice", "Newton-Schulz ran twice, or with twice the steps"),)
        if best.blocks in self.seen.shards:
            text = f"Newton-Schulz ran on each of {math.prod(best.blocks)} shards, not on the matrix"
            wrong += (("per-shard", text),)
        return replace(best, error=error, scale=scale, wrong=wrong, noise=best.noise / (PROBES * (rows + cols)) ** 0.5)

    def _claims(self) -> Iterator[Verdict]:
        """Sums by the hyperparameters that groups state, or by any where they state none, with one fault or without."""
        stated, said = self.seen.stated(*MOMENTUM), self.seen.groups[-1].get("nesterov")
        # Without the momentum before the first step of a resumed run, a fault would only be the best of wrong sums.
        faults, kinds = 0 if self.seen.resumed and self.steps[0] >= 0 else 1, {"": "", "average": ""}
        if self.seen.stated("weight_decay"):
            kinds["coupled-decay"] = "weight decay is added to the gradient before Newton-Schulz"
        if self.passes > 1:
            kinds["micro-momentum"] = f"momentum advances in each of {self.passes} backward passes of a step"
        momenta = (None, *(i / 100 for i in range(100)))
        for value, nesterov, (kind, text) in product(momenta, (True, False), kinds.items()):
            momentum = stated if value is None else value
            other = stated not in (None, momentum) and f"momentum is {value}, and the group says {stated:g}"
            turned = said not in (None, nesterov) and not text and f"nesterov is {nesterov}, and the group says {said}"
            wrong = [(code, why) for code, why in ((kind, text), ("momentum", other), ("nesterov", turned)) if why]
            if len(wrong) <= faults:
                weights = self._weights(value, nesterov, kind)
                yield Verdict("muon", 0.0, momentum, nesterov, wrong=tuple(wrong), weights=weights)

    def _weights(self, momentum: float | None, nesterov: bool, kind: str = "", end: int | None = None) -> list[float]:
        """Weights of the columns in the direction after the gradients until `end`.

        `momentum`: in place of the stated ones. Of `kind` "average", momentum gives gradients the weight 1 - momentum.
        "micro-momentum" advances in each pass.
        """
        buffer, newest, turn, m = [0.0] * len(self.columns), [0.0] * len(self.columns), None, 0.0
        for i, step in enumerate(self.steps[:end]):
            m = (self.seen.stated(*MOMENTUM, step=max(0, step)) or 0.0) if momentum is None else momentum
            if step != turn or kind == "micro-momentum":
                buffer, newest, turn = [m * x for x in buffer], [0.0] * len(buffer), step
            buffer[i] = newest[i] = 1 - m if kind == "average" and step >= 0 else 1.0
        total = [m * x + y for x, y in zip(buffer, newest, strict=True)] if nesterov else buffer
        if kind == "coupled-decay":
            total[-1] = (self.seen.stated("weight_decay") or 0.0) * sum(total) / max(1, self.passes)
        return total

    def _sum(self, weights: Sequence[float]) -> Tensor:
        return torch.stack([weight * x for weight, x in zip(weights, self.columns, strict=True) if weight]).sum(0)

    def _fit(self, claims: Iterable[Verdict], split: tuple[int, int]) -> Iterator[Verdict]:
        """The claims with the decay of the smallest misfit, and with their relative antisymmetric part as the error.

        The parts are `x' m - m' x` and `x m' - m x'` of each column m, times random vectors, for x the change and the
        weight. `even` has the sums in place of the differences.
        """

        def parts(x: Tensor, sign: int) -> Tensor:
            a, draw, rows = _blocks(x, split), torch.Generator().manual_seed(0), list[Tensor]()
            probes = [torch.randn(n, min(PROBES, n), generator=draw, device="cpu") for n in (a.shape[2], a.shape[1])]
            for b in (_blocks(m, split) for m in self.columns):
                pairs = zip((a, a.mT), (b, b.mT), probes, strict=True)
                rows.append(torch.cat([(y.mT @ (z @ p) + sign * z.mT @ (y @ p)).flatten() for y, z, p in pairs]))
            return torch.stack(rows).double()

        moved, own, even = parts(self.moved, -1), parts(self.before, -1), parts(self.moved, 1)
        products = moved @ moved.T, moved @ own.T, own @ own.T, even @ even.T
        for claim in claims:
            weights = torch.tensor(claim.weights, dtype=torch.float64, device="cpu")
            change, both, weight, symmetric = (float(weights @ x @ weights) for x in products)
            decay = 0.0 if claim.weights[-1] else both / max(weight, 1e-300)
            odd = max(0.0, change - decay * both)
            error, noise = (odd / max(odd + symmetric, 1e-300)) ** 0.5, (odd / max(weight, 1e-300)) ** 0.5
            yield replace(claim, error=error, decay=decay, noise=noise)

    def _regressed(self, verdict: Verdict, update: Tensor) -> Verdict:
        """The verdict with the decay, scale and error of an update."""
        (decay, scale), error = regress(self.moved, [self.before, update])
        return replace(verdict, error=error, decay=decay, scale=scale)

    def _adam(self) -> Verdict:
        """AdamW with the stated betas, or torch's."""
        b1, b2 = self.seen.groups[-1].get("betas", (0.9, 0.999))
        mean = square = zero = torch.zeros_like(self.before)
        mean, square = self.start.get("exp_avg", zero), self.start.get("exp_avg_sq", zero)
        for step in range(len(self.seen.groups)):
            gradient = sum((x for x, own in zip(self.columns, self.steps, strict=False) if own == step), zero)
            mean, square = b1 * mean + (1 - b1) * gradient, b2 * square + (1 - b2) * gradient**2
        age = len(self.seen.groups) + (self.seen.stated("step", step=0) or 0.0)
        root = (square / (1 - b2**age)).sqrt() + float(self.seen.groups[-1].get("eps", 1e-8))
        return self._regressed(Verdict("adam", momentum=b1), mean / (1 - b1**age) / root)

    def _each_pass(self) -> Iterator[Verdict]:
        """Sums of Newton-Schulz of every backward pass of the last step."""
        text = f"Newton-Schulz ran in each of {self.passes} backward passes of a step, and the results were added"
        stated = self.seen.stated(*MOMENTUM)
        for m, nesterov in product((0.0, 0.95 if stated is None else stated), (False, True)):
            ends = range(len(self.steps) - self.passes + 1, len(self.steps) + 1)
            updates = (_newton_schulz(self._sum(self._weights(m, nesterov, "micro-momentum", end))) for end in ends)
            claim = Verdict("muon", momentum=m, nesterov=nesterov, wrong=(("per-micro-batch", text),))
            yield self._regressed(claim, torch.stack([*updates]).sum(0))


def _undecided(reason: str, error: float = 0.0) -> Verdict:
    return Verdict("undecided", error, wrong=(("undecided", reason),))


def _blocks(x: Tensor, split: tuple[int, int]) -> Tensor:
    """Blocks of a matrix, (m, n) -> (r * c, m / r, n / c)."""
    (r, c), (m, n) = split, x.shape
    return x.reshape(r, m // r, c, n // c).transpose(1, 2).flatten(0, 1)


def _newton_schulz(x: Tensor) -> Tensor:
    """Newton-Schulz with Muon's usual coefficients, of a matrix, or of a vector of singular values."""
    if x.ndim == 2 and x.shape[0] > x.shape[1]:
        return _newton_schulz(x.T).T
    times, x = torch.mul if x.ndim == 1 else torch.matmul, x / x.norm().clamp(min=1e-30)
    for _ in range(5):
        gram = times(x, x.t())
        x = 3.4445 * x + times(-4.7750 * gram + 2.0315 * times(gram, gram), x)
    return x


def _spectral(update: Tensor, direction: Tensor, split: tuple[int, int]) -> tuple[float, float, bool]:
    """Scale of an update, the misfit of its singular values, and whether Newton-Schulz ran twice on the direction."""
    found, given = (torch.linalg.svdvals(_blocks(x, split)).double() for x in (update, direction))
    once = torch.stack([_newton_schulz(x) for x in given])
    curves = torch.ones_like(given), once, torch.stack([_newton_schulz(x) for x in once])
    flat, curved, twice = (regress(found, [x.sort(descending=True).values]) for x in curves)
    best = min(flat, curved, key=lambda fit: fit[1])
    again = twice[1] < min(FITS, best[1] / 3)
    (scale,), bent = twice if again else best
    return math.copysign(scale, float((update * direction).sum())), bent, again


def regress(y: Tensor, columns: Sequence[Tensor]) -> tuple[list[float], float]:
    """Coefficients and relative residual of y on the columns, from at most 2^20 of their elements."""
    every = -(-y.numel() // 2**20)
    x, goal = (torch.stack([c.flatten()[::every] for c in z], 1).double() for z in (columns, [y]))
    sizes = x.norm(dim=0).clamp(min=1e-30)
    x /= sizes
    gram = x.T @ x + 1e-12 * torch.eye(len(sizes), dtype=x.dtype, device="cpu")
    solution = torch.linalg.solve(gram, x.T @ goal)
    error = (goal - x @ solution).norm() / goal.norm().clamp(min=1e-30)
    return (solution[:, 0] / sizes).tolist(), float(error)

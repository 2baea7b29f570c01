"""Judges the last step of a parameter from weights and gradients, without knowledge of the optimizer's code.

Muon's step is `before - after = decay * before + U f(S) V'`, with `M = U S V'` a weighted sum of gradients. For D, the
change without the decay, `D' M` and `D M'` are then symmetric. Antisymmetric parts are linear in the weights of the
gradients, so products with a few random vectors have the misfit of any momentum. Singular values are computed once, of
D and of the best sum: a flat f is Newton-Schulz, and an f proportional to S is SGD.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

FITS, DIFFERS, LINEAR, VARIANT = 0.05, 0.5, 0.1, 0.4
"""Misfit of an exact explanation, ratio of misfits that decides between two explanations, residual of SGD and Adam, and
misfit up to which an update is a variant of Muon. docs/results/audit.md has the cases that set them."""
MOMENTUM = "momentum", "mu", "momentum_beta", "muon_momentum", "beta"
PROBES, MOMENTA, WHOLE = 32, (None, *(i / 100 for i in range(100))), (1, 1)
HEADS = tuple(split for n in (2, 3, 4, 8, 16) for split in ((n, 1), (1, n)))


@dataclass
class Seen:
    """A parameter on a rank, with digests, hyperparameters and pieces of tensors by step.

    `digests` also has the weight after the last step. `begun`: all backward passes before the last step; `passes`:
    those since. `shards`: numbers of row and column blocks of the layout. `resumed`: an optimizer had states before the
    first step, and `age` is their number of steps. `turns`: another optimizer stepped between the backward passes of a
    step. `tensors`: empty unless `sampled`.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sampled: bool = False
    optimizer: str = ""
    place: str = ""
    passes: int = 0
    begun: int = 0
    shards: tuple[tuple[int, int], ...] = ()
    undecided: str = ""
    resumed: bool = False
    age: float = 0.0
    turns: bool = False
    digests: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[Any, Tensor] = field(default_factory=dict)

    def stated(self, *keys: str, step: int = -1) -> float | None:
        """The first number that the group of a step has under one of the keys."""
        group = self.groups[step] if self.groups else {}
        return next((float(x) for key in keys if isinstance(x := group.get(key), float | int)), None)


@dataclass(frozen=True)
class Evidence:
    """Whole float32 matrices on the CPU. A step may orthogonalize a sum of `columns`: gradients, and last the weight.

    `steps` has the numbers of the gradients' steps, and -1 for a momentum of `start`, the states before the first step.
    `passes`: backward passes of the last step. `wrong`: faults of gradients, by code.
    """

    seen: Seen
    before: Tensor
    moved: Tensor
    columns: Sequence[Tensor]
    steps: Sequence[int]
    start: Mapping[str, Tensor]
    passes: int
    wrong: Mapping[str, str]


@dataclass(frozen=True)
class Verdict:
    """Explanation of a step. `wrong` has codes with evidence, and `undecided` the reason without an explanation.

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
    undecided: str = ""
    weights: Sequence[float] = ()


def gather_evidence(seen: Seen, tensors: Mapping[Any, Tensor]) -> Evidence:
    """The matrices of a parameter from its whole tensors.

    Of a stack of matrices, the one with the largest last gradient stands for all. A convolution is one matrix.
    """
    if len(seen.shape) > 3:
        tensors = {key: x.flatten(1) for key, x in tensors.items()}
    if len(seen.shape) == 3:
        newest = [x for key, x in tensors.items() if key[0] in ("gradient", "pass")] or [tensors["before"]]
        index = int(newest[-1].flatten(1).norm(dim=1).argmax())
        tensors = {key: x[index] for key, x in tensors.items()}
    start, faults = {key[1]: x for key, x in tensors.items() if key[0] == "start"}, list[str]()
    gradients = [(-1, x) for key, x in start.items() if "sq" not in key and x.any()][:1]
    previous: Any = 0
    for step in range(len(seen.groups)):
        passes = [x for key, x in tensors.items() if key[:2] == ("pass", step)]
        total = tensors.get(("gradient", step))
        if passes and total is not None:
            together = torch.stack(passes).sum(0)
            lost = f"the gradient has only the last of {len(passes)} backward passes"
            sums = {"": together, "the gradient has those of earlier steps, too": together + previous, lost: passes[-1]}
            fits = {text: regress(total, [x]) for text, x in sums.items() if text != lost or not seen.turns}
            # Clipping of the norm scales all passes. Clipping of values, or a hook, changes each element.
            text = "" if fits[""][1] < 0.15 else min(fits, key=lambda text: fits[text][1])
            (scale,), misfit = fits[text]
            faults.append(text if misfit < FITS else "")
            passes, previous = [x * scale for x in passes] if misfit < 0.15 and not text else [total], total
        gradients += [(step, x) for x in passes or ([] if total is None else [total])]
    before, steps = tensors["before"], [step for step, _ in gradients]
    columns, count = [*(x for _, x in gradients), before], steps.count(len(seen.groups) - 1)
    # A step that was skipped drops the passes of a single step.
    wrong = {"zero_grad": faults[-1]} if all(faults[1:]) and len(faults) > 1 else {}
    return Evidence(seen, before, before - tensors["after"], columns, steps, start, count, wrong)


def judge(e: Evidence) -> Verdict:
    """The explanation of the last step."""
    rounding = 0.3 * torch.finfo(e.seen.dtype).eps * float(e.before.norm() / e.moved.norm().clamp(min=1e-30))
    newest = e.columns[-2] if e.steps else torch.zeros_like(e.before)
    if not e.moved.any():
        return Verdict("still")
    reasons = {
        "weights or gradients are not finite": not all(x.isfinite().all() for x in (e.moved, *e.columns)),
        "the step is smaller than the rounding of the weights": rounding > 0.5,
        "no gradient was seen": not newest.any(),
    }
    if any(reasons.values()):
        return Verdict("undecided", undecided=next(reason for reason, holds in reasons.items() if holds))
    if (adam := _regressed(e, *_adam(e))).error < LINEAR + rounding:
        return adam
    weights, error = regress(e.moved, e.columns)
    matrix = e.moved.ndim == 2 and min(e.moved.shape) > 1
    if error < LINEAR + rounding and e.moved.numel() > 8 * len(weights):
        sizes = torch.linalg.svdvals(newest) if matrix else torch.zeros(1)
        flat = "the gradient of the step has equal singular values, as after Newton-Schulz in a hook"
        even = float(sizes.median()) > 0.6 * float(sizes.max())
        scale = math.copysign(max(map(abs, weights[:-1])), sum(weights[:-1]))
        return Verdict("sgd", error, scale=scale, undecided=flat if even else "")
    if not matrix:
        return Verdict("undecided", error, undecided="neither Adam nor SGD explains the step")
    return _muon(e, FITS + rounding)


def _muon(e: Evidence, fits: float) -> Verdict:
    (rows, cols), whole = e.before.shape, _products(e, WHOLE)
    claims = sorted((_fitted(claim, whole) for claim in _claims(e)), key=lambda claim: claim.error)
    best, tried = next(claim for claim in claims if not claim.wrong), claims[:1]
    for split in (*e.seen.shards, *HEADS) if best.error > 0.3 * fits else ():
        if rows % split[0] == cols % split[1] == 0 and rows > split[0] and cols > split[1]:
            tried.append(replace(_fitted(best, _products(e, split)), blocks=split))
    for other in tried:
        best = other if other.error < min(DIFFERS * best.error, 2 * fits) else best
    direction = _sum(e, best.weights)
    if best.error > 0.3 * fits and e.passes > 1 and min(rows, cols) <= 2048:
        once = _regressed(e, best, _newton_schulz(direction))
        each = min((_regressed(e, *update) for update in _each_pass(e)), key=lambda claim: claim.error)
        if each.error < DIFFERS * once.error:
            return replace(each, scale=each.scale * e.passes)
    scale, bent, twice = _spectral(e.moved - best.decay * e.before, direction, best.blocks)
    # The singular values of other coefficients differ by 0.25.
    wrong, error = best.wrong, math.hypot(best.error, max(0.0, bent - 0.25))
    if error > VARIANT:
        return Verdict("undecided", error, undecided=f"no sum of the seen gradients explains it (error {error:.2f})")
    if twice and error < 2 * fits:
        wrong += (("twice", "Newton-Schulz ran twice, or with twice the steps"),)
    if best.blocks in e.seen.shards:
        wrong += (("per-shard", f"Newton-Schulz ran on each of {math.prod(best.blocks)} shards, not on the matrix"),)
    return replace(best, error=error, scale=scale, wrong=wrong, noise=best.noise / (PROBES * (rows + cols)) ** 0.5)


def _claims(e: Evidence) -> Iterator[Verdict]:
    """Sums by the hyperparameters that groups state, or by any where they state none, with one fault or without."""
    stated, said = e.seen.stated(*MOMENTUM), e.seen.groups[-1].get("nesterov")
    # Without the momentum before the first step of a resumed run, a fault would only be the best of wrong sums.
    faults, kinds = 0 if e.seen.resumed and e.steps[0] >= 0 else 1, {"": "", "average": ""}
    if e.seen.stated("weight_decay"):
        kinds["coupled-decay"] = "weight decay is added to the gradient before Newton-Schulz"
    if e.passes > 1:
        kinds["micro-momentum"] = f"momentum advances in each of {e.passes} backward passes of a step"
    for value, nesterov, (kind, text) in product(MOMENTA, (True, False), kinds.items()):
        momentum = stated if value is None else value
        other = stated not in (None, momentum) and f"momentum is {value}, and the group says {stated:g}"
        turned = said not in (None, nesterov) and not text and f"nesterov is {nesterov}, and the group says {said}"
        wrong = [(code, why) for code, why in ((kind, text), ("momentum", other), ("nesterov", turned)) if why]
        if len(wrong) <= faults:
            weights = _weights(e, value, nesterov, kind)
            yield Verdict("muon", 0.0, momentum, nesterov, wrong=tuple(wrong), weights=weights)


def _weights(e: Evidence, momentum: float | None, nesterov: bool, kind: str = "") -> list[float]:
    """Weights of the columns in the direction of the last step. `momentum`: in place of those that the groups state.

    Of `kind` "average", momentum gives gradients the weight 1 - momentum. "micro-momentum" advances in each pass.
    """
    buffer, newest, turn, m = [0.0] * len(e.columns), [0.0] * len(e.columns), None, 0.0
    for i, step in enumerate(e.steps):
        m = (e.seen.stated(*MOMENTUM, step=max(0, step)) or 0.0) if momentum is None else momentum
        if step != turn or kind == "micro-momentum":
            buffer, newest, turn = [m * x for x in buffer], [0.0] * len(buffer), step
        buffer[i] = newest[i] = 1 - m if kind == "average" and step >= 0 else 1.0
    total = [m * x + y for x, y in zip(buffer, newest, strict=True)] if nesterov else buffer
    if kind == "coupled-decay":
        total[-1] = (e.seen.stated("weight_decay") or 0.0) * sum(total) / max(1, e.passes)
    return total


def _sum(e: Evidence, weights: Sequence[float]) -> Tensor:
    return torch.stack([weight * x for weight, x in zip(weights, e.columns, strict=True) if weight]).sum(0)


def _fitted(claim: Verdict, products: Sequence[Tensor]) -> Verdict:
    """The claim with the decay of the smallest misfit, and with its relative antisymmetric part as the error."""
    weights = torch.tensor(claim.weights, dtype=torch.float64, device="cpu")
    moved, both, own, even = (float(weights @ x @ weights) for x in products)
    decay = 0.0 if claim.weights[-1] else both / max(own, 1e-300)
    odd = max(0.0, moved - decay * both)
    return replace(
        claim, error=(odd / max(odd + even, 1e-300)) ** 0.5, decay=decay, noise=(odd / max(own, 1e-300)) ** 0.5
    )


def _products(e: Evidence, split: tuple[int, int]) -> list[Tensor]:
    """Inner products between columns m of `x' m - m' x` and `x m' - m x'`, times random vectors.

    They are those of the change with itself, with the weight, of the weight with itself, and of sums for the change.
    """

    def rows_of(x: Tensor, sign: int) -> Iterator[Tensor]:
        for m in e.columns:
            draw, parts = torch.Generator().manual_seed(0), list[Tensor]()
            for a, b in zip(_blocks(x, split), _blocks(m, split), strict=True):
                for y, z in ((a, b), (a.T, b.T)):
                    probe = torch.randn(y.shape[1], min(PROBES, y.shape[1]), generator=draw, device="cpu")
                    parts.append((y.T @ (z @ probe) + sign * z.T @ (y @ probe)).flatten())
            yield torch.cat(parts).double()

    moved, own, even = (torch.stack([*rows_of(*x)]) for x in ((e.moved, -1), (e.before, -1), (e.moved, 1)))
    return [moved @ moved.T, moved @ own.T, own @ own.T, even @ even.T]


def _blocks(x: Tensor, split: tuple[int, int]) -> list[Tensor]:
    return [block for row in x.chunk(split[0], 0) for block in row.chunk(split[1], 1)]


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
    found, given = ([torch.linalg.svdvals(x).double() for x in _blocks(y, split)] for y in (update, direction))
    once = [_newton_schulz(s) for s in given]
    curves = [torch.ones_like(s) for s in given], once, [_newton_schulz(s) for s in once]
    flat, curved, twice = (
        regress(torch.cat(found), [torch.cat([x.sort(descending=True).values for x in curve])]) for curve in curves
    )
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


def _regressed(e: Evidence, verdict: Verdict, update: Tensor) -> Verdict:
    """The verdict with the decay, scale and error of an update."""
    (decay, scale), error = regress(e.moved, [e.before, update])
    return replace(verdict, error=error, decay=decay, scale=scale)


def _adam(e: Evidence) -> tuple[Verdict, Tensor]:
    """The update of AdamW, with the stated betas or torch's."""
    (b1, b2), steps = e.seen.groups[-1].get("betas", (0.9, 0.999)), len(e.seen.groups)
    mean, square = (e.start.get(name, torch.zeros_like(e.before)) for name in ("exp_avg", "exp_avg_sq"))
    for i in range(steps):
        gradient = sum(
            (x for x, step in zip(e.columns, e.steps, strict=False) if step == i), torch.zeros_like(e.before)
        )
        mean, square = b1 * mean + (1 - b1) * gradient, b2 * square + (1 - b2) * gradient**2
    root = (square / (1 - b2 ** (steps + e.seen.age))).sqrt() + float(e.seen.groups[-1].get("eps", 1e-8))
    return Verdict("adam", momentum=b1), mean / (1 - b1 ** (steps + e.seen.age)) / root


def _each_pass(e: Evidence) -> Iterator[tuple[Verdict, Tensor]]:
    """Sums of Newton-Schulz of every backward pass of the last step."""
    text = f"Newton-Schulz ran in each of {e.passes} backward passes of a step, and the results were added"
    stated = e.seen.stated(*MOMENTUM)
    for m, nesterov in product((0.0, 0.95 if stated is None else stated), (False, True)):
        total = torch.zeros_like(e.before)
        for count in range(len(e.steps) - e.passes + 1, len(e.steps) + 1):
            weights = _weights(replace(e, steps=e.steps[:count]), m, nesterov, "micro-momentum")
            total += _newton_schulz(_sum(e, weights))
        yield Verdict("muon", momentum=m, nesterov=nesterov, wrong=(("per-micro-batch", text),)), total

"""Judges one step of one parameter from weights and gradients, without knowledge of the optimizer's code.

A step of Muon is `before - after = decay * before + U f(S) V'`, where `U S V'` is a weighted sum of gradients. Then
`D' M` and `D M'` are symmetric, for D the change without the decay and M the sum. Their antisymmetric parts are linear
in the weights of the gradients, so one small quadratic form tells the misfit of any momentum, at the cost of products
with a few random vectors. The singular values are computed once for the chosen sum: a flat f is Newton-Schulz, and an f
proportional to S is SGD.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

PROBES = 32
FITS, DIFFERS, SGD, ADAM, VARIANT = 0.05, 0.5, 0.1, 0.1, 0.4
"""Thresholds: misfit of an exact explanation, ratio of misfits that decides between two, residuals of SGD and of Adam,
and misfit up to which an update is a variant of Muon. docs/results/audit.md has the cases that set them."""
QUINTIC = ((3.4445, -4.7750, 2.0315),) * 5
# Amsel et al., arXiv:2505.16932, the first five steps.
POLAR_EXPRESS = (
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
)
MOMENTA = tuple(i / 200 for i in range(200))


@dataclass(frozen=True)
class Gradient:
    """The gradient of one backward pass, or of all passes of a step."""

    step: int
    value: Tensor


@dataclass(frozen=True)
class Evidence:
    """Observations of a parameter: whole float32 tensors on the CPU. `groups` has the hyperparameters of each step."""

    before: Tensor
    after: Tensor
    gradients: Sequence[Gradient]
    groups: Sequence[Mapping[str, Any]]
    start: Mapping[str, Tensor] = field(default_factory=dict)
    epsilon: float = 0.0
    """Relative rounding of the stored weight."""
    shards: tuple[tuple[int, int], ...] = ()
    """Numbers of row and column blocks of the parameter's layout on the ranks."""

    def first(self) -> Evidence:
        """The matrix of a stack with the largest gradient, or a convolution as a matrix; otherwise unchanged."""
        if self.before.ndim == 3:
            sizes = sum(g.value.flatten(1).norm(dim=1) for g in self.gradients)
            return self._mapped(int(torch.as_tensor(sizes).argmax()).__index__())
        return self._mapped(None) if self.before.ndim > 3 else self

    def _mapped(self, index: int | None) -> Evidence:
        def cut(x: Tensor) -> Tensor:
            return x if x.ndim < 3 else x.flatten(1) if index is None else x[index]

        gradients = [replace(g, value=cut(g.value)) for g in self.gradients]
        start = {name: cut(x) for name, x in self.start.items()}
        return replace(self, before=cut(self.before), after=cut(self.after), gradients=gradients, start=start)


@dataclass(frozen=True)
class Verdict:
    """Explanation of a step. `wrong` has codes with evidence, and `undecided` the reason without an explanation."""

    kind: str
    error: float = 0.0
    momentum: float | None = None
    nesterov: bool | None = None
    decay: float = 0.0
    noise: float = 0.0
    scale: float = 0.0
    spectrum: str = ""
    blocks: tuple[int, int] = (1, 1)
    wrong: tuple[tuple[str, str], ...] = ()
    undecided: str = ""


@dataclass(frozen=True)
class Claim:
    """Weights of the gradients, and of the weight itself, in a sum that the step may have orthogonalized."""

    weights: Tensor
    momentum: float | None
    nesterov: bool
    code: str = ""
    text: str = ""
    own: float = 0.0


def judge(evidence: Evidence, alternatives: bool = True) -> Verdict:
    """The explanation of the last step. Without `alternatives` only the stated hyperparameters are tried."""
    e = evidence.first()
    moved = e.before - e.after
    if not moved.any():
        return Verdict("still")
    rounding = 0.3 * e.epsilon * float(e.before.norm() / moved.norm())
    if rounding > 0.5:
        return Verdict("undecided", undecided="the step is smaller than the rounding of the weights")
    if not any(bool(g.value.any()) for g in e.gradients):
        return Verdict("undecided", undecided="no gradient was seen")
    adam = _adam(e, moved)
    if adam.error < ADAM + rounding:
        return adam
    columns = [e.before, *(g.value for g in e.gradients), *_momenta_of(e.start)]
    linear, error = _regress(moved, columns)
    matrix = moved.ndim == 2 and min(moved.shape) > 1
    if error < SGD + rounding and moved.numel() > 8 * len(columns):
        return Verdict("sgd", error, decay=linear[0], scale=max(map(abs, linear[1:])))
    if not matrix:
        return Verdict("undecided", error, undecided="neither Adam nor SGD explains the step")
    return _muon(e, moved, rounding, alternatives)


def _muon(e: Evidence, moved: Tensor, rounding: float, alternatives: bool) -> Verdict:
    form, fits = _Form(e, moved), FITS + rounding
    plain = min(_stated(e), key=lambda c: form.misfit(c)[0])
    best, misfit = plain, form.misfit(plain)[0]
    blocks, apart = (1, 1), None
    noisy = misfit > 0.3 * FITS
    if alternatives and len(e.groups) > 1:
        other = min(_others(e, plain), key=lambda c: form.misfit(c)[0])
        if (error := form.misfit(other)[0]) < DIFFERS * misfit and error < 2 * fits:
            best, misfit = other, error
    if alternatives and noisy:
        whole = _combined(e, form, plain)
        for split in _splits(e):
            error, decay = _misfit_in_blocks(moved, e.before, whole, split)
            if error < min(DIFFERS * misfit, 2 * fits):
                best, misfit, blocks, apart = plain, error, split, decay
    decay, noise = form.misfit(best)[1:]
    decay = decay if apart is None else apart
    verdict = _spectral(e, moved - decay * e.before, _combined(e, form, best), blocks)
    if alternatives and verdict.error > fits and _each_pass(e, moved).error < DIFFERS * verdict.error:
        return _each_pass(e, moved)
    wrong = [(best.code, best.text)] if best.code else []
    if blocks in e.shards:
        wrong = [("per-shard", f"Newton-Schulz ran on each of {math.prod(blocks)} shards and not on the whole matrix")]
    verdict = replace(verdict, momentum=best.momentum, nesterov=best.nesterov, decay=decay, noise=noise, blocks=blocks)
    if max(misfit, verdict.error) > VARIANT + rounding:
        reason = f"no sum of the seen gradients explains the step (error {max(misfit, verdict.error):.2f})"
        return replace(verdict, kind="undecided", error=max(misfit, verdict.error), undecided=reason)
    return replace(verdict, wrong=(*wrong, *verdict.wrong))


def _weights(
    e: Evidence, momenta: Sequence[float], nesterov: bool, *, average: bool = False, raw: bool = False
) -> Tensor:
    """Weights of the gradients in the direction of the last step.

    `average`: the momentum gives gradients the weight 1 - momentum. `raw`: it advances in each backward pass.
    """
    last, weights, later = len(momenta) - 1, [], 1.0
    for gradient, following in zip(reversed(e.gradients), [None, *reversed(e.gradients)], strict=False):
        changed = following is not None and (raw or following.step != gradient.step)
        later *= momenta[following.step] if changed and following is not None else 1.0
        weight = later * (1 - momenta[gradient.step] if average else 1.0)
        newest = gradient.step == last and (following is None or not raw)
        if nesterov:
            weight = weight * momenta[last] + (1 - momenta[last] if average else 1.0) * newest
        weights.append(weight)
    return torch.tensor(weights[::-1], dtype=torch.float64, device="cpu")


def _stated(e: Evidence) -> Iterator[Claim]:
    """Sums by the hyperparameters of the parameter's groups; by usual ones where a group has none."""
    momenta = [momentum_of(group) for group in e.groups]
    said = e.groups[-1].get("nesterov")
    unknown = any(m is None for m in momenta)
    for nesterov in (True, False) if said is None else (bool(said),):
        for value in MOMENTA if unknown else (None,):
            values = [m if value is None else value for m in momenta]
            for average in (False, True) if len(set(values)) > 1 else (False,):
                yield Claim(_weights(e, values, nesterov, average=average), values[-1], nesterov)


def _others(e: Evidence, plain: Claim) -> Iterator[Claim]:
    """Sums with other hyperparameters than the stated ones."""
    momenta = [plain.momentum if (m := momentum_of(group)) is None else m for group in e.groups]
    said, steps = e.groups[-1].get("nesterov"), len(e.groups)
    passes = sum(g.step == steps - 1 for g in e.gradients)
    if said is not None:
        text = f"nesterov is {not said}, and the group says {bool(said)}"
        yield Claim(_weights(e, momenta, not said), plain.momentum, not said, "nesterov", text)
    for nesterov in (True, False):
        weights = _weights(e, momenta, nesterov)
        if float(e.groups[-1].get("weight_decay", 0.0)):
            own = float(e.groups[-1]["weight_decay"]) * float(weights.sum()) / passes
            text = "weight decay is added to the gradient before Newton-Schulz, which removes its size"
            yield Claim(weights, plain.momentum, nesterov, "coupled-decay", text, own)
        if passes > 1:
            text = f"momentum advances in each of {passes} backward passes of a step"
            yield Claim(_weights(e, momenta, nesterov, raw=True), plain.momentum, nesterov, "micro-momentum", text)
        stated = momentum_of(e.groups[-1])
        if stated is not None and len(set(momenta)) == 1 and (said is None or nesterov == said):
            for value in MOMENTA:
                if abs(value - stated) > 0.02:
                    text = f"momentum is {value:.2g}, and the group says {stated:g}"
                    yield Claim(_weights(e, [value] * steps, nesterov), value, nesterov, "momentum", text)


def momentum_of(group: Mapping[str, Any]) -> float | None:
    """The momentum that a parameter group states."""
    for key in ("momentum", "mu", "momentum_beta", "muon_momentum", "beta"):
        if isinstance(group.get(key), float | int):
            return float(group[key])
    return None


def _momenta_of(start: Mapping[str, Tensor]) -> list[Tensor]:
    return [x for name, x in start.items() if "sq" not in name and x.ndim and x.any()]


class _Form:
    """Misfit of claims about a matrix, as quadratic forms of the weights."""

    def __init__(self, e: Evidence, moved: Tensor) -> None:
        rows, cols = moved.shape
        draw = torch.Generator().manual_seed(0)
        right, left = (
            torch.randn(n, min(PROBES, n), generator=draw, device="cpu", dtype=torch.float32) for n in (cols, rows)
        )
        self.columns = [*(g.value for g in e.gradients), e.before, *_momenta_of(e.start)]
        self._free = list(range(len(e.gradients) + 1, len(self.columns)))

        def parts(x: Tensor, sign: int) -> list[Tensor]:
            """x' M plus or minus its transpose, and the same of x M', times the probes, for all columns M."""
            xr, xl = x @ right, x.T @ left
            return [
                torch.cat(
                    [(x.T @ (m @ right) + sign * (m.T @ xr)).flatten(), (x @ (m.T @ left) + sign * (m @ xl)).flatten()]
                )
                for m in self.columns
            ]

        odd = torch.stack([*parts(moved, -1), *parts(e.before, -1)]).double()
        even = torch.stack(parts(moved, 1)).double()
        self._odd, self._even, self._length = odd @ odd.T, even @ even.T, odd.shape[1]

    def misfit(self, claim: Claim) -> tuple[float, float, float]:
        """Relative antisymmetric part, the decay that makes it smallest, and the decay's uncertainty."""
        weights, decay = self.solved(claim)
        n = len(self.columns)
        both = torch.cat([weights, -decay * weights])
        odd, even = float(both @ self._odd @ both), float(weights @ self._even @ weights)
        own = float(weights @ self._odd[n:, n:] @ weights)
        noise = math.sqrt(max(odd, 0.0) / max(own, 1e-300) / self._length)
        return math.sqrt(max(odd, 0.0) / max(odd + even, 1e-300)), decay, noise

    def decay(self, claim: Claim) -> float:
        return self.solved(claim)[1]

    def solved(self, claim: Claim) -> tuple[Tensor, float]:
        """All weights, with those of the optimizer's states at the start, and the decay."""
        n, decay, free = len(self.columns), 0.0, self._free
        rest = torch.zeros(len(free), dtype=torch.float64, device="cpu")
        weights = torch.cat([claim.weights, torch.tensor([claim.own], dtype=torch.float64, device="cpu"), rest])
        a, b, c = self._odd[:n, :n], self._odd[:n, n:], self._odd[n:, n:]
        for _ in range(4):
            if free:
                form = a - decay * (b + b.T) + decay**2 * c
                known = weights.clone()
                known[free] = 0
                inner = form[free][:, free]
                inner = inner + 1e-12 * inner.trace() * torch.eye(len(free), dtype=inner.dtype, device="cpu")
                weights[free] = torch.linalg.solve(inner, -(form @ known)[free])
            own = float(weights @ c @ weights)
            decay = 0.0 if claim.own else float(weights @ b @ weights) / max(own, 1e-300)
        return weights, decay


def _combined(e: Evidence, form: _Form, claim: Claim) -> Tensor:
    """The sum of a claim."""
    total = torch.zeros_like(e.before)
    for weight, column in zip(form.solved(claim)[0].tolist(), form.columns, strict=True):
        total.add_(column, alpha=weight)
    return total


def _splits(e: Evidence) -> list[tuple[int, int]]:
    counts = [(n, 1) for n in (2, 3, 4, 8, 16)] + [(1, n) for n in (2, 3, 4, 8, 16)]
    rows, cols = e.before.shape
    fitting = [s for s in (*e.shards, *counts) if rows % s[0] == cols % s[1] == 0 and s != (1, 1)]
    return [s for s in dict.fromkeys(fitting) if min(rows // s[0], cols // s[1]) > 1]


def _blocks(x: Tensor, split: tuple[int, int]) -> list[Tensor]:
    return [block for row in x.chunk(split[0], 0) for block in row.chunk(split[1], 1)]


def _misfit_in_blocks(moved: Tensor, weight: Tensor, direction: Tensor, split: tuple[int, int]) -> tuple[float, float]:
    """Misfit and decay if each block of the matrix was orthogonalized apart."""
    draw = torch.Generator().manual_seed(0)
    odd, own, even = [], [], []
    for d, w, m in zip(*(_blocks(x, split) for x in (moved, weight, direction)), strict=True):
        for x, y, z in ((d, w, m), (d.T, w.T, m.T)):
            probe = torch.randn(x.shape[1], min(PROBES, x.shape[1]), generator=draw, device="cpu", dtype=x.dtype)
            one, two, other = x.T @ (z @ probe), z.T @ (x @ probe), y.T @ (z @ probe) - z.T @ (y @ probe)
            odd.append((one - two).flatten())
            even.append((one + two).flatten())
            own.append(other.flatten())
    (decay,), left = _regress(torch.cat(odd), [torch.cat(own)])
    left *= float(torch.cat(odd).norm())
    return left / math.hypot(left, float(torch.cat(even).norm())), decay


def _decomposed(direction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All singular values in ascending order, and left and right vectors of those above 3 % of the largest one.

    From eigenvectors of the smaller Gram matrix: smaller values are noise in bfloat16 and in the Gram matrix.
    """
    if direction.shape[0] < direction.shape[1]:
        s, v, u = _decomposed(direction.T)
        return s, u, v
    x = direction.double() if direction.shape[1] <= 512 else direction
    squares, vectors = torch.linalg.eigh(x.T @ x)
    s, kept = squares.clamp(min=0).sqrt(), squares > max(1e-3 * float(squares[-1]), 1e-30)
    v = vectors[:, kept]
    return s.double(), ((x @ v) / s[kept]).to(direction.dtype), v.to(direction.dtype)


def _curve(s: Tensor, count: int, coefficients: Sequence[tuple[float, float, float]], times: int = 1) -> Tensor:
    """Newton-Schulz of all singular values of a matrix: the results of the `count` largest ones."""
    x = s
    for _ in range(times):
        x = x / x.norm()
        for a, b, c in coefficients:
            x = a * x + b * x**3 + c * x**5
    return x[len(x) - count :]


def _newton_schulz(direction: Tensor, coefficients: Sequence[tuple[float, float, float]]) -> Tensor:
    x = direction if direction.shape[0] <= direction.shape[1] else direction.T
    x = x / x.norm().clamp(min=1e-30)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if direction.shape[0] <= direction.shape[1] else x.T


def _spectral(e: Evidence, update: Tensor, direction: Tensor, split: tuple[int, int]) -> Verdict:
    """Kind, error, scale and spectrum of an update along the singular vectors of a direction."""
    found: list[tuple[Tensor, int, Tensor]] = []
    off = total = 0.0
    for d, m in zip(_blocks(update, split), _blocks(direction, split), strict=True):
        s, u, v = _decomposed(m)
        left, right = u.T @ d, d @ v
        f = (left.T * v).sum(0)
        off += float((left - f[:, None] * v.T).norm()) ** 2 + float((right - u * f).norm()) ** 2
        total += float(left.norm()) ** 2 + float(right.norm()) ** 2
        found.append((s, len(f), f.double()))
    error = math.sqrt(off / max(total, 1e-300))
    own = e.groups[-1].get("ns_coefficients")
    sets = {"quintic": QUINTIC, "Polar Express": POLAR_EXPRESS}
    if isinstance(own, list | tuple) and len(own) == 3 and all(isinstance(x, float | int) for x in own):
        sets["stated"] = (tuple(map(float, own)),) * int(e.groups[-1].get("ns_steps", 5))  # type: ignore[assignment]
    curves = {name: torch.cat([_curve(s, n, c) for s, n, _ in found]) for name, c in sets.items()}
    twice = {f"{name}, twice": torch.cat([_curve(s, n, c, 2) for s, n, _ in found]) for name, c in sets.items()}
    f = torch.cat([f for *_, f in found])
    curves["polar"] = torch.ones_like(f)
    fits = {name: _along(f, curve) for name, curve in (curves | twice).items()}
    once = min(curves, key=lambda n: fits[n][0])
    again = min(twice, key=lambda n: fits[n][0])
    if fits[again][0] < min(FITS, fits[once][0] / 3):
        text = "Newton-Schulz ran twice, or with twice the steps"
        return Verdict("muon", error, scale=fits[again][1], spectrum=again, wrong=(("twice", text),))
    bent = max(0.0, fits[once][0] - 0.25)
    return Verdict("muon", math.hypot(error, bent), scale=fits[once][1], spectrum=once)


def _along(y: Tensor, x: Tensor) -> tuple[float, float]:
    """Relative residual and coefficient of y on x."""
    slope = float((y * x).sum() / (x * x).sum().clamp(min=1e-300))
    return float((y - slope * x).norm() / y.norm().clamp(min=1e-300)), slope


def _regress(y: Tensor, columns: Sequence[Tensor]) -> tuple[list[float], float]:
    """Coefficients and relative residual of y on the columns."""
    x = torch.stack([column.flatten().double() for column in columns], 1)
    size = x.norm(dim=0).clamp(min=1e-300)
    solution = torch.linalg.lstsq(x / size, y.flatten().double()[:, None], driver="gelsd").solution[:, 0]
    error = float((y.flatten().double() - (x / size) @ solution).norm() / y.double().norm().clamp(min=1e-300))
    return (solution / size).tolist(), error


def _adam(e: Evidence, moved: Tensor) -> Verdict:
    """The step as AdamW's, with the stated betas or usual ones."""
    best, stated = Verdict("adam", 1.0), e.groups[-1].get("betas")
    steps = len(e.groups)
    summed = [sum((g.value for g in e.gradients if g.step == i), torch.zeros_like(moved)) for i in range(steps)]
    for b1, b2 in [tuple(stated)] if stated else [(0.9, 0.999), (0.9, 0.95), (0.95, 0.95), (0.8, 0.95)]:
        mean, square = (e.start.get(name, torch.zeros_like(moved)) for name in ("exp_avg", "exp_avg_sq"))
        for gradient in summed:
            mean, square = b1 * mean + (1 - b1) * gradient, b2 * square + (1 - b2) * gradient**2
        age = steps + float(e.start["step"].max()) if "step" in e.start else float(steps)
        root = (square / (1 - b2**age)).sqrt() + float(e.groups[-1].get("eps", 1e-8))
        (decay, scale), error = _regress(moved, [e.before, mean / (1 - b1**age) / root])
        if error < best.error:
            best = Verdict("adam", error, momentum=b1, decay=decay, scale=scale)
    return best


def _each_pass(e: Evidence, moved: Tensor) -> Verdict:
    """The step as a sum of Newton-Schulz of every backward pass."""
    last = [g.value for g in e.gradients if g.step == len(e.groups) - 1]
    best, stated = Verdict("muon", 1.0), momentum_of(e.groups[-1])
    if not 1 < len(last) <= 8 or min(moved.shape) > 2048:
        return best
    for memory in (0.0, 0.95 if stated is None else stated):
        for nesterov in (True, False) if memory else (False,):
            buffer, totals = torch.zeros_like(moved), [torch.zeros_like(moved), torch.zeros_like(moved)]
            for g in e.gradients:
                buffer = memory * buffer + g.value
                if g.step == len(e.groups) - 1:
                    direction = g.value + memory * buffer if nesterov else buffer
                    for total, coefficients in zip(totals, (QUINTIC, POLAR_EXPRESS), strict=True):
                        total += _newton_schulz(direction, coefficients)
            for total in totals:
                (decay, scale), error = _regress(moved, [e.before, total])
                if error < best.error:
                    best = Verdict("muon", error, memory, nesterov, decay, scale=scale * len(last))
    text = f"Newton-Schulz ran in each of {len(last)} backward passes of a step, and the results were added"
    return replace(best, wrong=(("per-micro-batch", text),))

"""Judges a step of a parameter from weights and gradients, without knowledge of the optimizer's code.

Muon's step is `before - after = decay * before + U f(S) V'`, with `M = U S V'` a weighted sum of gradients. For D, the
change without the decay, `D' M` and `D M'` are then symmetric. Antisymmetric parts are linear in the weights of the
gradients, so a small quadratic form has the misfit of any momentum, from products with a few random vectors. Singular
values are computed once, for the best sum: a flat f is Newton-Schulz, and an f proportional to S is SGD.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

FITS, DIFFERS, LINEAR, VARIANT = 0.05, 0.5, 0.1, 0.4
"""Misfit of an exact explanation, ratio of misfits that decides between two explanations, residual of SGD and Adam, and
misfit up to which an update is a variant of Muon. docs/results/audit.md has the cases that set them."""
PROBES = 32
MOMENTA = tuple(i / 100 for i in range(100))
Split = tuple[int, int]
WHOLE: Split = (1, 1)
Coefficients = Sequence[tuple[float, float, float]]
QUINTIC: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
# Amsel et al., arXiv:2505.16932, the first four steps, and the last one again.
POLAR_EXPRESS: Coefficients = (
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
)


@dataclass
class Seen:
    """A parameter on a rank. `digests` and `groups` have an entry before each step, and `digests` one after the last.

    `shards`: numbers of row and column blocks of the layout on the ranks. `tensors`: pieces of a sampled parameter.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    replicated: bool
    sampled: bool = False
    optimizer: str = ""
    number: int = 0
    place: str = ""
    gradient: bool = False
    passes: int = 0
    shards: tuple[Split, ...] = ()
    undecided: str = ""
    digests: list[float] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def group(self) -> Mapping[str, Any]:
        return self.groups[-1] if self.groups else {}

    @property
    def momentum(self) -> float | None:
        """The momentum that the group states."""
        values = (self.group.get(key) for key in ("momentum", "mu", "momentum_beta", "muon_momentum", "beta"))
        return next((float(value) for value in values if isinstance(value, float | int)), None)


@dataclass(frozen=True)
class Evidence:
    """Whole float32 tensors on the CPU: gradients with the numbers of their steps, and states at the first step."""

    before: Tensor
    after: Tensor
    gradients: Sequence[tuple[int, Tensor]]
    seen: Seen
    start: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def columns(self) -> list[Tensor]:
        """Tensors whose sum a step may orthogonalize: gradients, the weight, and momenta at the first step."""
        momenta = [x for name, x in self.start.items() if "sq" not in name and x.shape == self.before.shape and x.any()]
        return [*(g for _, g in self.gradients), self.before, *momenta]


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
    blocks: Split = WHOLE
    wrong: tuple[tuple[str, str], ...] = ()
    undecided: str = ""


class Claim(NamedTuple):
    """Weights of the gradients, and of the weight itself, in a sum that the step may have orthogonalized."""

    weights: list[float]
    momentum: float
    nesterov: bool
    code: str = ""
    text: str = ""
    own: float = 0.0


class Fit(NamedTuple):
    """Relative antisymmetric part for a claim, all weights, and the decay with its uncertainty."""

    misfit: float
    weights: Tensor
    decay: float
    noise: float


def judge(e: Evidence) -> Verdict:
    """The explanation of the last step."""
    moved = e.before - e.after
    if not moved.any():
        return Verdict("still", undecided="the last audited step had not come when the audit ended")
    rounding = 0.3 * torch.finfo(e.seen.dtype).eps * float(e.before.norm() / moved.norm())
    if rounding > 0.5 or not any(bool(g.any()) for _, g in e.gradients):
        reason = "the step is smaller than the rounding of the weights" if rounding > 0.5 else "no gradient was seen"
        return Verdict("undecided", undecided=reason)
    if (adam := _adam(e, moved)).error < LINEAR + rounding:
        return adam
    weights, error = _regress(moved, e.columns)
    if error < LINEAR + rounding and moved.numel() > 8 * len(weights):
        return Verdict("sgd", error, scale=max(map(abs, weights)))
    if moved.ndim != 2 or min(moved.shape) < 2:
        return Verdict("undecided", error, undecided="neither Adam nor SGD explains the step")
    return _muon(e, moved, FITS + rounding)


def _muon(e: Evidence, moved: Tensor, fits: float) -> Verdict:
    form, blocks = _Form(e, moved), WHOLE
    best = min(_stated(e), key=lambda claim: form.fit(claim).misfit)
    fit = form.fit(best)
    other = min(_others(e, best), key=lambda claim: form.fit(claim).misfit, default=best)
    if form.fit(other).misfit < min(DIFFERS * fit.misfit, 2 * fits):
        best, fit = other, form.fit(other)
    for split in _splits(e) if fit.misfit > 0.3 * fits else ():
        if (apart := _Form(e, moved, split).fit(best)).misfit < min(DIFFERS * fit.misfit, 2 * fits):
            fit, blocks = apart, split
    columns = zip(fit.weights.tolist(), e.columns, strict=True)
    direction = sum((weight * column for weight, column in columns), torch.zeros_like(moved))
    verdict = _spectral(moved - fit.decay * e.before, direction, blocks)
    if verdict.error > fits and (passes := _each_pass(e, moved)).error < DIFFERS * verdict.error:
        return passes
    wrong = [*verdict.wrong, *([(best.code, best.text)] if best.code else [])]
    if blocks in e.seen.shards:
        wrong.append(("per-shard", f"Newton-Schulz ran on each of {math.prod(blocks)} shards, not on the whole matrix"))
    error = max(fit.misfit, verdict.error)
    if error > VARIANT:
        reason = f"no sum of the seen gradients explains the step (error {error:.2f})"
        return Verdict("undecided", error, undecided=reason)
    return Verdict(
        "muon", error, best.momentum, best.nesterov, fit.decay, fit.noise, verdict.scale, blocks, tuple(wrong)
    )


def _weights(
    e: Evidence, momentum: float | None, nesterov: bool, average: bool = False, raw: bool = False
) -> list[float]:
    """Weights of the gradients in the direction of the last step. `momentum`: in place of those that the groups state.

    `average`: the momentum gives gradients the weight 1 - momentum. `raw`: it advances in each backward pass.
    """
    momenta = [replace(e.seen, groups=[g]).momentum if momentum is None else momentum for g in e.seen.groups]
    steps, later, weights = [step for step, _ in e.gradients], 1.0, list[float]()
    for i in reversed(range(len(steps))):
        if i + 1 < len(steps) and (raw or steps[i + 1] != steps[i]):
            later *= momenta[steps[i + 1]] or 0.0
        own = 1 - (momenta[steps[i]] or 0.0) if average else 1.0
        newest = steps[i] == len(momenta) - 1 and (not raw or i + 1 == len(steps))
        weights.append(later * own * (momenta[-1] or 0.0) + own * newest if nesterov else later * own)
    return weights[::-1]


def _stated(e: Evidence) -> Iterator[Claim]:
    """Sums by the hyperparameters of the groups, or by usual ones where a group states none."""
    stated, said = e.seen.momentum, e.seen.group.get("nesterov")
    for nesterov in (True, False) if said is None else (bool(said),):
        for value in MOMENTA if stated is None else (None,):
            for average in (False, True):
                weights = _weights(e, value, nesterov, average)
                yield Claim(weights, (stated or 0.0) if value is None else value, nesterov)


def _others(e: Evidence, plain: Claim) -> Iterator[Claim]:
    """Sums by other hyperparameters than the stated ones."""
    group, stated, last = e.seen.group, e.seen.momentum, len(e.seen.groups) - 1
    m, said = plain.momentum if stated is None else None, group.get("nesterov")
    passes, decay = sum(step == last for step, _ in e.gradients), float(group.get("weight_decay") or 0.0)
    if said is not None:
        text = f"nesterov is {not said}, and the group says {bool(said)}"
        yield Claim(_weights(e, m, not said), plain.momentum, not said, "nesterov", text)
    for nesterov in (True, False):
        if decay:
            weights, text = _weights(e, m, nesterov), "weight decay is added to the gradient before Newton-Schulz"
            yield Claim(weights, plain.momentum, nesterov, "coupled-decay", text, decay * sum(weights) / passes)
        if passes > 1:
            text = f"momentum advances in each of {passes} backward passes of a step"
            yield Claim(_weights(e, m, nesterov, raw=True), plain.momentum, nesterov, "micro-momentum", text)
    for value in MOMENTA if stated is not None and len({str(g.get("momentum")) for g in e.seen.groups}) == 1 else ():
        if abs(value - (stated or 0.0)) > 0.02:
            text = f"momentum is {value:.2g}, and the group says {stated:g}"
            yield Claim(_weights(e, value, plain.nesterov), value, plain.nesterov, "momentum", text)


class _Form:
    """Misfit of claims about a matrix, whole or in blocks, as quadratic forms of the weights."""

    def __init__(self, e: Evidence, moved: Tensor, split: Split = WHOLE) -> None:
        columns, draw = e.columns, torch.Generator().manual_seed(0)
        self._free = list(range(len(e.gradients) + 1, len(columns)))
        rows = [[list[Tensor]() for _ in columns] for _ in range(3)]
        for d, w, *blocks in zip(*(_blocks(x, split) for x in (moved, e.before, *columns)), strict=True):
            for x, y, sides in ((d, w, blocks), (d.T, w.T, [m.T for m in blocks])):
                probe = torch.randn(x.shape[1], min(PROBES, x.shape[1]), generator=draw, device="cpu", dtype=x.dtype)
                xp, yp = x @ probe, y @ probe
                for i, (m, mp) in enumerate((m, m @ probe) for m in sides):
                    rows[0][i].append((x.T @ mp - m.T @ xp).flatten())
                    rows[1][i].append((y.T @ mp - m.T @ yp).flatten())
                    rows[2][i].append((x.T @ mp + m.T @ xp).flatten())
        moves, own, even = (torch.stack([torch.cat(parts) for parts in row]).double() for row in rows)
        self._moves, self._mixed, self._own, self._even = moves @ moves.T, moves @ own.T, own @ own.T, even @ even.T
        self._length = moves.shape[1]

    def fit(self, claim: Claim) -> Fit:
        """The decay, and the weights of the optimizer's states at the first step, with the smallest misfit."""
        decay, free = 0.0, self._free
        weights = torch.tensor([*claim.weights, claim.own, *[0.0] * len(free)], dtype=torch.float64, device="cpu")
        for _ in range(4 if free else 1):
            form = self._moves - decay * (self._mixed + self._mixed.T) + decay**2 * self._own
            if free:
                weights[free] = 0
                inner = form[free][:, free]
                inner = inner + 1e-12 * inner.trace() * torch.eye(len(free), dtype=inner.dtype, device="cpu")
                weights[free] = torch.linalg.solve(inner, -(form @ weights)[free])
            own = max(float(weights @ self._own @ weights), 1e-300)
            decay = 0.0 if claim.own else float(weights @ self._mixed @ weights) / own
        form = self._moves - decay * (self._mixed + self._mixed.T) + decay**2 * self._own
        odd, even = max(float(weights @ form @ weights), 0.0), float(weights @ self._even @ weights)
        return Fit(math.sqrt(odd / max(odd + even, 1e-300)), weights, decay, math.sqrt(odd / own / self._length))


def _splits(e: Evidence) -> list[Split]:
    (rows, cols), counts = e.before.shape, (2, 3, 4, 8, 16)
    splits = dict.fromkeys([*e.seen.shards, *((n, 1) for n in counts), *((1, n) for n in counts)])
    return [(r, c) for r, c in splits if r * c > 1 and rows % r == cols % c == 0 and rows > r and cols > c]


def _blocks(x: Tensor, split: Split) -> list[Tensor]:
    return [block for row in x.chunk(split[0], 0) for block in row.chunk(split[1], 1)]


def _decomposed(direction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All singular values in ascending order, and left and right vectors of those above 3 % of the largest one.

    From eigenvectors of the smaller Gram matrix. Smaller values are noise in bfloat16 and in the Gram matrix.
    """
    if direction.shape[0] < direction.shape[1]:
        s, v, u = _decomposed(direction.T)
        return s, u, v
    x = direction.double() if direction.shape[1] <= 512 else direction
    squares, vectors = torch.linalg.eigh(x.T @ x)
    s, kept = squares.clamp(min=0).sqrt(), squares > max(1e-3 * float(squares[-1]), 1e-30)
    return s.double(), ((x @ vectors[:, kept]) / s[kept]).to(direction.dtype), vectors[:, kept].to(direction.dtype)


def _newton_schulz(x: Tensor, coefficients: Coefficients) -> Tensor:
    """Newton-Schulz of a matrix, or of a vector of singular values."""
    if x.ndim == 2 and x.shape[0] > x.shape[1]:
        return _newton_schulz(x.T, coefficients).T
    x = x / x.norm().clamp(min=1e-30)
    for a, b, c in coefficients:
        gram = x @ x.T if x.ndim == 2 else x * x
        x = a * x + ((b * gram + c * gram @ gram) @ x if x.ndim == 2 else (b * gram + c * gram * gram) * x)
    return x


def _spectral(update: Tensor, direction: Tensor, split: Split) -> Verdict:
    """Error and scale of an update along the singular vectors of a direction."""
    found, curves, off, total = list[Tensor](), dict[tuple[int, int], list[Tensor]](), 0.0, 0.0
    for d, m in zip(_blocks(update, split), _blocks(direction, split), strict=True):
        s, u, v = _decomposed(m)
        left, right = u.T @ d, d @ v
        f = (left.T * v).sum(0)
        off += float((left - f[:, None] * v.T).norm()) ** 2 + float((right - u * f).norm()) ** 2
        total += float(left.norm()) ** 2 + float(right.norm()) ** 2
        found.append(f.double())
        curves.setdefault((1, 0), []).append(torch.ones_like(found[-1]))
        for number, coefficients in enumerate((QUINTIC, POLAR_EXPRESS), start=1):
            curve = s
            for times in (1, 2):
                curve = _newton_schulz(curve, coefficients)
                curves.setdefault((times, number), []).append(curve[len(s) - len(f) :])
    fits = {key: _regress(torch.cat(found), [torch.cat(parts)]) for key, parts in curves.items()}
    once, twice = (min((fits[key] for key in fits if key[0] == times), key=lambda fit: fit[1]) for times in (1, 2))
    again = twice[1] < min(FITS, once[1] / 3)
    (scale, *_), bent = twice if again else once
    wrong = (("twice", "Newton-Schulz ran twice, or with twice the steps"),) if again else ()
    # The singular values of other coefficients differ by as much.
    error = math.hypot(math.sqrt(off / max(total, 1e-300)), max(0.0, bent - 0.25))
    return Verdict("muon", error, scale=scale, wrong=wrong)


def _regress(y: Tensor, columns: Sequence[Tensor]) -> tuple[list[float], float]:
    """Coefficients and relative residual of y on the columns."""
    dtype = torch.float64 if y.numel() < 2**22 else torch.float32
    x, flat = torch.stack([column.flatten() for column in columns]).to(dtype), y.flatten().to(dtype)
    size = x.norm(dim=1).clamp(min=1e-30)
    x /= size[:, None]
    gram = (x @ x.T).double() + 1e-12 * torch.eye(len(x), dtype=torch.float64, device="cpu")
    solution = torch.linalg.solve(gram, (x @ flat).double()).to(dtype)
    return (solution / size).tolist(), float((flat - solution @ x).norm() / flat.norm().clamp(min=1e-30))


def _adam(e: Evidence, moved: Tensor) -> Verdict:
    """The step as AdamW's, with the stated betas or usual ones."""
    best, stated, steps = Verdict("adam", 1.0), e.seen.group.get("betas"), len(e.seen.groups)
    for b1, b2 in [tuple(stated)] if stated else [(0.9, 0.999), (0.9, 0.95), (0.95, 0.95), (0.8, 0.95)]:
        mean, square = (e.start.get(name, torch.zeros_like(moved)) for name in ("exp_avg", "exp_avg_sq"))
        for i in range(steps):
            gradient = sum((g for step, g in e.gradients if step == i), torch.zeros_like(moved))
            mean, square = b1 * mean + (1 - b1) * gradient, b2 * square + (1 - b2) * gradient**2
        age = steps + float(e.start["step"].max() if "step" in e.start else 0)
        root = (square / (1 - b2**age)).sqrt() + float(e.seen.group.get("eps", 1e-8))
        (decay, scale), error = _regress(moved, [e.before, mean / (1 - b1**age) / root])
        if error < best.error:
            best = Verdict("adam", error, momentum=b1, decay=decay, scale=scale)
    return best


def _each_pass(e: Evidence, moved: Tensor) -> Verdict:
    """The step as a sum of Newton-Schulz of every backward pass."""
    last, best = len(e.seen.groups) - 1, Verdict("muon", 1.0)
    count, memory = sum(step == last for step, _ in e.gradients), 0.95 if e.seen.momentum is None else e.seen.momentum
    text = f"Newton-Schulz ran in each of {count} backward passes of a step, and the results were added"
    for m, nesterov in (
        ((0.0, False), (memory, False), (memory, True)) if count > 1 and min(moved.shape) <= 2048 else ()
    ):
        buffer, total = torch.zeros_like(moved), torch.zeros_like(moved)
        for step, g in e.gradients:
            buffer = m * buffer + g
            total += _newton_schulz(g + m * buffer if nesterov else buffer, QUINTIC) if step == last else 0
        (decay, scale), error = _regress(moved, [e.before, total])
        if error < best.error:
            best = Verdict("muon", error, m, nesterov, decay, 0.0, scale * count, wrong=(("per-micro-batch", text),))
    return best

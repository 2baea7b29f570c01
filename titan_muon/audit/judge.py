"""Judges a step of a parameter from weights and gradients, without knowledge of the optimizer's code.

Muon's step is `before - after = decay * before + U f(S) V'`, with `M = U S V'` a weighted sum of gradients. For D, the
change without the decay, `D' M` and `D M'` are then symmetric. Antisymmetric parts are linear in the weights of the
gradients, so a small quadratic form has the misfit of any momentum, from products with a few random vectors. Singular
values are computed once, of D and of the best sum: a flat f is Newton-Schulz, and an f proportional to S is SGD.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

FITS, DIFFERS, LINEAR, VARIANT = 0.05, 0.5, 0.1, 0.4
"""Misfit of an exact explanation, ratio of misfits that decides between two explanations, residual of SGD and Adam, and
misfit up to which an update is a variant of Muon. docs/results/audit.md has the cases that set them."""
PROBES = 32
MOMENTA = tuple(i / 100 for i in range(100))
Split = tuple[int, int]
WHOLE: Split = (1, 1)


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
    def lr(self) -> float:
        """The learning rate; 1 where the group states none, or 0."""
        return float(self.group.get("lr", 0.0)) or 1.0

    @property
    def decay(self) -> float:
        return float(self.group.get("weight_decay") or 0.0)


@dataclass(frozen=True)
class Evidence:
    """Whole float32 tensors on the CPU.

    `gradients` have the numbers of their steps, and before them the momentum at the first step has -1; `start` has
    Adam's states at the first step.
    """

    before: Tensor
    after: Tensor
    gradients: Sequence[tuple[int, Tensor]]
    seen: Seen
    start: Mapping[str, Tensor]

    @property
    def moved(self) -> Tensor:
        return self.before - self.after

    @property
    def columns(self) -> list[Tensor]:
        """Tensors whose sum a step may orthogonalize."""
        return [*(gradient for _, gradient in self.gradients), self.before]

    @property
    def passes(self) -> int:
        """The number of backward passes of the last step."""
        return sum(step == len(self.seen.groups) - 1 for step, _ in self.gradients)


@dataclass(frozen=True)
class Verdict:
    """Explanation of a step. `wrong` has codes with evidence, and `undecided` the reason without an explanation.

    `weights`: of the gradients, and last of the weight, in the sum that was orthogonalized.
    """

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
    weights: tuple[float, ...] = ()


def judge(e: Evidence) -> Verdict:
    """The explanation of the last step."""
    moved = e.before - e.after
    if not moved.any():
        return Verdict("still", undecided="the last audited step had not come when the audit ended")
    rounding = 0.3 * torch.finfo(e.seen.dtype).eps * float(e.before.norm() / moved.norm())
    if rounding > 0.5 or not any(bool(g.any()) for step, g in e.gradients if step >= 0):
        reason = "the step is smaller than the rounding of the weights" if rounding > 0.5 else "no gradient was seen"
        return Verdict("undecided", undecided=reason)
    if (adam := _closest(e, _adam(e))).error < LINEAR + rounding:
        return adam
    weights, error = _regress(moved, e.columns)
    if error < LINEAR + rounding and moved.numel() > 8 * len(weights):
        return Verdict("sgd", error, scale=max(map(abs, weights)))
    if moved.ndim != 2 or min(moved.shape) < 2:
        return Verdict("undecided", error, undecided="neither Adam nor SGD explains the step")
    return _muon(e, FITS + rounding)


def _muon(e: Evidence, fits: float) -> Verdict:
    form, (rows, cols), counts = _Form(e), e.before.shape, (2, 3, 4, 8, 16)
    tried = [form.fit(claim) for claim in _claims(e)]
    best = min((verdict for verdict in tried if not verdict.wrong), key=lambda verdict: verdict.error)
    other = min(tried, key=lambda verdict: verdict.error)
    if other.error < min(DIFFERS * best.error, 2 * fits):
        best = other
    splits = dict.fromkeys([*e.seen.shards, *((n, 1) for n in counts), *((1, n) for n in counts)])
    for r, c in splits if best.error > 0.3 * fits else ():
        if rows % r == cols % c == 0 and rows > r and cols > c:
            apart = _Form(e, (r, c)).fit(best)
            if apart.error < min(DIFFERS * best.error, 2 * fits):
                best = replace(apart, blocks=(r, c))
    columns = zip(best.weights, e.columns, strict=True)
    direction = sum((weight * column for weight, column in columns), torch.zeros_like(e.before))
    if best.error > 0.3 * fits and e.passes > 1 and min(rows, cols) <= 2048:
        once, each = (_closest(e, updates) for updates in ([(best, _newton_schulz(direction))], _each_pass(e)))
        if each.error < DIFFERS * once.error:
            return replace(each, scale=each.scale * e.passes)
    scale, bent, twice = _spectral(e.moved - best.decay * e.before, direction, best.blocks)
    # The singular values of other coefficients differ by 0.25.
    wrong, error = list(best.wrong), math.hypot(best.error, max(0.0, bent - 0.25))
    if twice:
        wrong.append(("twice", "Newton-Schulz ran twice, or with twice the steps"))
    if best.blocks in e.seen.shards:
        count = math.prod(best.blocks)
        wrong.append(("per-shard", f"Newton-Schulz ran on each of {count} shards, not on the whole matrix"))
    if error > VARIANT:
        reason = f"no sum of the seen gradients explains the step (error {error:.2f})"
        return Verdict("undecided", error, undecided=reason)
    return replace(best, error=error, scale=scale, wrong=tuple(wrong))


def stated_momentum(group: Mapping[str, Any]) -> float | None:
    """The momentum that a group states."""
    values = (group.get(key) for key in ("momentum", "mu", "momentum_beta", "muon_momentum", "beta"))
    return next((float(value) for value in values if isinstance(value, float | int)), None)


def _weights(e: Evidence, momentum: float | None, nesterov: bool, kind: str) -> Tensor:
    """Weights of the gradients in the direction of the last step. `momentum`: in place of those that the groups state.

    Of `kind` "average", momentum gives gradients the weight 1 - momentum. "micro-momentum" advances in each pass.
    """
    momenta = [stated_momentum(g) or 0.0 if momentum is None else momentum for g in e.seen.groups]
    buffer = newest = torch.zeros(len(e.gradients), dtype=torch.float64, device="cpu")
    units, before = torch.eye(len(e.gradients), dtype=torch.float64, device="cpu"), -1
    for unit, (step, _) in zip(units, e.gradients, strict=True):
        m, advances = momenta[step], step > before or kind == "micro-momentum"
        own = (1 - m) * unit if kind == "average" and step >= 0 else unit
        buffer, newest = (m * buffer + own, own) if advances else (buffer + own, newest + own)
        before = step
    return momenta[-1] * buffer + newest if nesterov else buffer


def _claims(e: Evidence) -> Iterator[Verdict]:
    """Sums by the hyperparameters that groups state, or by any where they state none, with one fault or without."""
    stated, said = stated_momentum(e.seen.group), e.seen.group.get("nesterov")
    constant = len({stated_momentum(group) for group in e.seen.groups}) == 1
    passes, texts = max(1, e.passes), dict[str, str]()
    if e.seen.decay:
        texts["coupled-decay"] = "weight decay is added to the gradient before Newton-Schulz"
    if passes > 1:
        texts["micro-momentum"] = f"momentum advances in each of {passes} backward passes of a step"
    values = MOMENTA if stated is None else (None, *(m for m in MOMENTA if constant and abs(m - stated) > 0.02))
    for value, nesterov, kind in product(values, (True, False), ("", "average", *texts)):
        wrong = [(kind, texts[kind])] if kind in texts else []
        if stated is not None and value is not None:
            wrong.append(("momentum", f"momentum is {value:.2g}, and the group says {stated:g}"))
        if said is not None and nesterov != bool(said) and kind not in texts:
            wrong.append(("nesterov", f"nesterov is {nesterov}, and the group says {bool(said)}"))
        if len(wrong) < 2:
            weights, momentum = _weights(e, value, nesterov, kind).tolist(), stated if value is None else value
            own = e.seen.decay * sum(weights) / passes if kind == "coupled-decay" else 0.0
            yield Verdict("muon", 0.0, momentum, nesterov, wrong=tuple(wrong), weights=(*weights, own))


class _Form:
    """Misfit of claims about a matrix, whole or in blocks, as quadratic forms of the weights."""

    def __init__(self, e: Evidence, split: Split = WHOLE) -> None:
        moves, own, even = (_products(x, e, split, sign) for x, sign in ((e.moved, -1), (e.before, -1), (e.moved, 1)))
        self._moves, self._mixed, self._own, self._even = moves @ moves.T, moves @ own.T, own @ own.T, even @ even.T
        self._length = moves.shape[1]

    def fit(self, claim: Verdict) -> Verdict:
        """The claim with the decay of the smallest misfit, and with its relative antisymmetric part as the error."""
        w = torch.tensor(claim.weights, dtype=torch.float64, device="cpu")
        own, mixed = max(float(w @ self._own @ w), 1e-300), float(w @ self._mixed @ w)
        decay = 0.0 if claim.weights[-1] else mixed / own
        odd = max(float(w @ self._moves @ w) - 2 * decay * mixed + decay**2 * own, 0.0)
        total = max(odd + float(w @ self._even @ w), 1e-300)
        return replace(claim, error=math.sqrt(odd / total), decay=decay, noise=math.sqrt(odd / own / self._length))


def _products(x: Tensor, e: Evidence, split: Split, sign: int) -> Tensor:
    """`x' m + sign m' x` and `x m' + sign m x'` of each column m, times random vectors, one row a column."""
    rows, draw = [list[Tensor]() for _ in e.columns], torch.Generator().manual_seed(0)
    for block, *others in zip(*(_blocks(matrix, split) for matrix in (x, *e.columns)), strict=True):
        for y, columns in ((block, others), (block.T, [m.T for m in others])):
            probe = torch.randn(y.shape[1], min(PROBES, y.shape[1]), generator=draw, device="cpu", dtype=y.dtype)
            for row, m in zip(rows, columns, strict=True):
                row.append((y.T @ (m @ probe) + sign * m.T @ (y @ probe)).flatten())
    return torch.stack([torch.cat(row) for row in rows]).double()


def _blocks(x: Tensor, split: Split) -> list[Tensor]:
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


def _spectral(update: Tensor, direction: Tensor, split: Split) -> tuple[float, float, bool]:
    """Scale of an update, the misfit of its singular values, and whether Newton-Schulz ran twice on the direction."""
    found, curves = list[Tensor](), [list[Tensor]() for _ in range(3)]
    for d, m in zip(_blocks(update, split), _blocks(direction, split), strict=True):
        f, s = (torch.linalg.svdvals(x).double() for x in (d, m))
        once = _newton_schulz(s)
        found.append(f)
        for curve, values in zip(curves, (torch.ones_like(s), once, _newton_schulz(once)), strict=True):
            curve.append(values.sort(descending=True).values)
    flat, once_, twice = (_regress(torch.cat(found), [torch.cat(curve)]) for curve in curves)
    best = min(flat, once_, key=lambda fit: fit[1])
    again = twice[1] < min(FITS, best[1] / 3)
    (scale,), bent = twice if again else best
    return math.copysign(scale, float((update * direction).sum())), bent, again


def _regress(y: Tensor, columns: Sequence[Tensor]) -> tuple[list[float], float]:
    """Coefficients and relative residual of y on the columns."""
    dtype = torch.float64 if y.numel() < 2**22 else torch.float32
    x, flat = torch.stack([column.flatten() for column in columns]).to(dtype), y.flatten().to(dtype)
    size = x.norm(dim=1).clamp(min=1e-30)
    x /= size[:, None]
    gram = (x @ x.T).double() + 1e-12 * torch.eye(len(x), dtype=torch.float64, device="cpu")
    solution = torch.linalg.solve(gram, (x @ flat).double()).to(dtype)
    return (solution / size).tolist(), float((flat - solution @ x).norm() / flat.norm().clamp(min=1e-30))


def _closest(e: Evidence, updates: Iterable[tuple[Verdict, Tensor]]) -> Verdict:
    """The verdict whose update explains the step best, with decay, scale and error."""
    best = Verdict("undecided", 1.0)
    for verdict, update in updates:
        (decay, scale), error = _regress(e.moved, [e.before, update])
        if error < best.error:
            best = replace(verdict, error=error, decay=decay, scale=scale)
    return best


def _adam(e: Evidence) -> Iterator[tuple[Verdict, Tensor]]:
    """Updates of AdamW, with the stated betas or usual ones."""
    stated, steps = e.seen.group.get("betas"), len(e.seen.groups)
    for b1, b2 in [tuple(stated)] if stated else [(0.9, 0.999), (0.9, 0.95), (0.95, 0.95), (0.8, 0.95)]:
        mean, square = (e.start.get(name, torch.zeros_like(e.before)) for name in ("exp_avg", "exp_avg_sq"))
        for i in range(steps):
            gradient = sum((g for step, g in e.gradients if step == i), torch.zeros_like(e.before))
            mean, square = b1 * mean + (1 - b1) * gradient, b2 * square + (1 - b2) * gradient**2
        age = steps + float(e.start["step"].max() if "step" in e.start else 0)
        root = (square / (1 - b2**age)).sqrt() + float(e.seen.group.get("eps", 1e-8))
        yield Verdict("adam", momentum=b1), mean / (1 - b1**age) / root


def _each_pass(e: Evidence) -> Iterator[tuple[Verdict, Tensor]]:
    """Sums of Newton-Schulz of every backward pass of the last step."""
    stated, last = stated_momentum(e.seen.group), len(e.seen.groups) - 1
    memory = 0.95 if stated is None else stated
    text = f"Newton-Schulz ran in each of {e.passes} backward passes of a step, and the results were added"
    for m, nesterov in ((0.0, False), (memory, False), (memory, True)):
        buffer, total = torch.zeros_like(e.before), torch.zeros_like(e.before)
        for step, g in e.gradients:
            buffer = m * buffer + g
            total += _newton_schulz(g + m * buffer if nesterov else buffer) if step == last else 0
        yield Verdict("muon", momentum=m, nesterov=nesterov, wrong=(("per-micro-batch", text),)), total

"""Judges a step of a parameter from weights and gradients, without knowledge of the optimizer's code.

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

FITS, DIFFERS, LINEAR, VARIANT = 0.05, 0.5, 0.1, 0.4
"""Misfit of an exact explanation, ratio of misfits that decides between two explanations, residual of SGD and Adam, and
misfit up to which an update is a variant of Muon. docs/results/audit.md has the cases that set them."""
PROBES, BLOCKS, MOMENTA = 32, (2, 3, 4, 8, 16), tuple(i / 100 for i in range(100))
Split = tuple[int, int]
WHOLE: Split = (1, 1)


@dataclass
class Seen:
    """A parameter on a rank.

    Of each step `digests` has the weight before it, and at last the weight after the last step, `groups` the
    hyperparameters, and `gradients` a digest. `begun`: all backward passes before its last step; `passes`: those of the
    next step. `shards`: numbers of row and column blocks of the layout. `tensors`: pieces of a sampled parameter.
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
    shards: tuple[Split, ...] = ()
    undecided: str = ""
    resumed: bool = False
    digests: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def group(self) -> Mapping[str, Any]:
        return self.groups[-1] if self.groups else {}

    def stated(self, *keys: str, step: int = -1) -> float | None:
        """The first number that the group of a step has under one of the keys."""
        group = self.groups[step] if self.groups else {}
        return next((float(x) for key in keys if isinstance(x := group.get(key), float | int)), None)

    def momentum(self, step: int = -1) -> float | None:
        """The momentum that the group of a step states."""
        return self.stated("momentum", "mu", "momentum_beta", "muon_momentum", "beta", step=step)


@dataclass(frozen=True)
class Evidence:
    """Whole float32 tensors on the CPU.

    `gradients` have the numbers of their steps, and before them the momentum at the first step has -1; `start` has
    Adam's states at the first step. `partial`: of a resumed run whose momentum at the first step is not known.
    """

    seen: Seen
    before: Tensor
    moved: Tensor
    gradients: Sequence[tuple[int, Tensor]]
    start: Mapping[str, Tensor]
    partial: bool

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
    nesterov: bool = False
    decay: float = 0.0
    noise: float = 0.0
    scale: float = 0.0
    blocks: Split = WHOLE
    wrong: tuple[tuple[str, str], ...] = ()
    undecided: str = ""
    weights: Sequence[float] = ()


def judge(e: Evidence) -> Verdict:
    """The explanation of the last step."""
    newest = e.gradients[-1][1] if e.gradients else torch.zeros_like(e.before)
    rounding = 0.3 * torch.finfo(e.seen.dtype).eps * float(e.before.norm() / e.moved.norm().clamp(min=1e-30))
    if not e.moved.any():
        return Verdict("still")
    if not all(bool(x.isfinite().all()) for x in (e.moved, *e.columns)):
        return Verdict("undecided", undecided="weights or gradients are not finite")
    if rounding > 0.5 or not newest.any():
        reason = "the step is smaller than the rounding of the weights" if rounding > 0.5 else "no gradient was seen"
        return Verdict("undecided", undecided=reason)
    if (adam := _closest(e, _adam(e))).error < LINEAR + rounding:
        return adam
    weights, error = regress(e.moved, e.columns)
    matrix = e.moved.ndim == 2 and min(e.moved.shape) > 1
    if error < LINEAR + rounding and e.moved.numel() > 8 * len(weights):
        sizes = torch.linalg.svdvals(newest) if matrix else torch.zeros(1)
        flat = "the gradient of the step has equal singular values, as after Newton-Schulz in a hook"
        even = float(sizes.median()) > 0.6 * float(sizes.max())
        return Verdict("sgd", error, scale=max(map(abs, weights)), undecided=flat if even else "")
    if not matrix:
        return Verdict("undecided", error, undecided="neither Adam nor SGD explains the step")
    return _muon(e, FITS + rounding)


def _muon(e: Evidence, fits: float) -> Verdict:
    (rows, cols), whole = e.before.shape, _products(e, WHOLE)
    tried = [_fit(whole, claim) for claim in _claims(e)]
    best = min((claim for claim in tried if not claim.wrong), key=lambda claim: claim.error)
    splits = [*e.seen.shards, *((n, 1) for n in BLOCKS), *((1, n) for n in BLOCKS)]
    splits = [(r, c) for r, c in splits if rows % r == cols % c == 0 and rows > r and cols > c]
    in_blocks = (replace(_fit(_products(e, split), best), blocks=split) for split in splits if best.error > 0.3 * fits)
    for other in (*sorted(tried, key=lambda claim: claim.error)[:1], *in_blocks):
        if other.error < min(DIFFERS * best.error, 2 * fits):
            best = other
    direction = sum((weight * x for weight, x in zip(best.weights, e.columns, strict=True)), torch.zeros_like(e.before))
    if best.error > 0.3 * fits and e.passes > 1 and min(rows, cols) <= 2048:
        once, each = (_closest(e, updates) for updates in ([(best, _newton_schulz(direction))], _each_pass(e)))
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
    return replace(best, error=error, scale=scale, wrong=wrong)


def _claims(e: Evidence) -> Iterator[Verdict]:
    """Sums by the hyperparameters that groups state, or by any where they state none, with one fault or without."""
    stated, said = e.seen.momentum(), e.seen.group.get("nesterov")
    decay, kinds = e.seen.stated("weight_decay") or 0.0, {"": "", "average": ""}
    if decay:
        kinds["coupled-decay"] = "weight decay is added to the gradient before Newton-Schulz"
    if e.passes > 1:
        kinds["micro-momentum"] = f"momentum advances in each of {e.passes} backward passes of a step"
    for value, nesterov, (kind, text) in product((None, *MOMENTA), (True, False), kinds.items()):
        momentum = stated if value is None else value
        other = stated not in (None, momentum) and f"momentum is {value}, and the group says {stated:g}"
        turned = said not in (None, nesterov) and not text and f"nesterov is {nesterov}, and the group says {said}"
        wrong = [(code, why) for code, why in ((kind, text), ("momentum", other), ("nesterov", turned)) if why]
        if len(wrong) < 2 - e.partial:
            weights = _weights(e, value, nesterov, kind)
            own = decay * sum(weights) / max(1, e.passes) if kind == "coupled-decay" else 0.0
            yield Verdict("muon", 0.0, momentum, nesterov, wrong=tuple(wrong), weights=(*weights, own))


def _weights(e: Evidence, momentum: float | None, nesterov: bool, kind: str = "") -> list[float]:
    """Weights of the gradients in the direction of the last step. `momentum`: in place of those that the groups state.

    Of `kind` "average", momentum gives gradients the weight 1 - momentum. "micro-momentum" advances in each pass.
    """
    steps = [step for step, _ in e.gradients]
    momenta = [(e.seen.momentum(max(0, step)) or 0.0) if momentum is None else momentum for step in steps]
    own = [1 - m if kind == "average" and step >= 0 else 1.0 for m, step in zip(momenta, steps, strict=True)]
    turns = list(range(len(steps))) if kind == "micro-momentum" else steps
    fades = [m if turn != last else 1.0 for m, turn, last in zip(momenta, turns, [None, *turns], strict=False)]
    sums = [x * math.prod(fades[i + 1 :]) for i, x in enumerate(own)]
    newest = [x * (turn == turns[-1]) for x, turn in zip(own, turns, strict=True)]
    return [momenta[-1] * s + x for s, x in zip(sums, newest, strict=True)] if nesterov else sums


def _fit(products: Sequence[Tensor], claim: Verdict) -> Verdict:
    """The claim with the decay of the smallest misfit, and with its relative antisymmetric part as the error."""
    moved, own, even = (torch.tensor(claim.weights, dtype=torch.float64, device="cpu") @ x for x in products)
    size = float(own.norm()) + 1e-150
    decay = 0.0 if claim.weights[-1] else float(moved @ own) / size**2
    odd = float((moved - decay * own).norm())
    error = odd / (math.hypot(odd, float(even.norm())) + 1e-150)
    return replace(claim, error=error, decay=decay, noise=odd / size / len(own) ** 0.5)


def _products(e: Evidence, split: Split) -> list[Tensor]:
    """`x' m - m' x` and `x m' - m x'` for x the change and the weight, and the sums for the change, of each column m.

    They are times random vectors, a row for each column.
    """

    def product_of(x: Tensor, m: Tensor, sign: int) -> Tensor:
        draw, parts = torch.Generator().manual_seed(0), list[Tensor]()
        for a, b in zip(_blocks(x, split), _blocks(m, split), strict=True):
            for y, z in ((a, b), (a.T, b.T)):
                probe = torch.randn(y.shape[1], min(PROBES, y.shape[1]), generator=draw, device="cpu", dtype=y.dtype)
                parts.append((y.T @ (z @ probe) + sign * z.T @ (y @ probe)).flatten())
        return torch.cat(parts).double()

    pairs = (e.moved, -1), (e.before, -1), (e.moved, 1)
    return [torch.stack([product_of(x, m, sign) for m in e.columns]) for x, sign in pairs]


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


def _closest(e: Evidence, updates: Iterable[tuple[Verdict, Tensor]]) -> Verdict:
    """The verdict whose update explains the step best, with decay, scale and error."""
    best = Verdict("undecided", 1.0)
    for verdict, update in updates:
        (decay, scale), error = regress(e.moved, [e.before, update])
        if error < best.error:
            best = replace(verdict, error=error, decay=decay, scale=scale)
    return best


def _adam(e: Evidence) -> Iterator[tuple[Verdict, Tensor]]:
    """The update of AdamW, with the stated betas or torch's."""
    (b1, b2), steps = e.seen.group.get("betas", (0.9, 0.999)), len(e.seen.groups)
    mean, square = (e.start.get(name, torch.zeros_like(e.before)) for name in ("exp_avg", "exp_avg_sq"))
    for i in range(steps):
        gradient = sum((g for step, g in e.gradients if step == i), torch.zeros_like(e.before))
        mean, square = b1 * mean + (1 - b1) * gradient, b2 * square + (1 - b2) * gradient**2
    age = steps + float(e.start["step"].max() if "step" in e.start else 0)
    root = (square / (1 - b2**age)).sqrt() + float(e.seen.group.get("eps", 1e-8))
    yield Verdict("adam", momentum=b1), mean / (1 - b1**age) / root


def _each_pass(e: Evidence) -> Iterator[tuple[Verdict, Tensor]]:
    """Sums of Newton-Schulz of every backward pass of the last step."""
    text = f"Newton-Schulz ran in each of {e.passes} backward passes of a step, and the results were added"
    stated = e.seen.momentum()
    for m, nesterov in product((0.0, 0.95 if stated is None else stated), (False, True)):
        total = torch.zeros_like(e.before)
        for count in range(len(e.gradients) - e.passes + 1, len(e.gradients) + 1):
            then = replace(e, gradients=e.gradients[:count])
            weights = _weights(then, m, nesterov, "micro-momentum")
            parts = [weight * x for weight, x in zip(weights, then.columns, strict=False)]
            total += _newton_schulz(torch.stack(parts).sum(0))
        yield Verdict("muon", momentum=m, nesterov=nesterov, wrong=(("per-micro-batch", text),)), total

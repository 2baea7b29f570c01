"""QK-clip (MuonClip; Kimi K2, arXiv:2507.20534, 2.1): scales down attention heads with too large logits.

If a step's largest logit is over the threshold, QK-clip scales the head's rows of the query and key projections, so
that the logit would have equalled the threshold. The momentum is unchanged, because Newton-Schulz would turn scaled
rows into updates in other directions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.exchange.agreement import start_max
from ..engine.tensors.dtensor import held_indices, local, storage_device


@dataclass(frozen=True)
class HeadRows:
    """Consecutive rows of a projection, and the factor on the rows of a clipped head.

    With f = threshold / largest logit (1 up to the threshold), the factor is f ** alpha for `query`,
    f ** (1 - alpha) for `key` with the smallest f of the query heads that share the key, f for `whole`, 1 for `none`.
    `head`: index among the query heads of a key head.
    """

    rows: int
    scale: Literal["query", "key", "whole", "none"]
    head: int = 0

    def __post_init__(self) -> None:
        assert self.head == 0 or self.scale in ("query", "whole"), f"{self.scale} rows belong to all heads of a group"


def query_rows(head_dim: int) -> tuple[HeadRows, ...]:
    """Rows of a query projection, (heads * head_dim, ...)."""
    return (HeadRows(head_dim, "query"),)


def key_rows(head_dim: int) -> tuple[HeadRows, ...]:
    """Rows of a key projection, (key heads * head_dim, ...)."""
    return (HeadRows(head_dim, "key"),)


def fused_rows(head_dim: int, queries: int) -> tuple[HeadRows, ...]:
    """Rows of a fused projection: for each key head `queries` query heads, then the key and the value."""
    heads = tuple(HeadRows(head_dim, "query", head) for head in range(queries))
    return (*heads, HeadRows(head_dim, "key"), HeadRows(head_dim, "none"))


def latent_query_rows(nope_dim: int, rope_dim: int) -> tuple[HeadRows, ...]:
    """Rows of latent attention's query projection: for each head a part without positions, then the rotary part."""
    # The rotary part takes the whole factor, because all heads share the rotary part of the key.
    return (HeadRows(nope_dim, "query"), HeadRows(rope_dim, "whole"))


def latent_key_rows(nope_dim: int, value_dim: int) -> tuple[HeadRows, ...]:
    """Rows of latent attention's projection to keys and values: for each head the key, then the value."""
    return (HeadRows(nope_dim, "key"), HeadRows(value_dim, "none"))


@dataclass(frozen=True)
class HeadWeight:
    """A weight or bias of the query or key projection, as a plain tensor or DTensor.

    The rows (dim 0) repeat `pattern` for each key head, or for each query head.
    """

    fqn: str
    tensor: Tensor
    pattern: tuple[HeadRows, ...]


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention.

    Attributes:
        heads: query heads over all ranks.
        weights: with all, some or no rows on this rank; empty if another pipeline stage has the layer.
        thresholds: of each query head, instead of QKClip's; `math.inf` never clips a head for its own logits.
    """

    name: str
    heads: int
    weights: tuple[HeadWeight, ...] = ()
    thresholds: tuple[float, ...] = ()


@dataclass(frozen=True)
class LogitReport:
    """The logits since the last report, equal on every rank: the largest by observed layer, and a sum over steps."""

    max_logit: dict[str, float]
    heads_above_threshold: int


class QKClip:
    """Observes the largest attention logit of each head, and clips the heads above the threshold after a step.

    Call `observe` in every forward, optionally `start_reduce` before the optimizer's step, and `apply` after the step.
    The host does not wait.

    Args:
        layers: every layer of the model, equal on all ranks except for `weights`.
        threshold: largest accepted logit, > 0, in layers without thresholds; Kimi K2 was trained with 100.
        alpha: share of the factor for queries, in [0, 1]; the rest is for keys.
        clips: whether to scale weights, or only report logits.
        device: of the logits; by default of the first weight.
        group: ranks with all tokens and heads of a step; None for the default group.

    Raises:
        ValueError: at construction, for a repeated layer, thresholds that do not fit the heads, a pattern that does not
            fit the rows, a partial sum, or local storage that contradicts the placement; in the first step, for an
            unobserved layer on this rank.
    """

    def __init__(
        self,
        layers: Iterable[AttentionLayer],
        *,
        threshold: float = 100.0,
        alpha: float = 0.5,
        clips: bool = True,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.layers = tuple(layers)
        if not (threshold > 0 and 0 <= alpha <= 1):
            raise ValueError(f"threshold = {threshold} must be more than 0, and alpha = {alpha} from 0 to 1")
        self.alpha, self.group = alpha, group
        # By layer, the index of the first head, and the number of heads.
        self._places, heads = dict[str, tuple[int, int]](), 0
        thresholds: list[float] = []
        for layer in self.layers:
            if layer.name in self._places:
                raise ValueError(f"{layer.name}: given twice; give every layer once")
            self._places[layer.name] = heads, layer.heads
            heads += layer.heads
            thresholds += layer.thresholds or [threshold] * layer.heads
            if len(thresholds) != heads or not all(value > 0 for value in thresholds):
                raise ValueError(f"{layer.name}: thresholds must be {layer.heads} numbers above 0, one for each head")
        weights = [weight for layer in self.layers for weight in layer.weights]
        if device is None:
            device = storage_device(weights[0].tensor) if weights else torch.device("cpu")
        self._logits = torch.full((heads,), -torch.inf, device=device)
        self._largest = self._logits.clone()
        self.thresholds = torch.tensor(thresholds, dtype=torch.float32, device=device)
        """(heads of all layers,) float32."""
        self._above = torch.zeros((), dtype=torch.int64, device=device)
        self._pending: dist.Work | None = None
        self._reduced = False
        self._observed: set[str] = set()
        rows = _ScaledRows(self.layers, self._places, heads) if clips else None
        self._rows = rows if rows is not None and rows.weights else None

    def observe(self, name: str, logits_max: Tensor, first_head: int = 0) -> None:
        """Record the largest logits of a layer, shape (heads,). A rank with only some heads passes `first_head`.

        A logit is the number before the softmax: q · k times the attention's scale, 1 / sqrt(head_dim) by default.
        """
        view = self.logits(name, first_head, len(logits_max))
        view.copy_(torch.maximum(view, logits_max.detach()))

    def logits(self, name: str, first_head: int, count: int) -> Tensor:
        """The buffer of `count` heads, to update the maxima in place."""
        if name not in self._places:
            raise ValueError(f"{name!r} is none of the layers: {', '.join(self._places)}")
        start, heads = self._places[name]
        if not 0 <= first_head <= first_head + count <= heads:
            raise ValueError(f"{name}: has {heads} heads, and not {count} from {first_head} on")
        self._observed.add(name)
        return self._logits[start + first_head : start + first_head + count]

    @torch.no_grad()
    def start_reduce(self) -> None:
        """Start the maximum over ranks, after the last backward of a step. Collective."""
        # Not before, because activation checkpointing recomputes logits.
        assert not self._reduced, "the last step was not applied"
        unseen = [layer.name for layer in self.layers if layer.weights and layer.name not in self._observed]
        if unseen:
            raise ValueError(f"{', '.join(unseen)}: nothing has observed these layers; call observe in their forward")
        self._reduced = True
        self._pending = start_max(self._logits, self.group)

    @torch.no_grad()
    def apply(self) -> None:
        """Scale the weights, after the optimizer's step. Collective."""
        if not self._reduced:
            self.start_reduce()
        if self._pending is not None:
            self._pending.wait()
        above = (self._logits > self.thresholds) & self._logits.isfinite()
        if self._rows is not None:
            # A condition would block the host. Non-finite logits would destroy the head.
            self._rows.scale(torch.where(above, self.thresholds / self._logits, 1.0), self.alpha)
        torch.maximum(self._largest, self._logits, out=self._largest)
        self._above += above.sum()
        self._logits.fill_(-torch.inf)
        self._pending, self._reduced = None, False

    def report(self) -> LogitReport:
        """The report since the last call. Waits for the device."""
        values, above = self._largest.tolist(), int(self._above.item())
        self._largest.fill_(-torch.inf)
        self._above.zero_()
        largest = {name: max(values[start : start + heads]) for name, (start, heads) in self._places.items()}
        return LogitReport({name: value for name, value in largest.items() if value != -torch.inf}, above)


class _ScaledRows:
    """The rows of all weights on this rank, with an index into a table of factors: 1, then f ** alpha of each query
    head, then f of each query head, then by weight f ** (1 - alpha) of each key head.
    """

    def __init__(self, layers: Sequence[AttentionLayer], places: dict[str, tuple[int, int]], heads: int) -> None:
        self.weights: list[HeadWeight] = []
        sharing: list[list[int]] = []
        entries = []
        for layer in layers:
            start, _ = places[layer.name]
            for weight in layer.weights:
                group, repeats = _group_size(layer, weight)
                pattern = _entries(weight, start, group, repeats, heads, 1 + 2 * heads + len(sharing))
                sharing += [[start + repeat * group + head for head in range(group)] for repeat in range(repeats)]
                rows = _held_rows(weight)
                if len(rows):
                    self.weights.append(weight)
                    entries.append(pattern[rows])
        device = storage_device(self.weights[0].tensor) if self.weights else torch.device("cpu")
        self._sizes = [len(entry) for entry in entries]
        self._entries = torch.cat(entries).to(device) if entries else torch.empty(0)
        widest = max((len(group) for group in sharing), default=0)
        # Repeating a head does not change the minimum.
        self._sharing = torch.tensor([group + group[:1] * (widest - len(group)) for group in sharing], device=device)

    def scale(self, factors: Tensor, alpha: float) -> None:
        # Weights may be on the host.
        factors = factors.to(self._entries.device)
        keys = factors[self._sharing].amin(1)
        table = torch.cat([factors.new_ones(1), factors**alpha, factors, keys ** (1 - alpha)])
        tensors = [local(weight.tensor) for weight in self.weights]
        rows = table[self._entries].split(self._sizes)
        pairs = zip(rows, tensors, strict=True)
        torch._foreach_mul_(tensors, [row.view(-1, *[1] * (tensor.ndim - 1)) for row, tensor in pairs])


def _group_size(layer: AttentionLayer, weight: HeadWeight) -> tuple[int, int]:
    """Query heads in a repeat of the pattern, and number of repeats."""
    height, rows = sum(part.rows for part in weight.pattern), len(weight.tensor)
    repeats = rows // height
    if rows % height or repeats == 0 or layer.heads % repeats:
        problem = f"{rows} rows are not repeats of {height} rows for {layer.heads} heads"
        raise ValueError(f"{weight.fqn}: {problem}; correct the pattern or the layer's heads")
    group = layer.heads // repeats
    if any(part.head >= group for part in weight.pattern):
        raise ValueError(f"{weight.fqn}: the pattern has more than the {group} heads of a repeat; correct the pattern")
    return group, repeats


def _entries(weight: HeadWeight, start: int, group: int, repeats: int, heads: int, keys: int) -> Tensor:
    """The table index of each row. `keys`: index of the weight's first key head."""
    numbers = torch.arange(repeats, device="cpu")
    first = {
        "none": torch.zeros_like(numbers),
        "query": 1 + start + numbers * group,
        "whole": 1 + heads + start + numbers * group,
        "key": keys + numbers,
    }
    parts = [(first[part.scale] + part.head, part.rows) for part in weight.pattern]
    return torch.cat([entry[:, None].expand(-1, rows) for entry, rows in parts], 1).flatten()


def _held_rows(weight: HeadWeight) -> Tensor:
    """Indices of the rows on this rank, in storage order."""
    rows, *others = held_indices(weight.tensor)
    stored = local(weight.tensor)
    if stored.numel() == 0:
        return rows[:0]
    shape = tuple(map(len, (rows, *others)))
    # DTensor's placements are wrong for some uneven shards.
    if tuple(stored.shape) != shape:
        raise ValueError(f"{weight.fqn}: stores {tuple(stored.shape)} here, but its placements say {shape}")
    return rows

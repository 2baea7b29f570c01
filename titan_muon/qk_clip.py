"""QK-clip (MuonClip; Kimi K2, arXiv:2507.20534, 2.1): heads whose attention logits grow too large are scaled down.

Muon's updates have full rank, and the largest logit of a head can grow without bound. After a step, the rows of the
query and key projections of a head whose largest logit of that step is over the threshold are scaled so that it would
have been the threshold. Momentum is left as it is: it averages gradients, and scaling some of its rows would turn the
next updates, of which Newton-Schulz keeps directions and no scale, away from those gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .comm.agreement import start_max
from .tensors.dtensor import held_indices, local, storage_device


@dataclass(frozen=True)
class HeadRows:
    """Consecutive rows of a projection, and what they are multiplied by when their head is clipped.

    With f = threshold / largest logit of a head, 1 where that is within the threshold: f ** alpha for `query`,
    f ** (1 - alpha) for `key` with the smallest f of the query heads that share the key, f for `whole`, 1 for `none`.

    Attributes:
        rows: how many.
        head: which of the query heads that share a key head they belong to; 0 where each has its own.
    """

    rows: int
    scale: Literal["query", "key", "whole", "none"]
    head: int = 0

    def __post_init__(self) -> None:
        assert self.head == 0 or self.scale in ("query", "whole"), f"{self.scale} rows belong to all heads of a group"


def query_rows(head_dim: int) -> tuple[HeadRows, ...]:
    """The pattern of a query projection, (heads * head_dim, ...)."""
    return (HeadRows(head_dim, "query"),)


def key_rows(head_dim: int) -> tuple[HeadRows, ...]:
    """The pattern of a key projection, (key heads * head_dim, ...)."""
    return (HeadRows(head_dim, "key"),)


def fused_rows(head_dim: int, queries: int) -> tuple[HeadRows, ...]:
    """The pattern of a fused projection: for each key head the `queries` query heads that share it, key and value."""
    own = tuple(HeadRows(head_dim, "query", head) for head in range(queries))
    return (*own, HeadRows(head_dim, "key"), HeadRows(head_dim, "none"))


def latent_query_rows(nope_dim: int, rope_dim: int) -> tuple[HeadRows, ...]:
    """The pattern of latent attention's query projection: for each head a part without positions, then the rotary part.

    All heads share the rotary part of the key, which is never scaled, so that of the query takes the whole factor.
    """
    return (HeadRows(nope_dim, "query"), HeadRows(rope_dim, "whole"))


def latent_key_rows(nope_dim: int, value_dim: int) -> tuple[HeadRows, ...]:
    """The pattern of latent attention's projection to keys and values: for each head its key, then its value."""
    return (HeadRows(nope_dim, "key"), HeadRows(value_dim, "none"))


@dataclass(frozen=True)
class HeadWeight:
    """A weight, or bias, that makes queries or keys: a plain tensor or a DTensor, of any placement but partial.

    Attributes:
        fqn: its name.
        tensor: its rows (dim 0) are `pattern`, again and again: once for each key head, or for each query head.
    """

    fqn: str
    tensor: Tensor
    pattern: tuple[HeadRows, ...]


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention.

    Attributes:
        heads: query heads of the whole layer, whatever of them this rank computes.
        weights: of which this rank may hold all, some or no rows; none where another pipeline stage has the layer.
    """

    name: str
    heads: int
    weights: tuple[HeadWeight, ...] = ()


@dataclass(frozen=True)
class LogitReport:
    """What attention did in the steps since the last report, equal on every rank.

    Attributes:
        max_logit: the largest logit of each layer; a layer that nothing observed is absent.
        heads_above_threshold: how often a head was, summed over heads and steps.
    """

    max_logit: dict[str, float]
    heads_above_threshold: int


class QKClip:
    """Observes the largest attention logit of each head, and clips the heads above the threshold after a step.

    In each step: `observe` in every forward pass, `start_reduce` before the optimizer's step (or not at all), `apply`
    after it. Neither waits for the device.

    Args:
        layers: every layer of the model, the same on all ranks but for `weights`.
        threshold: largest logit, > 0, that is let be; Kimi K2 was trained with 100.
        alpha: share of the factor that queries take, in [0, 1]; keys take the rest.
        clips: whether weights are scaled; if not, logits are observed and reported alone.
        device: device of the logits; by default that of the first weight.
        group: ranks that together have seen all tokens and all heads of a step, the default group if None.

    Raises:
        ValueError: at construction, for a layer given twice, a weight whose rows its pattern does not fill, and one
            that is placed as a partial sum or is not stored as its placement says; in the first step, for a layer here
            that nothing has observed.
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
        self.threshold, self.alpha, self.group = threshold, alpha, group
        self._places = dict(_places(self.layers))
        heads = sum(layer.heads for layer in self.layers)
        weights = [weight for layer in self.layers for weight in layer.weights]
        if device is None:
            device = storage_device(weights[0].tensor) if weights else torch.device("cpu")
        # One buffer for all layers, so that one collective reduces them.
        self._logits = torch.full((heads,), -torch.inf, device=device)
        self._largest = self._logits.clone()
        self._above = torch.zeros((), dtype=torch.int64, device=device)
        self._pending: dist.Work | None = None
        self._reduced = False
        self._observed: set[str] = set()
        rows = _ScaledRows(self.layers, self._places, heads) if clips else None
        self._rows = rows if rows is not None and rows.weights else None

    def observe(self, name: str, logits_max: Tensor, first_head: int = 0) -> None:
        """Take in the largest logits that one forward pass of layer `name` has seen, shape (heads,).

        Several passes count by their largest: micro-batches, and forwards that are computed again. A rank that
        computes some of the heads gives theirs, from `first_head` on.
        """
        view = self.logits(name, first_head, len(logits_max))
        view.copy_(torch.maximum(view, logits_max.detach()))

    def logits(self, name: str, first_head: int, count: int) -> Tensor:
        """The buffer of `count` heads of layer `name`, for an attention that keeps its maxima there by itself."""
        if name not in self._places:
            raise ValueError(f"{name!r} is none of the layers: {', '.join(self._places)}")
        start, heads = self._places[name]
        if not 0 <= first_head <= first_head + count <= heads:
            raise ValueError(f"{name}: has {heads} heads, and not {count} from {first_head} on")
        self._observed.add(name)
        return self._logits[start + first_head : start + first_head + count]

    @torch.no_grad()
    def start_reduce(self) -> None:
        """Begin the maximum over ranks. Every rank of the group calls it, once all forwards of a step are done."""
        # Not while backward runs: what activation checkpointing computes again is observed again.
        assert not self._reduced, "the step before was not applied"
        unseen = [layer.name for layer in self.layers if layer.weights and layer.name not in self._observed]
        if unseen:
            raise ValueError(f"{', '.join(unseen)}: nothing has observed these layers; call observe in their forward")
        self._reduced = True
        self._pending = start_max(self._logits, self.group)

    @torch.no_grad()
    def apply(self) -> None:
        """Scale the weights by what was reduced, and begin the next step. Every rank calls it, after its optimizer."""
        if not self._reduced:
            self.start_reduce()
        if self._pending is not None:
            self._pending.wait()
        above = (self._logits > self.threshold) & self._logits.isfinite()
        if self._rows is not None:
            # Multiplied always, by 1 where nothing is clipped: an `if` would have the host wait for the device.
            # A logit that is not finite clips nothing: its factor, 0 or NaN, would spoil a head for good.
            self._rows.scale(torch.where(above, self.threshold / self._logits, 1.0), self.alpha)
        torch.maximum(self._largest, self._logits, out=self._largest)
        self._above += above.sum()
        self._logits.fill_(-torch.inf)
        self._pending, self._reduced = None, False

    def report(self) -> LogitReport:
        """What happened since the last report. Waits for the device."""
        values, above = self._largest.tolist(), int(self._above.item())
        self._largest.fill_(-torch.inf)
        self._above.zero_()
        found = {name: max(values[start : start + heads]) for name, (start, heads) in self._places.items()}
        return LogitReport({name: value for name, value in found.items() if value != -torch.inf}, above)


def _places(layers: Sequence[AttentionLayer]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Where each layer's heads are among all heads: the first, and how many."""
    start, names = 0, set()
    for layer in layers:
        if layer.name in names:
            raise ValueError(f"{layer.name}: given twice; give every layer once")
        names.add(layer.name)
        yield layer.name, (start, layer.heads)
        start += layer.heads


class _ScaledRows:
    """The rows that this rank holds of all weights, and which factor of a table multiplies each."""

    # The table, anew in each step: 1, then for each query head its power alpha, and its factor as it is, then for each
    # key head of each weight. One gather of it serves every row of every weight.

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
                held = _held_rows(weight)
                if len(held):
                    self.weights.append(weight)
                    entries.append(pattern[held])
        device = storage_device(self.weights[0].tensor) if self.weights else torch.device("cpu")
        self._sizes = [len(entry) for entry in entries]
        self._entries = torch.cat(entries).to(device) if entries else torch.empty(0)
        widest = max((len(group) for group in sharing), default=0)
        # Shorter groups repeat a head, which changes no minimum.
        self._sharing = torch.tensor([group + group[:1] * (widest - len(group)) for group in sharing], device=device)

    def scale(self, factors: Tensor, alpha: float) -> None:
        """Multiply the rows held here; `factors` has one for each query head."""
        # Weights may be on the host while logits are on the device.
        factors = factors.to(self._entries.device)
        keys = factors[self._sharing].amin(1)
        table = torch.cat([factors.new_ones(1), factors**alpha, factors, keys ** (1 - alpha)])
        tensors = [local(weight.tensor) for weight in self.weights]
        rows = table[self._entries].split(self._sizes)
        pairs = zip(rows, tensors, strict=True)
        torch._foreach_mul_(tensors, [row.view(-1, *[1] * (tensor.ndim - 1)) for row, tensor in pairs])


def _group_size(layer: AttentionLayer, weight: HeadWeight) -> tuple[int, int]:
    """Query heads that share a repeat of the weight's pattern, and the number of repeats."""
    height, rows = sum(part.rows for part in weight.pattern), len(weight.tensor)
    repeats = rows // height
    if rows % height or repeats == 0 or layer.heads % repeats:
        what = f"{height} rows for each, or each few, of {layer.heads} heads"
        raise ValueError(f"{weight.fqn}: its {rows} rows are not {what}; correct its pattern or the layer's heads")
    group = layer.heads // repeats
    if any(part.head >= group for part in weight.pattern):
        raise ValueError(f"{weight.fqn}: its pattern has rows of more than the {group} heads that share a repeat of it")
    return group, repeats


def _entries(weight: HeadWeight, start: int, group: int, repeats: int, heads: int, keys: int) -> Tensor:
    """For each row of the whole weight its entry of the table; `keys` is that of the weight's first key head."""
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
    """Indices of the rows whose elements this rank stores, in the order of its storage."""
    rows, *others = held_indices(weight.tensor)
    stored = local(weight.tensor)
    if stored.numel() == 0:
        return rows[:0]
    shape = tuple(map(len, (rows, *others)))
    # DTensor's own spec is wrong for some uneven shards: rows of other heads would be scaled.
    if tuple(stored.shape) != shape:
        raise ValueError(f"{weight.fqn}: stores {tuple(stored.shape)} here, but its placements say {shape}")
    return rows

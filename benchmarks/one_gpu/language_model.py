"""Muon beside AdamW on one GPU: a decoder of 42 M parameters on real text, with equal weights, batches and schedule.

    python -m benchmarks.one_gpu.language_model --runs muon:2e-3 adamw:2e-3 --tokens 4e7 --device cuda --json runs.json

A run is an optimizer and a learning rate. Muon's updates have AdamW's root mean square, so that rates are comparable.
Runs that find no time are named. Figures are renewed after each run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.one_gpu.corpus import Tokens, tokens
from titan_muon import Expert, Muon

DECAY, BETAS = 0.1, (0.9, 0.95)
WARM_STEPS = 10
"""Untimed steps, among them the compilation."""
POINTS = 10
"""Validations of a run."""
TIMED = 50
"""Steps between two timed steps of the optimizers."""
CURVE = 200
"""Most training losses in the figures."""


@dataclass(frozen=True)
class Setup:
    """Sizes of model, data and training."""

    dim: int = 512
    layers: int = 8
    heads: int = 8
    ffn: int = 1408
    vocabulary: int = 16_384
    sequence: int = 1024
    batch: int = 64
    characters: int = 300_000_000
    validated: int = 512
    tokens: float = 4e7

    @property
    def steps(self) -> int:
        """Number of steps of a run."""
        return max(2, int(self.tokens // (self.batch * self.sequence)))


TINY = Setup(32, 2, 2, 96, 300, 32, 4, 200_000, 8, 4 * 4 * 32)
"""For a rehearsal on the CPU in seconds."""


class Block(nn.Module):
    """Attention with rotary embeddings and a gated feed-forward, each after a normalization."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        dim, ffn, linear = setup.dim, setup.ffn, partial(nn.Linear, bias=False)
        self.heads = setup.heads
        self.wq, self.wk, self.wv, self.wo = (linear(dim, dim) for _ in range(4))
        self.w1, self.w3, self.w2 = linear(dim, ffn), linear(dim, ffn), linear(ffn, dim)
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """From (batch, sequence, dim) to the same shape."""
        h = self.norm1(x)
        q, k, v = (w(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (batch, heads, sequence, size)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Decoder(nn.Module):
    """Decoder that returns the loss of the next token."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.embedding = nn.Embedding(setup.vocabulary, setup.dim)
        self.layers = nn.ModuleList(Block(setup) for _ in range(setup.layers))
        self.norm, self.head = nn.RMSNorm(setup.dim), nn.Linear(setup.dim, setup.vocabulary, bias=False)
        half = setup.dim // setup.heads // 2
        angle = torch.arange(setup.sequence)[:, None] * 10_000.0 ** -(torch.arange(half) / half)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("wo.weight", "w2.weight"))
                nn.init.trunc_normal_(parameter, std=0.02 / (math.sqrt(2 * setup.layers) if deep else 1.0))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of (batch, sequence) tokens."""
        x = self.embedding(inputs)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def optimizers_of(kind: str, model: nn.Module, lr: float) -> list[Optimizer]:
    """The optimizers of a run: `kind` for the layers' matrices, AdamW for the rest."""
    named = list(model.named_parameters())
    is_cuda = named[0][1].is_cuda
    adamw = partial(torch.optim.AdamW, lr=lr, betas=BETAS, weight_decay=DECAY, fused=is_cuda)
    if kind == "adamw":
        return [adamw(model.parameters())]
    matrices = [(name, p) for name, p in named if name.startswith("layers") and p.ndim == 2]
    rest = [p for name, p in named if not (name.startswith("layers") and p.ndim == 2)]
    kinds: Mapping[str, Callable[[], Optimizer]] = {
        "muon": lambda: Muon(matrices, lr=lr, weight_decay=DECAY),
        "muon_fused": lambda: Muon(matrices, lr=lr, weight_decay=DECAY, expert=Expert(fused=is_cuda)),
        "normuon": lambda: Muon(matrices, lr=lr, weight_decay=DECAY, algorithm="normuon"),
        "torch_muon": lambda: torch.optim.Muon(
            [p for _, p in matrices], lr=lr, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
        ),
    }
    return [kinds[kind](), adamw(rest)]


def schedule(step: int, steps: int) -> float:
    """Factor on the learning rate: linear warm-up over 5 %, then linear decay to a tenth."""
    warm = max(1, steps // 20)
    return min((step + 1) / warm, 1.0) * (1 - 0.9 * max(0, step - warm) / max(1, steps - warm))


class Run:
    """A run: the model, its optimizers, and the data on a device."""

    def __init__(self, kind: str, lr: float, setup: Setup, data: Tokens, device: torch.device, *, backend: str):
        torch.manual_seed(0)
        self.setup, self.device = setup, device
        self.model: nn.Module = Decoder(setup).to(device)
        self.trained = torch.compile(self.model, dynamic=False, backend=backend) if backend else self.model
        self.optimizers = optimizers_of(kind, self.model, lr)
        self.rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.training = data.training.to(device)
        rows = (len(data.validation) - 1) // setup.sequence
        held = data.validation[: rows * setup.sequence + 1].long()
        self.held = [part.view(rows, setup.sequence)[: setup.validated] for part in (held[:-1], held[1:])]
        self.generator = torch.Generator().manual_seed(1)
        self.events: list[Any] = []

    def loss(self, model: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """Loss in bfloat16 where that is usual."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return model(inputs, targets)

    def batch(self) -> Tensor:
        """(batch, sequence + 1) tokens, equal in all runs."""
        length = self.setup.sequence
        last = len(self.training) - length - 1
        starts = torch.randint(last, (self.setup.batch,), generator=self.generator).to(self.device, non_blocking=True)
        return self.training[starts[:, None] + torch.arange(length + 1, device=self.device)].long()

    def step(self, number: int) -> Tensor:
        """A training step. Returns the loss on the device."""
        tokens_ = self.batch()
        loss = self.loss(self.trained, tokens_[:, :-1], tokens_[:, 1:])
        loss.backward()
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(number, self.setup.steps)
        self.update(timed=self.device.type == "cuda" and number % TIMED == TIMED // 2)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def update(self, *, timed: bool) -> None:
        """Step the optimizers, between two events if `timed`."""
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if timed else []
        for event in pair[:1]:
            event.record()
        for optimizer in self.optimizers:
            optimizer.step()
        for event in pair[1:]:
            event.record()
        self.events += [pair] if pair else []

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss of the held-out rows."""
        pairs = zip(*(part.split(self.setup.batch) for part in self.held), strict=True)
        sums = [self.loss(self.model, x.to(self.device), y.to(self.device)) * len(x) for x, y in pairs]
        return float(torch.stack(sums).sum()) / len(self.held[0])

    def figures(self) -> dict[str, Any]:
        """Train, and return losses, speed and memory."""
        setup, steps, is_cuda = self.setup, self.setup.steps, self.device.type == "cuda"
        losses, points, spent, warm = [], [], 0.0, min(WARM_STEPS, steps - 1)
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        for number in range(steps):
            losses.append(self.step(number))
            if (number + 1) % max(1, steps // POINTS) == 0 or number + 1 == steps or number + 1 == warm:
                float(losses[-1])
                spent += time.perf_counter() - begin if number >= warm else 0.0
                if number + 1 != warm:
                    points.append([(number + 1) * setup.batch * setup.sequence, self.validate()])
                begin = time.perf_counter()
        optimizer_ms = [first.elapsed_time(last) for first, last in self.events]
        curve = torch.stack(losses).float().tolist()
        return {
            "steps": steps,
            "loss": points[-1][1],
            "tokens per second": (steps - warm) * setup.batch * setup.sequence / spent,
            "optimizer ms": median(optimizer_ms) if optimizer_ms else None,
            "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None,
            "validation": points,
            "losses": curve[:: max(1, steps // CURVE)],
        }


def main(words: Sequence[str]) -> int:
    """Train the runs in order. Returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True, help="optimizer:rate")
    parser.add_argument("--tokens", type=float, default=4e7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no run begins that would end later")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--compile", default="", help="backend of torch.compile; none without")
    parser.add_argument("--tiny", action="store_true", help="for a rehearsal in seconds")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/titan_muon/corpus")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(words)
    setup = TINY if options.tiny else replace(Setup(), tokens=options.tokens)
    begin, longest = time.perf_counter(), 0.0
    torch.set_float32_matmul_precision("high")
    data = tokens(options.cache, setup.vocabulary, setup.characters)
    rows: list[dict[str, Any]] = []
    curves: dict[str, dict[str, Any]] = {}
    facts = {"training tokens": len(data.training), "validation tokens": len(data.validation)}
    print(f"{facts}, {time.perf_counter() - begin:.0f} s", flush=True)
    for name in options.runs:
        kind, lr = name.split(":")
        row: dict[str, Any] = {"optimizer": kind, "lr": float(lr)}
        started = time.perf_counter()
        if started - begin + longest > options.seconds:
            row["fault"] = "no time left"
        else:
            try:
                device = torch.device(options.device)
                row |= Run(kind, float(lr), setup, data, device, backend=options.compile).figures()
            except Exception as error:
                # One run must not cost the others.
                row["fault"] = f"{type(error).__name__}: {error}"[:300]
            longest = max(longest, time.perf_counter() - started)
        # Lists are for a picture, and no cells of a table.
        curves[name] = {key: row.pop(key) for key in ("validation", "losses") if key in row}
        rows.append(row)
        print(row, flush=True)
        document = {"rows": rows, **facts, "details": curves}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(row.get("fault", "no time left") != "no time left" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

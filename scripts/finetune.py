"""Pretrain a small language model with AdamW or Muon, and finetune it with either: the four losses, over seeds.

    python scripts/finetune.py --out docs/results

Pretraining of the byte-level transformer uses the source text of Python's standard library, and finetuning the English
text of Python's help topics. Each finetuning rate is the best of --rates by the loss on held-out help text.
The script writes finetune.json and finetune.md, in minutes on a CPU.
"""

import json
import pydoc_data.topics
import sys
import time
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from compare.sweep_report import commit, spread

from titan_muon import Hybrid

OPTIMIZERS = ("adamw", "muon")
LIBRARY = Path(json.__file__).parents[1]
HELD_OUT = 0.1
"""Held-out share of each text, at the end."""


@dataclass(frozen=True)
class Arguments:
    """Pretrain and finetune a small model."""

    out: Path
    """Folder for finetune.json and finetune.md."""
    pretrain_steps: int = 300
    """Steps of pretraining."""
    finetune_steps: int = 60
    """Steps of finetuning."""
    seeds: int = 3
    """Seeds of weights and batches."""
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    """Rates of finetuning. Pretraining has the rate 2e-3."""
    dim: int = 64
    """Width of the model."""
    batch: int = 16
    """Sequences of 64 bytes in a step."""


class Block(nn.Module):
    """A transformer layer with four heads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A byte-level language model of two layers for sequences of 64 bytes."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.tok_embeddings, self.pos_embeddings = nn.Embedding(256, dim), nn.Embedding(64, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(tokens.size(1)))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


@dataclass(frozen=True)
class Text:
    """Bytes of a text to train on, and held-out bytes."""

    train: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, text: str) -> "Text":
        tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        size = int(len(tokens) * (1 - HELD_OUT))
        return cls(tokens[:size], tokens[size:])


def texts() -> tuple[Text, Text]:
    """Python's source text, and its help text."""
    sources = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in sorted(LIBRARY.glob("*.py")))
    return Text.of(sources), Text.of("".join(pydoc_data.topics.topics.values()))


def batches(text: Tensor, batch: int, steps: int, seed: int) -> Iterable[Tensor]:
    """(batch, 65) tokens of each step, from random places."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - 65, (batch,), generator=generator)
        yield torch.stack([text[start : start + 65] for start in starts.tolist()]).long()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of the next bytes, for tokens (batch, 65)."""
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluated(model: nn.Module, text: Text) -> float:
    """Mean loss on held-out text, in nats per byte."""
    return mean(loss_of(model, tokens).item() for tokens in batches(text.held_out, 64, 8, seed=0))


def train(model: nn.Module, optimizer: str, lr: float, text: Text, arguments: Arguments, steps: int, seed: int) -> None:
    """Train with a linear warm-up and decay. Under Muon, AdamW trains embeddings, head and norms at the same rate."""
    trained: torch.optim.Optimizer = (
        Hybrid(model, lr)
        if optimizer == "muon"
        else torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.1)
    )
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        trained, lambda step: min((step + 1) / warm, max(0.05, 1 - step / steps))
    )
    for tokens in batches(text.train, arguments.batch, steps, seed):
        trained.zero_grad()
        loss_of(model, tokens).backward()
        trained.step()
        schedule.step()


def experiment(arguments: Arguments) -> list[dict[str, Any]]:
    """A row for each seed, pretraining, finetuning and rate."""
    torch.set_num_threads(1)
    source, topics = texts()
    rows = []
    for seed in range(arguments.seeds):
        for first in OPTIMIZERS:
            torch.manual_seed(seed)
            pretrained = Model(arguments.dim)
            train(pretrained, first, 2e-3, source, arguments, arguments.pretrain_steps, seed)
            before = {"source_before": evaluated(pretrained, source), "help_before": evaluated(pretrained, topics)}
            for second in OPTIMIZERS:
                for lr in arguments.rates:
                    model = deepcopy(pretrained)
                    train(model, second, lr, topics, arguments, arguments.finetune_steps, 1000 + seed)
                    after = {"help": evaluated(model, topics), "source": evaluated(model, source)}
                    rows.append({"seed": seed, "pretrain": first, "finetune": second, "lr": lr, **before, **after})
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def page(study: dict[str, Any]) -> str:
    """The Markdown page of an experiment."""
    lines = [
        "# Finetuning with another optimizer than in pretraining",
        "",
        "Held-out losses of a byte-level transformer with two layers, in nats per byte, at the best finetuning rate:",
        "mean ± standard deviation over seeds. Pretraining reads source text, finetuning reads help text. The model is",
        "tiny and trains for seconds: an experiment to repeat on your model, not a result about language models.",
        "",
        f"Written by `{study['command']}` on {study['date']}, commit {study['commit']}, PyTorch {study['torch']}.",
        "",
        "| pretrained with | finetuned with | best rate | help text | source text before | source text after |",
        "|---|---|---|---|---|---|",
    ]
    for first in OPTIMIZERS:
        for second in OPTIMIZERS:
            rows = [row for row in study["rows"] if (row["pretrain"], row["finetune"]) == (first, second)]
            rates = sorted({row["lr"] for row in rows})
            best = min((mean(row["help"] for row in rows if row["lr"] == lr), lr) for lr in rates)[1]
            chosen = [row for row in rows if row["lr"] == best]
            cells = [spread([row[key] for row in chosen]) for key in ("help", "source_before", "source")]
            lines.append(f"| {first} | {second} | {best:g} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(arguments: Arguments) -> dict[str, Any]:
    """Run the experiment and write the two files."""
    begin = time.process_time()
    rows = experiment(arguments)
    size = {name: value for name, value in asdict(arguments).items() if name != "out"}
    keys = [f"--{name} {' '.join(map(str, v)) if isinstance(v, tuple) else v}" for name, v in size.items()]
    study = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "command": " ".join(["python scripts/finetune.py --out docs/results", *keys]),
        "cpu_minutes": round((time.process_time() - begin) / 60, 1),
        "torch": torch.__version__,
        "rows": rows,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "finetune.json").write_text(json.dumps(study, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "finetune.md").write_text(page(study), encoding="utf-8")
    return study


if __name__ == "__main__":
    main(tyro.cli(Arguments))

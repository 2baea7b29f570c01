"""Train small recipes with every update rule and AdamW, over rates and seeds: a table, JSON and a picture.

    python scripts/study_rules.py --out docs/results

One process trains one run after the other, from TorchTitan's trainer without checkpoints and validation. A run's loss
is the mean training loss of its last steps. No text repeats within a run, so this is a loss on unseen text. A run that
diverges has the loss infinity. The JSON is written after each run; a repeated command goes on where the last one ended.
"""

import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist
import tyro

ROOT = Path(__file__).resolve().parents[1]
# Run as a script, a file finds only its own folder.
sys.path.insert(0, str(ROOT))

import models  # noqa: F401 (registers the families)
from titan_muon.titan.recipe import Recipe, load

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
CONTENDERS: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "muon": (("--muon.lr", "{lr}"), RATES),
    "normuon": (("--muon.rule", "normuon", "--muon.lr", "{lr}"), RATES),
    "adamuon": (("--muon.rule", "adamuon", "--muon.lr", "{lr}"), RATES),
    "muonh": (("--muon.rule", "muonh", "--muon.weight_decay", "0.0", "--muon.lr", "{lr}"), (0.01, 0.02, 0.04, 0.08)),
    "adamw": (("--adamw.lr", "{lr}"), RATES),
}
"""Keys of a recipe with a rate, and the rates, by name. MuonH's rate is an angle."""
RECIPES = {
    "dense": "llama_muon.toml",
    "moe": "qwen_moe_muon.toml",
}
ADAMW = "qwen_moe_adamw.toml"
"""The recipe that gives AdamW every parameter."""
QUIET = (
    *("--validator.enable", "false", "--checkpoint.enable", "false", "--metrics.enable_tensorboard", "false"),
    *("--metrics.log_freq", "1"),
)
COLORS = {"muon": "#0072B2", "normuon": "#009E73", "adamuon": "#CC79A7", "muonh": "#D55E00", "adamw": "#555555"}


@dataclass(frozen=True)
class Run:
    """A run and its result. `losses`: training loss by step, in nats per token."""

    recipe: str
    contender: str
    lr: float
    seed: int
    losses: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[str, str, float, int]:
        return self.recipe, self.contender, self.lr, self.seed

    def final(self, steps: int) -> float:
        """The mean loss of the last tenth of the steps; infinity for a run that ended early."""
        last = max(1, steps // 10)
        return mean(self.losses[-last:]) if len(self.losses) == steps else math.inf


@dataclass(frozen=True)
class Arguments:
    """Train small recipes with every rule."""

    out: Path
    """Folder for rules.json, rules.md and rules.png."""
    steps: int = 120
    """Steps of each run."""
    batch: int = 4
    """Sequences in a step."""
    seq_len: int = 128
    """Tokens in a sequence."""
    seeds: int = 3
    """Seeds of the initial weights and the order of the text."""
    recipes: tuple[str, ...] = tuple(RECIPES)
    """Recipes by name: dense, moe."""
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    """Rules, and adamw."""

    def __post_init__(self) -> None:
        for name, known in (("recipes", RECIPES), ("contenders", CONTENDERS)):
            if unknown := sorted(set(getattr(self, name)) - set(known)):
                raise SystemExit(f"--{name}: {', '.join(unknown)} is unknown; choose from: {', '.join(known)}")
        if self.steps < 10 or self.seeds < 1:
            raise SystemExit("--steps must be at least 10, and --seeds at least 1")


def runs(arguments: Arguments) -> Iterator[Run]:
    """All runs, seed by seed, so that an interrupted study has whole seeds."""
    for seed in range(arguments.seeds):
        for recipe in arguments.recipes:
            for contender in arguments.contenders:
                yield from (Run(recipe, contender, lr, seed) for lr in CONTENDERS[contender][1])


def recipe_of(run: Run, arguments: Arguments, keys: Sequence[str], folder: str) -> Recipe:
    """The recipe of a run. Raises RecipeError."""
    file = ADAMW if run.contender == "adamw" else RECIPES[run.recipe]
    given = [key.format(lr=repr(run.lr)) for key in CONTENDERS[run.contender][0]]
    values: dict[str, Any] = {
        "training.steps": arguments.steps,
        "training.global_batch_size": arguments.batch,
        "training.seq_len": arguments.seq_len,
        "lr_scheduler.warmup_steps": arguments.steps // 10,
        "debug.seed": run.seed,
        "data.seed": run.seed,
        "dump_folder": folder,
    }
    if run.contender == "adamw" and run.recipe == "dense":
        values |= {"model.name": "llama3", "model.flavor": "tiny"}
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return load(ROOT / "configs" / file, [*QUIET, *words, *given, *keys])


def train(recipe: Recipe, folder: str) -> tuple[float, ...]:
    """The training losses of a recipe, up to the step in which it diverged."""
    from titan_muon.titan import compat
    from titan_muon.titan.run.runs import Run as RunFolder
    from titan_muon.titan.run.signals import StopSignals
    from titan_muon.titan.run.trainer_config import trainer_config

    compat.forget_meshes()
    trainer = trainer_config(recipe, RunFolder(folder), dist.get_world_size()).build()
    losses: list[float] = []

    def report(loss: float, grad_norm: float) -> None:
        losses.append(loss)
        if not math.isfinite(loss + grad_norm):
            raise FloatingPointError("diverged")

    trainer.metrics_processor.report_step = report
    try:
        trainer.train(StopSignals(None))
    except FloatingPointError:
        losses = losses[:-1]
    finally:
        trainer.close()
    return tuple(losses)


def commit() -> str:
    """The commit of the repository; "unknown" outside of one."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def record(arguments: Arguments, keys: Sequence[str], results: Sequence[Run], seconds: float) -> dict[str, Any]:
    """The study as JSON: when, of which commit, by which command, and all runs."""
    size = {name: value for name, value in asdict(arguments).items() if name != "out"}
    words = [f"--{name} {' '.join(map(str, v)) if isinstance(v, tuple) else v}" for name, v in size.items()]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "command": " ".join(["python scripts/study_rules.py --out docs/results", *words, *keys]),
        "cpu_minutes": round(seconds / 60, 1),
        "torch": torch.__version__,
        "size": size,
        "runs": [asdict(run) for run in results],
    }


def summary(results: Sequence[Run], steps: int) -> dict[tuple[str, str], dict[float, list[float]]]:
    """Final losses of the seeds, by (recipe, contender) and rate."""
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for run in results:
        found.setdefault((run.recipe, run.contender), {}).setdefault(run.lr, []).append(run.final(steps))
    return found


def page(study: dict[str, Any]) -> str:
    """The Markdown page of a study."""
    size = study["size"]
    tokens = size["steps"] * size["batch"] * size["seq_len"]
    lines = [
        "# Rules and AdamW on two small models",
        "",
        f"Each run sees {tokens:,} tokens: {size['steps']} steps of {size['batch']} x {size['seq_len']} bytes of text.",
        "The models have 1 to 4 million parameters and train on a CPU for seconds. The study ranks nothing at scale.",
        "It shows that every rule trains, and the order of magnitude of its rate. Under the rules, AdamW trains the",
        "parameters besides hidden matrices at the rate of the recipe.",
        "",
        f"Written by `{study['command']}`",
        f"on {study['date']}, commit {study['commit']}, PyTorch {study['torch']}, {study['cpu_minutes']} CPU minutes.",
        "",
    ]
    results = [Run(**{**run, "losses": tuple(run["losses"])}) for run in study["runs"]]
    total = size["seeds"] * len(size["recipes"]) * sum(len(CONTENDERS[name][1]) for name in size["contenders"])
    if len(results) < total:
        lines += [f"**Incomplete: {len(results)} of {total} runs.** The same command goes on with the others.", ""]
    for recipe in size["recipes"]:
        rows = {key: rates for key, rates in summary(results, size["steps"]).items() if key[0] == recipe}
        lines += [f"## {recipe}: `configs/{RECIPES[recipe]}`", ""]
        lines += [
            "Mean loss of the last tenth of the steps, in nats per token: mean and standard deviation over seeds.",
            "",
        ]
        columns = range(max((len(rates) for rates in rows.values()), default=0))
        lines += ["| rule | seeds | " + " | ".join(f"rate {n + 1}" for n in columns) + " | best |"]
        lines += ["|---|---|" + "---|" * (len(columns) + 1)]
        for (_, contender), rates in rows.items():
            best = min((mean(losses), lr) for lr, losses in rates.items())[1]
            cells = [f"{lr:g}: {_loss(losses)}" for lr, losses in rates.items()]
            lines.append(f"| {contender} | {len(rates[best])} | {' | '.join(cells)} | **{_loss(rates[best])}** |")
        lines.append("")
    return "\n".join([*lines, "![Loss by rate, and by step at the best rate](rules.png)", ""])


def _loss(losses: Sequence[float]) -> str:
    if not all(map(math.isfinite, losses)):
        return f"{sum(not math.isfinite(loss) for loss in losses)} diverged"
    return f"{mean(losses):.3f} ± {stdev(losses):.3f}" if len(losses) > 1 else f"{mean(losses):.3f}"


def draw(study: dict[str, Any], file: Path) -> None:
    """Loss by rate, and by step at the best rate, for each recipe."""
    from matplotlib.figure import Figure

    size = study["size"]
    results = [Run(**{**run, "losses": tuple(run["losses"])}) for run in study["runs"]]
    found = summary(results, size["steps"])
    figure = Figure(figsize=(10, 3.6 * len(size["recipes"])), layout="constrained")
    grid = figure.subplots(len(size["recipes"]), 2, squeeze=False)
    for (by_rate, by_step), recipe in zip(grid, size["recipes"], strict=True):
        for contender in size["contenders"]:
            rates = found.get((recipe, contender), {})
            finite = {lr: losses for lr, losses in rates.items() if all(map(math.isfinite, losses))}
            if not finite:
                continue
            means = [mean(losses) for losses in finite.values()]
            errors = [stdev(losses) if len(losses) > 1 else 0.0 for losses in finite.values()]
            style = {"color": COLORS[contender], "label": contender}
            by_rate.errorbar(list(finite), means, yerr=errors, marker="o", capsize=3, **style)
            best = min((mean(losses), lr) for lr, losses in finite.items())[1]
            curves = [run.losses for run in results if run.key[:3] == (recipe, contender, best)]
            by_step.plot(
                [mean(step) for step in zip(*curves, strict=True)], **{**style, "label": f"{contender}, {best:g}"}
            )
        by_rate.set(xscale="log", xlabel="rate (MuonH: angle)", ylabel="final loss (nats per token)", title=recipe)
        by_step.set(xlabel="step", ylabel="training loss (nats per token)", title=f"{recipe}, best rates")
        for axes in (by_rate, by_step):
            axes.grid(alpha=0.3)
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=100)


def main(arguments: Arguments, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Run what is missing, and write the three files."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    file, results, before = arguments.out / "rules.json", [], 0.0
    if file.exists():
        earlier = json.loads(file.read_text(encoding="utf-8"))
        if earlier["command"] != record(arguments, keys, (), 0.0)["command"]:
            raise SystemExit(
                f"{file} is of another command: {earlier['command']}; choose another --out, or delete the file"
            )
        results = [Run(**{**run, "losses": tuple(run["losses"])}) for run in earlier["runs"]]
        before = 60 * earlier["cpu_minutes"]
    known = {run.key for run in results}
    missing = [run for run in runs(arguments) if run.key not in known]
    study: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if missing:
            _start(folder)
        for run in missing:
            losses = train(recipe_of(run, arguments, keys, folder), os.path.join(folder, "run"))
            results.append(Run(*run.key, tuple(round(loss, 4) for loss in losses)))
            print(*run.key, f"{results[-1].final(arguments.steps):.4f}", f"{time.process_time():.0f} s", flush=True)
            study = record(arguments, keys, results, before + time.process_time())
            file.write_text(json.dumps(study) + "\n", encoding="utf-8")
        if missing:
            dist.destroy_process_group()
    study = study or json.loads(file.read_text(encoding="utf-8"))
    (arguments.out / "rules.md").write_text(page(study), encoding="utf-8")
    draw(study, arguments.out / "rules.png")
    return study


def _start(folder: str) -> None:
    """A gloo group of one process, before TorchTitan is imported."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    from titan_muon.titan import compat

    compat.install()
    from titan_muon.titan.run.console import set_up_logging

    set_up_logging()
    logging.getLogger().setLevel(logging.WARNING)


if __name__ == "__main__":
    main(*tyro.cli(Arguments, return_unknown_args=True))

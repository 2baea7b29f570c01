"""Writes docs/results/study.md and its picture from the sweeps in docs/results/study.

    python docs/make_study.py

Each sweep's page has the command that trains it. A repeated command trains nothing that `sweep.json` has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator, NullLocator, StrMethodFormatter

from titan_muon.trainer.recipe import Recipe

FOLDER = Path(__file__).parent / "results" / "study"
PAGE, PICTURE = FOLDER.with_suffix(".md"), FOLDER / "study.png"
MODELS = {"llama": "dense", "qwen_moe": "mixture of experts"}
COLORS = {
    "muon": "#0072B2",
    "adamw": "#D55E00",
    "normuon": "#009E73",
    "normuonh": "#CC79A7",
    "soap": "#E69F00",
    "muonbp": "#56B4E9",
}
WIDTHS = {"tiny_64": 64, "tiny": 128, "tiny_256": 256}
"""Width of the dense model by flavor."""
TORCH = "torch.optim.Muon"
ALGORITHMS = FOLDER / "algorithms.png"
TOKENS_OF_STEP = 32 * 128
TIMES = "time_"
"""Prefix of sweeps that measure seconds: short runs one after another, without other jobs."""


@dataclass(frozen=True)
class Run:
    """A run. `rate`: of Muon, or of AdamW alone. `vectors`: AdamW's rate. `curve`: held-out loss by million tokens.

    `scale`: `adjust_lr_fn`. `of_widths`, `of_algorithms`: whether the run is of a sweep over widths, or
    of one algorithm beside others.
    """

    model: str
    optimizer: str
    rate: float
    vectors: float
    seed: int
    curve: dict[float, float]
    seconds_per_step: float
    width: int = WIDTHS["tiny"]
    scale: str = "match_rms_adamw"
    of_widths: bool = False
    of_algorithms: bool = False

    @property
    def tokens(self) -> float:
        return max(self.curve)

    @property
    def loss(self) -> float:
        return self.curve[self.tokens]

    @property
    def setting(self) -> tuple[Any, ...]:
        of_width = (self.width, self.scale) if self.of_widths else ()
        return self.model, self.optimizer, self.rate, self.vectors, round(self.tokens), *of_width


def read_runs() -> list[Run]:
    """The finished runs of all sweeps, each once."""
    runs: dict[tuple[Any, ...], Run] = {}
    for file in sorted(FOLDER.glob("*/sweep.json")):
        if file.parent.name.startswith(TIMES):
            continue
        for result in finished_in(file):
            keys, last = result["keys"], max(map(int, result["loss"]))
            model, named = result["recipe"].rsplit("_", 1)[0], named_as(result)
            rates = [rule["options"]["lr"] for rule in keys.get("optimizer.rule", ()) if "lr" in rule["options"]]
            rate = rates[0] if named == TORCH else keys.get("muon.lr", Recipe().muon.lr)
            # A sweep leaves out values that are the defaults.
            vectors = keys.get("adamw.lr", Recipe().adamw.lr)
            run = Run(
                model,
                named,
                vectors if named == "adamw" else rate,
                vectors,
                keys.get("debug.seed", 0),
                {int(step) / last * result["tokens"] / 1e6: loss for step, loss in result["val_loss"].items()},
                result["step_seconds"],
                WIDTHS.get(keys.get("model.flavor", "tiny"), 0),
                keys.get("muon.adjust_lr_fn", "match_rms_adamw"),
                file.parent.name.startswith("width_"),
                file.parent.name.startswith("algo_"),
            )
            runs[run.setting, run.seed] = run
    return list(runs.values())


def finished_in(file: Path) -> list[Mapping[str, Any]]:
    """The results of a sweep."""
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    return [result for result in results if result["error"] is None]


def named_as(result: Mapping[str, Any]) -> str:
    """The short name of a run's optimizer."""
    keys = result["keys"]
    # The recipe of examples/torch_muon has no Muon of ours.
    if result["recipe"] == "llama" or result["recipe"].endswith("adamw"):
        return TORCH if result["recipe"] == "llama" else "adamw"
    if keys.get("muon.expert.whole_freq", 1) > 1:
        return "muonbp"
    algorithm = keys.get("muon.algorithm", "muon")
    return algorithm if isinstance(algorithm, str) else "normuonh"


def by_setting(runs: Iterable[Run]) -> list[list[Run]]:
    """The runs of each setting, which differ by their seeds."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    return list(groups.values())


def spread(losses: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    return f"{mean(losses):.3f}" + (f" ± {stdev(losses):.3f}" if len(losses) > 1 else "")


def final(group: Sequence[Run]) -> float:
    """The mean last loss."""
    return mean(run.loss for run in group)


def tokens_to(group: Sequence[Run], loss: float) -> float | None:
    """Millions of tokens after which the mean curve first is at most `loss`, between two validations; None: never."""
    points = [(tokens, mean(run.curve[tokens] for run in group)) for tokens in group[0].curve]
    for (before, high), (after, low) in pairwise(points):
        if low <= loss < high:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def table(groups: Sequence[Sequence[Run]]) -> list[str]:
    """A line for each setting, the best of each optimizer and length bold."""
    best: dict[tuple[str, int], float] = {}
    for group in groups:
        key = group[0].optimizer, round(group[0].tokens)
        best[key] = min(best.get(key, final(group)), final(group))
    lines = ["| optimizer | tokens | its rate | AdamW's rate | seeds | held-out loss | s a step |", "|---" * 7 + "|"]
    for group in sorted(groups, key=lambda group: (group[0].setting[4], *group[0].setting[1:4])):
        run, loss = group[0], spread([run.loss for run in group])
        if final(group) == best[run.optimizer, round(run.tokens)]:
            loss = f"**{loss}**"
        seconds = mean(run.seconds_per_step for run in group)
        cells = run.optimizer, f"{run.tokens:.2f} M", f"{run.rate:g}", f"{run.vectors:g}", len(group), loss
        lines.append(f"| {' | '.join(map(str, cells))} | {seconds:.2f} |")
    return lines


def at_the_edge(group: Sequence[Run], groups: Sequence[Sequence[Run]]) -> str:
    """A sentence if the rate of a group is the lowest or highest that was tried, at any length; else empty."""
    tried, rate = [other[0].rate for other in groups], group[0].rate
    edge = "lowest" if rate == min(tried) else "highest" if rate == max(tried) else ""
    return (
        f"{rate:g} is the {edge} rate that was tried for {group[0].optimizer}: its best rate is not known."
        if edge
        else ""
    )


def found(groups: Sequence[Sequence[Run]]) -> list[str]:
    """What the longest runs of both Muon and AdamW show."""
    of = {name: [group for group in groups if group[0].optimizer == name] for name in ("muon", "adamw")}
    lengths = set.intersection(*({round(group[0].tokens) for group in mine} for mine in of.values()))
    if not lengths:
        return []
    best = {n: min((g for g in mine if round(g[0].tokens) == max(lengths)), key=final) for n, mine in of.items()}
    muon, adamw = best["muon"], best["adamw"]
    difference = final(adamw) - final(muon)
    better = "lower" if difference > 0 else "higher"
    lines = [
        f"After {muon[0].tokens:.1f} M tokens, with {muon[0].rate:g} for Muon and {adamw[0].rate:g} for AdamW, Muon's "
        f"held-out loss is {abs(difference):.3f} nats {better} than AdamW's ({len(muon)} and {len(adamw)} seeds)."
    ]
    lines += [edge for group in (muon, adamw) if (edge := at_the_edge(group, of[group[0].optimizer]))]
    needed = tokens_to(muon, final(adamw)) if difference > 0 else tokens_to(adamw, final(muon))
    if needed is not None:
        first, other = ("Muon", "AdamW") if difference > 0 else ("AdamW", "Muon")
        lines.append(
            f"{first} is at {other}'s last loss after {needed:.2f} M tokens, {needed / muon[0].tokens:.0%} of them."
        )
    return lines


def picture(runs: Sequence[Run]) -> Figure:
    """By model: the loss by tokens of the best setting of each optimizer and length, and the last loss by rate."""
    runs = [run for run in runs if not run.of_widths]
    models = [model for model in MODELS if any(run.model == model for run in runs)]
    figure = Figure(figsize=(12, 4.5 * len(models)), dpi=100, layout="constrained")
    for (curves, rates), model in zip(figure.subplots(len(models), 2, squeeze=False), models, strict=True):
        groups = by_setting(run for run in runs if run.model == model)
        draw_curves(curves, groups)
        draw_rates(rates, groups)
        curves.set_title(f"{MODELS[model]}: held-out loss, best rates tried")
        rates.set_title(f"{MODELS[model]}: last held-out loss by rate")
    return figure


def draw_curves(axes: Axes, groups: Sequence[Sequence[Run]]) -> None:
    """The best setting of each optimizer among the longest runs, with a band over seeds."""
    longest = max(round(group[0].tokens) for group in groups)
    for name, color in COLORS.items():
        mine = [group for group in groups if group[0].optimizer == name and round(group[0].tokens) == longest]
        if not mine:
            continue
        best = min(mine, key=final)
        tokens = sorted(best[0].curve)
        losses = [[run.curve[place] for run in best] for place in tokens]
        axes.plot(tokens, [mean(at) for at in losses], color=color, marker=".", label=f"{name}, {len(best)} seed(s)")
        if len(best) > 1:
            low, high = ([mean(at) + sign * stdev(at) for at in losses] for sign in (-1, 1))
            axes.fill_between(tokens, low, high, color=color, alpha=0.2, linewidth=0)
    # The first losses would hide the differences of the last.
    axes.set(xlabel="tokens (millions)", ylabel="loss (nats per token)", yscale="log")
    # Ticks between powers of ten, as plain numbers.
    axes.yaxis.set_major_locator(MultipleLocator(0.5))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.1f}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.legend()
    axes.grid(alpha=0.3)


def draw_rates(axes: Axes, groups: Sequence[Sequence[Run]]) -> None:
    """Mean and deviation of the last loss by rate, of the length with most settings, at the rate of vectors
    that most of an optimizer's runs share.
    """
    lengths = [round(group[0].tokens) for group in groups]
    most = max(sorted(set(lengths)), key=lengths.count)
    for name, color in COLORS.items():
        mine = [group for group in groups if group[0].optimizer == name and round(group[0].tokens) == most]
        vectors = [group[0].vectors for group in mine]
        shared = max(set(vectors), key=vectors.count, default=None)
        shown = [group for group in mine if name == "adamw" or group[0].vectors == shared]
        shown.sort(key=lambda group: group[0].rate)
        if not shown:
            continue
        spreads = [stdev(run.loss for run in group) if len(group) > 1 else 0.0 for group in shown]
        rates, seeds = [group[0].rate for group in shown], "/".join(str(len(group)) for group in shown)
        label = f"{name}, {seeds} seed(s)"
        axes.errorbar(rates, [*map(final, shown)], spreads, color=color, marker="o", capsize=3, label=label)
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss (nats per token)")
    axes.legend()
    axes.grid(alpha=0.3, which="both")


def _first_loss(group: Sequence[Run]) -> float:
    return min(group, key=lambda run: run.seed).loss


def best_of_each(runs: Iterable[Run]) -> list[list[Run]]:
    """The best setting of each optimizer by the loss of its first seed, the lowest loss first."""
    groups = by_setting(runs)
    names = dict.fromkeys(group[0].optimizer for group in groups)
    best = [min((g for g in groups if g[0].optimizer == name), key=_first_loss) for name in names]
    return sorted(best, key=final)


def seconds_of_step() -> dict[str, float]:
    """Seconds by optimizer: of its own work, and of the passes of AdamW's run. An optimizer on several ranks takes its
    share of Muon's time on as many ranks.
    """
    taken: dict[tuple[str, int], Mapping[str, Any]] = {}
    for file in sorted(FOLDER.glob(f"{TIMES}*/sweep.json")):
        taken |= {(named_as(result), result["keys"]["processes"]): result for result in finished_in(file)}
    if ("adamw", 1) not in taken:
        return {}
    passes = taken["adamw", 1]["step_seconds"] - taken["adamw", 1]["optimizer_seconds"]
    alone = taken["muon", 1]["optimizer_seconds"]
    return {
        name: passes + result["optimizer_seconds"] * alone / taken["muon", ranks]["optimizer_seconds"]
        for (name, ranks), result in taken.items()
    }


def compared(best: Sequence[Sequence[Run]], seconds: Mapping[str, float]) -> list[str]:
    """A line for each optimizer: loss, and tokens and seconds to the last loss of AdamW."""
    target = next(final(group) for group in best if group[0].optimizer == "adamw")
    lines = [
        "| optimizer | rate | seeds | held-out loss | tokens to AdamW's last loss | s a step | seconds to it |",
        "|---" * 7 + "|",
    ]
    for group in best:
        run, step, tokens = group[0], seconds.get(group[0].optimizer), tokens_to(group, target)
        reached = "-" if tokens is None else f"{tokens:.2f} M"
        steps = None if tokens is None else tokens * 1e6 / TOKENS_OF_STEP
        times = (
            "-" if step is None else f"{step:.3f}",
            "-" if step is None or steps is None else f"{step * steps:.0f}",
        )
        cells = run.optimizer, f"{run.rate:g}", len(group), spread([run.loss for run in group]), reached, *times
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def algorithms_picture(best: Sequence[Sequence[Run]], seconds: Mapping[str, float]) -> Figure:
    """The loss by tokens and by seconds."""
    figure = Figure(figsize=(12, 4.5), dpi=100, layout="constrained")
    by_tokens, by_seconds = figure.subplots(1, 2, sharey=True)
    for group in best:
        name, tokens = group[0].optimizer, sorted(group[0].curve)[1:]
        losses = [mean(run.curve[place] for run in group) for place in tokens]
        style = {"color": COLORS[name], "marker": ".", "label": name}
        by_tokens.plot(tokens, losses, **style)
        if name in seconds:
            by_seconds.plot([at * 1e6 / TOKENS_OF_STEP * seconds[name] for at in tokens], losses, **style)
    by_tokens.set(xlabel="tokens (millions)", ylabel="held-out loss (nats per token)")
    by_seconds.set(xlabel="seconds")
    for axes in (by_tokens, by_seconds):
        axes.legend()
        axes.grid(alpha=0.3)
    return figure


def widths(runs: Sequence[Run]) -> list[str]:
    """A line for each optimizer, scale and width: the loss by rate, the best bold."""
    lines = ["| optimizer | `adjust_lr_fn` | width | held-out loss at each rate |", "|---" * 4 + "|"]
    for optimizer, scale, width in sorted({(run.optimizer, run.scale, run.width) for run in runs}, reverse=True):
        mine = [run for run in runs if (run.optimizer, run.scale, run.width) == (optimizer, scale, width)]
        best = min(run.loss for run in mine)
        losses = [
            f"{run.rate:g}: {'**' if run.loss == best else ''}{run.loss:.3f}{'**' if run.loss == best else ''}"
            for run in sorted(mine, key=lambda run: run.rate)
        ]
        lines.append(f"| {optimizer} | {scale if optimizer != 'adamw' else '-'} | {width} | {', '.join(losses)} |")
    return lines


HEAD = """# Muon beside AdamW

Measured on a CPU by training the two small recipes with 32 sequences of 128 bytes of text of Python's standard library
a step, with passes in float32. Losses are held-out losses in nats per token, mean ± standard deviation over seeds.
Other jobs ran on the machine, so that seconds of two lines do not compare. A run has one process, and muonbp four,
because it differs from muon only where ranks store parts of matrices (`whole_freq = 5`). normuonh is NorMuon and MuonH,
without decay. torch.optim.Muon is `examples/torch_muon`, with `optimizer.clip = "none"`.
Of two dense runs beside each other on 2026-11-28, 80 steps on a core each (commit d709a89a, medians of 7 records), the
optimizer took 22 ms of a step with Muon and 14 ms with AdamW, beside 603 and 687 ms of equal forwards and backwards.
So Muon's step is about 1 % longer, and a share of tokens is nearly the share of seconds.
`docs/make_study.py` writes this page from the sweeps below; each has its command, its commit and its data.
"""


ALGORITHMS_TEXT = """## Algorithms

The dense model after 1.02 M tokens, at the best of three rates of each optimizer, and AdamW's 0.004 for vectors and
embeddings beside it. Seconds are steps times the seconds of a step, which short runs one after another measured on a
core of an idle machine (the sweeps `time_*`): forward and backward of AdamW's run, and each optimizer's own work.
muonbp's work is its share of Muon's, both on four ranks.

![Held-out loss by tokens and by seconds](study/algorithms.png)
"""


def written(runs: Sequence[Run]) -> str:
    """The page."""
    of_widths = [run for run in runs if run.of_widths]
    algorithms = best_of_each(run for run in runs if run.of_algorithms)
    runs = [run for run in runs if not run.of_widths]
    parts = [HEAD, "![Held-out loss by tokens and by rate](study/study.png)\n"]
    for model, title in MODELS.items():
        groups = by_setting(run for run in runs if run.model == model)
        if groups:
            parts += [f"## {title.capitalize()}\n", "\n\n".join(found(groups)) + "\n", "\n".join(table(groups)) + "\n"]
    if of_widths:
        tokens = max(run.tokens for run in of_widths)
        text = f"The dense model, {tokens:.2f} M tokens and one seed a run, with 0.004 as AdamW's rate beside Muon.\n"
        parts += ["## Rates by width\n", text, "\n".join(widths(of_widths)) + "\n"]
    if algorithms:
        parts += [ALGORITHMS_TEXT, "\n".join(compared(algorithms, seconds_of_step())) + "\n"]
    sweeps = sorted(file.parent.name for file in FOLDER.glob("*/sweep.md"))
    parts.append("Sweeps: " + ", ".join(f"[{name}](study/{name}/sweep.md)" for name in sweeps) + ".\n")
    return "\n".join(parts)


if __name__ == "__main__":
    finished = read_runs()
    picture(finished).savefig(PICTURE)
    algorithms_picture(best_of_each(run for run in finished if run.of_algorithms), seconds_of_step()).savefig(
        ALGORITHMS
    )
    PAGE.write_text(written(finished), encoding="utf-8")

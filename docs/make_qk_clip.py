"""Draws docs/qk_clip.png from the two runs of docs/qk_clip.md: `python docs/make_qk_clip.py LOG_RUN CLIP_RUN`."""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

THRESHOLD = 100
STYLES = {"log": ("#D55E00", "--", "without clipping"), "clip": ("#0072B2", "-", "with clipping")}


def records(folder: str) -> list[dict]:
    """The logged steps of a run."""
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Draw the largest logit and the training loss of both runs by step."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    logits, losses = figure.subplots(1, 2)
    for (color, line, label), folder in zip(STYLES.values(), sys.argv[1:], strict=True):
        rows = records(folder)
        steps = [record["step"] for record in rows]
        largest = [max(record["qk"]["max_logit"].values()) for record in rows]
        logits.plot(steps, largest, color=color, linestyle=line, linewidth=2, label=label)
        losses.plot(steps, [record["loss"] for record in rows], color=color, linestyle=line, linewidth=2, label=label)
    logits.axhline(THRESHOLD, color="gray", linewidth=0.8, label=f"threshold {THRESHOLD}")
    logits.set(xlabel="step", ylabel="largest attention logit of any head")
    losses.set(xlabel="step", ylabel="training loss (nats per token)")
    for axes in (logits, losses):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, handlelength=3)
    figure.savefig(Path(__file__).with_name("qk_clip.png"), dpi=110)


if __name__ == "__main__":
    main()

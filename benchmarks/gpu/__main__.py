"""Runs one of four calls for one GPU, and writes the page of their rows: `make gpu CALL=1`.

    python -m benchmarks.gpu --call 1                        # rows in build/gpu/rows.jsonl, or below OUT
    python -m benchmarks.gpu --page build/gpu/rows.jsonl     # adds rows to docs/results, and writes the page anew

A part of a call is a process of its own, so that a part that crashes or hangs costs only itself. A row is on the disk
after every measurement, so a call can be stopped at any second.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import ROOT, Rows, launches, peers, publish, read_rows
from benchmarks.one_gpu import one_rank
from benchmarks.processes import run_within

SECONDS = 440
"""Of a call. The end of its last part can take 20 s more, so that a call ends within 8 minutes."""
PACKAGES = ("torchtitan", "triton", "gram-newton-schulz", "quack-kernels", "emerging-optimizers")
PARITY_RANKS, PARITY_SECONDS, REHEARSED_ROWS = 4, 20.0, 8
RATES = {"cuda": ("2e-3", "1e-3", "4e-3"), "cpu": ("2e-3",)}
"""Learning rates of the trainings, the likeliest best one first, because time may run out."""
WAYS = ("muon", "adamw", "torch_muon")
"""Recipes of the trainings, with the first rate of all."""
CORPUS = str(Path(torch.__file__).parent / "**/*.py")
"""45 MB of text that each machine with PyTorch has."""
TINY = ("--model.flavor", "tiny_64", "--data.tokenizer", "bytes", "--data.vocab_size", "2048", "--training.steps", "4",
        "--training.seq_len", "64", "--training.global_batch_size", "4", "--training.local_batch_size", "4",
        "--validator.freq", "2", "--validator.steps", "1", "--compile.enable", "false")  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A process of a call, its time-out in seconds, and its function."""

    name: str
    seconds: int
    run: Callable[[Rows, torch.device], None]


def parity(rows: Rows, device: torch.device) -> None:
    """Rows of tests/parity on ranks over gloo that share the device, each beside its reference."""
    # Before the import, because ranks inherit it.
    os.environ["PARITY_DEVICE"] = device.type
    from tests.dist.harness import World
    from tests.parity.shared_gpu import differences_on_device
    from tests.parity.table import exchanged

    def compared(claim: Any) -> dict[str, Any]:
        found = world.run(differences_on_device, claim, timeout=PARITY_SECONDS)
        return {"differences": [*chain(*found)] or "none"}

    world = World(PARITY_RANKS, quiet=True)
    claims = exchanged()
    for claim in claims if device.type == "cuda" else claims[:: len(claims) // REHEARSED_ROWS]:
        rows.measure(partial(compared, claim), measured="parity", row=claim.name)
    world.close()


def train(rate: str, way: str, rows: Rows, device: torch.device) -> None:
    """A training by train.py. Its records become rows as it writes them."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(Path(folder), rate, way)
        files = TINY if device.type == "cpu" else ("--data.source", "files", "--data.files", CORPUS)
        words = ("--config", str(recipe), "--dump_folder", folder, *files)
        process = subprocess.Popen([sys.executable, "train.py", *words], cwd=ROOT)
        written, is_running = 0, True
        while is_running:
            is_running = process.poll() is None
            records = [record for file in Path(folder).glob("*/*/metrics.jsonl") for record in read_rows(file)]
            for record in records[written:]:
                rows.write(measured="training", **record)
            written = len(records)
            time.sleep(0.5)
        if process.returncode:
            raise RuntimeError(f"train.py ended with {process.returncode}")


def recipe_of(folder: Path, rate: str, way: str) -> Path:
    """Write the recipes with a rate into a folder. Returns the one of a training."""
    for file in Path(__file__).parent.glob("*.toml"):
        text = file.read_text(encoding="utf-8").replace(RATES["cuda"][0], rate)
        (folder / file.name).write_text(text, encoding="utf-8")
    return folder / f"{way}.toml"


def parts_of(call: int, device: str) -> list[Part]:
    """The parts of a call in order."""
    if call == 1:
        ranks = {"qwen3_8b": 90, "qwen3_30b_a3b": 110, "kimi_k2": 200}
        named = [Part(f"rank {world}", most, partial(one_rank.measure, world)) for world, most in ranks.items()]
        return [Part("launches", 60, launches.calibrate), *named]
    if call == 2:
        seconds = {"Qwen3-1.7B": 290, "128 experts": 150}
        return [Part(f"peers, {name}", most, partial(peers.compare, name)) for name, most in seconds.items()]
    if call == 3:
        return [Part("parity", 300, parity)]
    return [Part(f"{way}, {rate}", 120, partial(train, rate, way)) for rate in RATES[device] for way in WAYS]


def environment(device: str) -> dict[str, Any]:
    """Date, GPU, driver, versions and commit of a call."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "none",
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "commit": output("git", "describe", "--always", "--dirty", "--exclude", "*"),
        **{item.name: item.version for item in distributions() if item.name in PACKAGES},
    }


def output(*command: str) -> str:
    """Output of a command; empty if it fails or is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def run_call(rows: Rows, options: argparse.Namespace) -> int:
    """Run the parts of a call in order. Returns 0 unless a part ended with an error."""
    end, failed = time.monotonic() + options.seconds, False
    rows.write(part="environment", **environment(options.device))
    for part in parts_of(options.call, options.device):
        most = max(0, min(part.seconds, int(end - time.monotonic())))
        words = f"-m benchmarks.gpu --call {options.call} --device {options.device} --part".split()
        log, begin = options.out / "log", time.monotonic()
        command = (sys.executable, *words, part.name, "--out", str(options.out))
        code = run_within(most, command, log, ROOT, {**os.environ, "GPU_CALL": str(os.getpid())})
        columns: dict[str, Any] = {"seconds": time.monotonic() - begin}
        if code is None:
            columns["stopped"] = f"after {most} s, with the rows until then"
        elif code != 0:
            failed, text = True, log.read_text(encoding="utf-8", errors="replace")
            columns |= {"error": f"exit code {code}", "log": text[-1500:]}
        rows.write(part=part.name, **columns)
    return int(failed)


def run_part(rows: Rows, options: argparse.Namespace) -> int:
    """Run a part in this process, which ends with its parent."""
    # PR_SET_PDEATHSIG: a parent that is killed cannot end its children.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.environ.get("GPU_CALL", str(os.getppid())) != str(os.getppid()):
        return 1  # The parent ended during the imports.
    part = next(part for part in parts_of(options.call, options.device) if part.name == options.part)
    part.run(replace(rows, common={**rows.common, "part": part.name}), torch.device(options.device))
    return 0


def main(words: Sequence[str]) -> int:
    """Run the command line. Returns 1 if a part failed. Raises SystemExit with 2 for a mistake of the user."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--call", type=int, choices=(1, 2, 3, 4))
    parser.add_argument("--part", default="", help="run one part in this process")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: rehearse at tiny size")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of a call")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "build/gpu"))
    parser.add_argument("--page", type=Path, nargs="*", help="files of rows to add to docs/results")
    options = parser.parse_args(words)
    if options.page is not None:
        publish(options.page)
        return 0
    if options.call is None:
        parser.error("name a call: --call 1, 2, 3 or 4 (make gpu CALL=1)")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU; take a PyTorch that fits the driver "
            "(PYTHON_GPU=), or rehearse with DEVICE=cpu"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    source = "measured" if options.device == "cuda" else "rehearsed"
    rows = Rows(options.out / "rows.jsonl", {"call": options.call, "source": source})
    return (run_part if options.part else run_call)(rows, options)


if __name__ == "__main__":
    # As for Ctrl-C, so that the part in progress is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))

"""Newton-Schulz side by side: time, TFLOP/s, share of the matmul rate, and error against float64.

    python benchmarks/bench_orthogonalize.py                                      # CPU, one thread: minutes
    python benchmarks/bench_orthogonalize.py --device cuda                        # measures the kernels first
    python benchmarks/bench_orthogonalize.py --device cuda --share qwen3_8b:64:0  # the matrices of one rank of 64

Contenders of a shape take turns, so that other load on the machine affects all of them equally. Ratios are medians of
the ratios within a turn. FLOPs are the algorithm's, with symmetric products counted whole.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import tyro
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import spread
from benchmarks.accuracy import relative_error
from benchmarks.measure_kernels import measure_kernels
from titan_muon.engine.orthogonalize import (
    COEFFICIENTS,
    DTYPES,
    Iteration,
    Method,
    iterate,
    iteration,
    orthogonalize,
)
from titan_muon.kernels.dispatch import Dispatch, Kernel, restarts

JORDAN = iteration("keller_jordan", 5, 1e-7)
TORCH = "torch.optim.Muon's loop"
MODELS = {
    "Qwen3-8B": ((1, 4096, 4096), (1, 1024, 4096), (1, 12288, 4096)),
    "Qwen3-30B-A3B": ((128, 768, 2048),),
    "Llama-3-70B": ((1, 8192, 8192), (1, 28672, 8192)),
    "Kimi K2": ((8, 2048, 7168), (1, 7168, 18432)),
}
"""(count, rows, columns) of the matrices with most of each model's work."""
CPU_DIVISOR = 16
"""Divisor of these sides on the CPU."""
SAME_DTYPE = tuple((dtype, (1, 512, 512 * aspect)) for dtype in ("float32", "bfloat16") for aspect in (2, 4, 8))
SMALL = ((64, 64, 64), (32, 128, 512))
ERROR_SHAPES = ((256, 256), (256, 512), (256, 1024), (128, 2048))
SPECTRA = ("log 1 to 1e-4", "rank 8 + noise", "gaussian")


@dataclass(frozen=True)
class Contender:
    """A way to orthogonalize a stack. `flops`: useful FLOPs of the whole stack."""

    name: str
    run: Callable[[Tensor], object]
    flops: int


@dataclass(frozen=True)
class Row:
    """Result of a contender on a shape.

    Attributes:
        ms: median for the whole stack.
        spread: of the turns' times.
        faster: median over the turns of the first contender's time over this contender's.
        tflops: useful TFLOP/s.
        of_matmul: useful FLOP/s over the rate of a plain bfloat16 matrix product, measured in the same run.
    """

    group: str
    shape: str
    name: str
    ms: float
    spread: float
    faster: float
    tflops: float
    of_matmul: float


@dataclass(frozen=True)
class ErrorRow:
    """Relative error against the same iteration in float64, in the Frobenius norm."""

    shape: str
    spectrum: str
    coefficients: str
    name: str
    error: float


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time of one call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def matmul_rate(device: torch.device) -> float:
    """FLOP/s of a large plain product in bfloat16."""
    size = 8192 if device.type == "cuda" else 768
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    return 2 * size**3 / median(seconds(lambda: torch.mm(a, b), device) for _ in range(9))


def torch_loop(stack: Tensor, computed: Iteration = JORDAN) -> None:
    """torch.optim.Muon's function, matrix by matrix."""
    for matrix in stack:
        _zeropower_via_newtonschulz(matrix, computed.steps[0], len(computed.steps), computed.eps)


def ours(method: Method, rows: int, cols: int, count: int, computed: Iteration = JORDAN) -> Contender:
    """The engine with one method, in stacks of the method's size."""

    def run(stack: Tensor) -> None:
        for part in stack.split(method.batch):
            orthogonalize(part, computed, method)

    return Contender(str(method), run, count * method.flops(rows, cols, computed.steps))


def torchs(rows: int, cols: int, count: int) -> Contender:
    """The baseline."""
    return Contender(TORCH, torch_loop, count * Method("reference", "bfloat16").flops(rows, cols, JORDAN.steps))


def compare(group: str, shape: tuple[int, int, int], contenders: Sequence[Contender], bench: Bench) -> Iterator[Row]:
    """Time contenders on a stack in turns, each turn with another first contender."""
    count, rows, cols = shape
    stack = torch.randn(count, rows, cols, device=bench.device).bfloat16()
    turns = []
    for turn in range(bench.repeats + 1):
        times = [0.0] * len(contenders)
        for place in range(len(contenders)):
            index = (turn + place) % len(contenders)
            run = contenders[index].run
            times[index] = seconds(lambda run=run: run(stack), bench.device)  # type: ignore[misc]
        turns.append(times)
    for index, contender in enumerate(contenders):
        # The first turn warms up.
        mine = median(times[index] for times in turns[1:])
        faster = median(times[0] / times[index] for times in turns[1:])
        rate, times = contender.flops / mine, [times[index] for times in turns[1:]]
        name = f"{count} x ({rows} x {cols})"
        yield Row(group, name, contender.name, 1e3 * mine, spread(times), faster, rate / 1e12, rate / bench.matmul)


@dataclass(frozen=True)
class Bench:
    """Device and repetitions."""

    device: torch.device
    repeats: int
    matmul: float
    kernels: tuple[Kernel, ...]

    def auto(self, rows: int, cols: int, computed: Iteration = JORDAN) -> Method:
        """Method of `muon.expert.orthogonalize = "auto"` on this device."""
        return Dispatch("auto", "auto", self.device.type, self.kernels).choose(rows, cols, computed.steps)


def same_dtype(bench: Bench) -> Iterator[Row]:
    """Standard and Gram in the same dtype."""
    for dtype, shape in SAME_DTYPE:
        count, rows, cols = shape
        methods = (Method("standard", dtype), Method("gram", dtype, restarts(5)))
        yield from compare("same dtype", shape, [ours(method, rows, cols, count) for method in methods], bench)


def small_stacks(bench: Bench) -> Iterator[Row]:
    """A loop over small matrices, and stacks of them."""
    for shape in SMALL:
        count, rows, cols = shape
        yield from compare(
            "small", shape, [torchs(rows, cols, count), ours(bench.auto(rows, cols), rows, cols, count)], bench
        )


def real_shapes(bench: Bench) -> Iterator[Row]:
    """Every algorithm and dtype on the shapes of published models."""
    divisor = 1 if bench.device.type == "cuda" else CPU_DIVISOR
    for model, shapes in MODELS.items():
        for count, rows, cols in (
            (c if divisor == 1 else min(c, 16), r // divisor, k // divisor) for c, r, k in shapes
        ):
            methods = [Method("standard", "bfloat16"), Method("standard", "float16")]
            methods.append(Method("gram", "float16", restarts(5)))
            if divisor > 1 or min(rows, cols) <= 2048:
                methods += [Method("standard", "float32"), Method("gram", "float32", restarts(5))]
            auto = bench.auto(rows, cols)
            methods = [Method(m.algorithm, m.dtype, m.restarts, batch=auto.batch) for m in methods]
            methods += [auto] if auto not in methods else []
            contenders = [torchs(rows, cols, count), *(ours(method, rows, cols, count) for method in methods)]
            yield from compare(model, (count, rows, cols), contenders, bench)


def hard_matrix(spectrum: str, rows: int, cols: int) -> Tensor:
    """A (rows, cols) matrix in float64 with a spectrum that is hard for Newton-Schulz, from seed 0."""
    generator = torch.Generator().manual_seed(0)
    small = min(rows, cols)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if spectrum == "gaussian":
        return drawn(rows, cols)
    if spectrum == "rank 8 + noise":
        return drawn(rows, 8) @ drawn(8, cols) + 1e-3 * drawn(rows, cols)
    left, right = torch.linalg.qr(drawn(rows, small))[0], torch.linalg.qr(drawn(cols, small))[0]
    return (left * torch.logspace(0, -4, small, dtype=torch.float64)) @ right.mT


def errors(bench: Bench, shapes: Sequence[tuple[int, int]] = ERROR_SHAPES) -> Iterator[ErrorRow]:
    """Every algorithm x coefficients x dtype on hard spectra."""
    for rows, cols in shapes:
        for spectrum in SPECTRA:
            stack = hard_matrix(spectrum, rows, cols)[None].bfloat16().to(bench.device)
            for name, table in COEFFICIENTS.items():
                computed = iteration(name, 5 if len(table) == 1 else len(table), 1e-7)
                expected = iterate(stack.double(), computed.steps, computed.eps, torch.float64)
                gram = restarts(len(computed.steps))
                methods = [Method("standard", dtype) for dtype in DTYPES]
                methods += [Method("gram", dtype, gram) for dtype in ("float16", "float32")]
                cpu, gpu = (Dispatch(device=kind).choose(rows, cols, computed.steps) for kind in ("cpu", "cuda"))
                named = [
                    *((f"{m.algorithm} {m.dtype}", m) for m in methods),
                    ("auto on cpu", cpu),
                    ("auto on cuda", gpu),
                ]
                for label, method in named:
                    result = orthogonalize(stack.float(), computed, method)
                    error = relative_error(result, expected).item()
                    yield ErrorRow(f"{rows} x {cols}", spectrum, name, label, error)


def share(what: str, bench: Bench) -> Iterator[Row]:
    """The matrices that one rank of a plan orthogonalizes, in the plan's stacks: MODEL:WORLD:RANK."""
    import models  # noqa: F401 (registers the families)
    from titan_muon.trainer.torchtitan import compat

    compat.install()
    from titan_muon.engine.program.program import batches, make_program
    from titan_muon.trainer.dry_run.meta_model import build_meta_model
    from titan_muon.trainer.recipe import load

    model, world, rank = what.split(":")
    plan = build_meta_model(load(ROOT / f"configs/{model}_muon.toml", []), int(world), bench.device.type).plan
    assert plan is not None, f"{model} has Muon parameters"
    program = make_program(plan, int(rank))
    parts = [run.matrices for run in program.buckets]
    chosen = [stack for part in parts for stack in batches(part, plan.matrices, plan.works)]
    shapes = [(len(stack), plan.matrices[stack[0]].rows, plan.matrices[stack[0]].cols) for stack in chosen]
    whole = [torch.randn(shape, device=bench.device).bfloat16() for shape in shapes]
    methods = [bench.auto(rows, cols) for _, rows, cols in shapes]

    def run(_: Tensor) -> None:
        for stack, method in zip(whole, methods, strict=True):
            orthogonalize(stack, JORDAN, method)

    flops = sum(plan.matrices[matrix].flops for part in parts for matrix in part)
    loop_flops = sum(torchs(rows, cols, count).flops for count, rows, cols in shapes)

    def loop(_: Tensor) -> None:
        for stack in whole:
            torch_loop(stack)

    contenders = [
        Contender(TORCH, loop, loop_flops),
        Contender(f"auto, {len(shapes)} stacks", run, flops),
    ]
    for row in compare(f"share {what}", (1, 1, 1), contenders, bench):
        yield Row(
            row.group,
            f"{sum(map(len, parts))} matrices",
            row.name,
            row.ms,
            row.spread,
            row.faster,
            row.tflops,
            row.of_matmul,
        )


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| group | shape | method | ms | spread | x as fast as the first | TFLOP/s | of matmul |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        numbers = f"{r.ms:.2f} | {r.spread:.0%} | {r.faster:.2f} | {r.tflops:.3g} | {100 * r.of_matmul:.0f} %"
        lines.append(f"| {r.group} | {r.shape} | {r.name} | {numbers} |")
    return "\n".join(lines)


def error_table(rows: Sequence[ErrorRow]) -> str:
    """Markdown: a line for each shape, spectrum and set, a column for each method."""
    names = list(dict.fromkeys(row.name for row in rows))
    cells = {(r.shape, r.spectrum, r.coefficients, r.name): r.error for r in rows}
    lines = ["| shape | spectrum | coefficients | " + " | ".join(names) + " |", "|---|---|---|" + "---:|" * len(names)]
    for key in dict.fromkeys((r.shape, r.spectrum, r.coefficients) for r in rows):
        lines.append(f"| {' | '.join(key)} | " + " | ".join(f"{cells[*key, name]:.2g}" for name in names) + " |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Arguments:
    """Compare ways to orthogonalize matrices."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device. CUDA measures the symmetric kernels first."""
    repeats: int = 11
    """Timed turns."""
    share: str | None = None
    """MODEL:WORLD:RANK: time only the matrices of that rank in the plan of configs/MODEL_muon.toml."""
    json: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise SystemExit("--repeats must be at least 1")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("--device cuda: PyTorch finds no CUDA device here")
        parts = (self.share or "x:1:0").split(":")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts[1:]) or int(parts[2]) >= int(parts[1]):
            raise SystemExit(f"--share {self.share}: write MODEL:WORLD:RANK, with RANK below WORLD")
        if self.json is not None and not self.json.parent.is_dir():
            raise SystemExit(f"--json {self.json}: there is no folder {self.json.parent}")


def machine(bench: Bench) -> dict[str, object]:
    """Machine of the figures."""
    gpu = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else None
    kernels = [asdict(kernel) for kernel in bench.kernels]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "processor": gpu or platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "matmul_tflops": bench.matmul / 1e12,
        "kernels": kernels,
    }


def main(arguments: Arguments) -> None:
    """Measure, print and write."""
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    measured = measure_kernels(device) if device.type == "cuda" else ()
    bench = Bench(device, arguments.repeats, matmul_rate(device), tuple(measured))
    print(json.dumps(machine(bench)), flush=True)
    if arguments.share is not None:
        rows, wrong = list(share(arguments.share, bench)), []
    else:
        rows = [row for part in (same_dtype, small_stacks, real_shapes) for row in part(bench)]
        wrong = list(errors(bench))
    print(f"\n{table(rows)}\n\n{error_table(wrong) if wrong else ''}")
    if arguments.json is not None:
        document = {**machine(bench), "rows": [asdict(r) for r in rows], "errors": [asdict(e) for e in wrong]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Arguments))

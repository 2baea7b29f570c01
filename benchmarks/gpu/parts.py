"""Parts of a run on GPUs: purpose, command and time-out of each."""

from __future__ import annotations

from dataclasses import dataclass

TOTAL_SECONDS = 20 * 60
"""Time-out of all parts together on GPUs."""
REHEARSAL_SECONDS = 15 * 60
"""Time-out of a part without a GPU; generous, because a slow rehearsal costs nothing."""
LAUNCH = ("{python}", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node={ranks}")


@dataclass(frozen=True)
class Part:
    """A subprocess that writes figures to the JSON file in its command.

    Attributes:
        name: name on the command line and in files.
        shows: knowledge from a pass.
        command: words with the placeholders `{python}`, `{ranks}`, `{json}`, `{folder}` (the part's own) and `{out}`.
            Figures are optional.
        rehearsal: the same without a GPU, at tiny size; empty for no rehearsal.
        seconds: time-out on GPUs.
        least_gpus: minimum number of GPUs.
        needs: packages besides PyTorch.
        unrehearsed: coverage only on a real GPU.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    seconds: int
    least_gpus: int = 1
    needs: tuple[str, ...] = ()
    unrehearsed: str = ""


def _training(runs: str, *options: str) -> tuple[str, ...]:
    """Command to train the main recipe in several ways and compare the losses."""
    named = ("--runs", *runs.split(), "--nproc", "{ranks}", "--folder", "{folder}", "--json", "{json}")
    return ("{python}", "-m", "benchmarks.gpu.training", *named, *options)


def _script(name: str, *options: str) -> tuple[str, ...]:
    return ("{python}", f"benchmarks/{name}.py", *options, "--json", "{json}")


def _ranks(module: str, *options: str) -> tuple[str, ...]:
    return (*LAUNCH, "-m", module, *options, "--json", "{json}")


TITAN = ("torchtitan", "tyro")

PARTS: tuple[Part, ...] = (
    Part(
        name="tests",
        shows="one GPU computes what the CPU does: orthogonalization, kernels, a Muon step, and no step waits for it",
        command=("{python}", "-m", "pytest", "tests/gpu", "-q", "-m", "gpu"),
        rehearsal=("{python}", "-m", "pytest", "tests/gpu", "-q"),
        seconds=120,
        needs=("pytest", "pytest_timeout"),
        unrehearsed="numbers: fake tensors have shapes, dtypes and devices alone",
    ),
    Part(
        name="parity",
        shows="every exchange and placement over NCCL computes what one CPU process does, without a device sync, "
        "in the memory of the plan, and opens no communicator in a step",
        command=_ranks("tests.gpu.parity", "--device", "cuda"),
        rehearsal=_ranks("tests.gpu.parity", "--device", "cpu"),
        seconds=120,
        unrehearsed="NCCL, streams and the allocator of a GPU",
    ),
    Part(
        name="links",
        shows="latency and bandwidth of the collectives by size, and the matmul rate by dtype: the machine file",
        command=_ranks("benchmarks.gpu.links", "--device", "cuda", "--machine", "{out}/machine.json"),
        rehearsal=_ranks("benchmarks.gpu.links", "--device", "cpu", "--largest", "65536"),
        seconds=45,
        unrehearsed="every figure",
    ),
    Part(
        name="recipe",
        shows="the main recipe learns in 50 steps, shard0 and owned alike",
        command=_training("shard0 owned", "--steps", "50", "--fall", "0.5"),
        rehearsal=_training("shard0 owned", "--steps", "3", "--tiny"),
        seconds=150,
        needs=TITAN,
        unrehearsed="CUDA's fused AdamW, FlexAttention and NCCL",
    ),
    Part(
        name="layouts",
        shows="the recipe under HSDP, TP, EP and PP follows FSDP's losses",
        command=_training("fsdp hsdp tp ep pp", "--steps", "6"),
        rehearsal=_training("fsdp tp ep pp", "--steps", "2", "--tiny"),
        seconds=270,
        least_gpus=2,
        needs=TITAN,
        unrehearsed="NCCL; HSDP, which the test suite trains on gloo",
    ),
    Part(
        name="compile",
        shows="compiled layers and compiled FlexAttention follow the dense attention's losses",
        command=_training("dense flex compiled", "--steps", "6"),
        rehearsal=(),
        seconds=180,
        needs=TITAN,
        unrehearsed="all of it: FlexAttention has no backward on the CPU",
    ),
    Part(
        name="exchanges",
        shows="time of a step: our exchanges, torch.optim.Muon, TorchTitan's DistMuon, AdamW",
        command=_script("bench_step", "--device", "cuda", "--nproc", "{ranks}", "--model", "gpu", "--repeats", "15"),
        rehearsal=_script("bench_step", "--nproc", "{ranks}", "--model", "tiny", "--repeats", "2"),
        seconds=100,
        needs=("tyro",),
        unrehearsed="every time, and DistMuon's streams",
    ),
    Part(
        name="placements",
        shows="time and memory of training with owned matrices beside FSDP2 alone",
        command=_script("bench_owned", "--device", "cuda", "--nproc", "{ranks}", "--dim", "2048", "--blocks", "6"),
        rehearsal=_script("bench_owned", "--nproc", "{ranks}", "--dim", "32", "--blocks", "2", "--repeats", "2"),
        seconds=70,
        least_gpus=2,
        needs=("tyro",),
        unrehearsed="every time",
    ),
    Part(
        name="newton_schulz",
        shows="Newton-Schulz by shape against the measured matmul rate, and which kernel wins",
        command=("{python}", "-m", "benchmarks.gpu.newton_schulz", "--device", "cuda", "--json", "{json}"),
        rehearsal=("{python}", "-m", "benchmarks.gpu.newton_schulz", "--device", "cpu", "--json", "{json}"),
        seconds=140,
        needs=("tyro",),
        unrehearsed="every time, and the symmetric kernels",
    ),
)


def chosen(names: list[str], parts: tuple[Part, ...] = PARTS) -> tuple[Part, ...]:
    """Parts by name, all for no names. Raises ValueError for an unknown name."""
    known = [part.name for part in parts]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no part {', '.join(unknown)}; the parts are {', '.join(known)}")
    return tuple(part for part in parts if not names or part.name in names)

"""Parts of a run on GPUs: purpose, command, call and time-out of each."""

from __future__ import annotations

from dataclasses import dataclass

CALLS = (1, 2, 3)
"""Calls for one GPU: correctness and one rank of a large world; Muon beside AdamW; long training and step times."""
LAUNCH = ("{python}", "-m", "torch.distributed.run", "--standalone")


@dataclass(frozen=True)
class Part:
    """A subprocess that writes figures to the JSON file in its command.

    Attributes:
        name: name on the command line and in files.
        shows: knowledge from a pass.
        command: words with placeholders, see `run.command_of`. Figures are optional.
        rehearsal: the same without a GPU, at tiny size.
        seconds: time-out on GPUs.
        call: of CALLS; 0 for a part that runs without a call alone.
        rehearsal_seconds: time-out without a GPU; generous, because a slow rehearsal costs nothing.
        ending_seconds: from the end of the work until the end of the process, for a part that is told its time.
        least_gpus: minimum number of GPUs.
        needs: packages besides PyTorch.
        unrehearsed: coverage only on a real GPU, for the page of a rehearsal.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    seconds: int
    call: int = 0
    rehearsal_seconds: int = 15 * 60
    ending_seconds: int = 15
    least_gpus: int = 1
    needs: tuple[str, ...] = ()
    unrehearsed: str = ""


def _module(name: str, *options: str) -> tuple[str, ...]:
    """Command of a process."""
    return ("{python}", "-m", name, *options, "--json", "{json}")


def _script(name: str, *options: str) -> tuple[str, ...]:
    """Command of a script of benchmarks/."""
    return ("{python}", f"benchmarks/{name}.py", *options, "--json", "{json}")


def _ranks(number: str, module: str, *options: str) -> tuple[str, ...]:
    """Command of several ranks."""
    return (*LAUNCH, f"--nproc_per_node={number}", "-m", module, *options, "--json", "{json}")


def _recipe(runs: str, *options: str) -> tuple[str, ...]:
    """Command to train the main recipe in several ways and compare the losses."""
    named = ("--runs", *runs.split(), "--nproc", "{ranks}", "--folder", "{folder}")
    return _module("benchmarks.gpu.training", *named, *options)


def _one_rank(world: str, seconds: int) -> Part:
    """Part for one rank of a large world."""
    return Part(
        name=f"rank_{world}",
        shows=f"the step of one rank of {world.replace('_', ' ')}: host, device, kernels and memory beside the model",
        command=_module("benchmarks.one_gpu.one_rank", "--world", world, "--device", "cuda"),
        rehearsal=_module("benchmarks.one_gpu.one_rank", "--world", world, "--device", "cpu"),
        seconds=seconds,
        call=1,
        unrehearsed="every time: a tiny world steps on the CPU, and the full one is planned",
    )


def _training(name: str, call: int, seconds: int, shows: str, runs: str, tokens: str) -> Part:
    """Part that trains the same small model by several optimizers."""
    module, told = "benchmarks.one_gpu.language_model", ("--seconds", "{seconds}")
    return Part(
        name=name,
        shows=shows,
        command=_module(
            module, "--device", "cuda", "--compile", "inductor", "--tokens", tokens, *told, "--runs", *runs.split()
        ),
        rehearsal=_module(
            module, "--device", "cpu", "--compile", "aot_eager", "--tiny", *told, "--runs", *runs.split()
        ),
        seconds=seconds,
        call=call,
        # A run that has begun is finished.
        ending_seconds=seconds // 5,
        needs=("tokenizers",),
        unrehearsed="every time, and a loss that means something",
    )


TITAN = ("torchtitan", "tyro")
SWEEP = "muon:2e-3 adamw:2e-3 muon:4e-3 adamw:4e-3 torch_muon:2e-3 muon_fused:2e-3 normuon:2e-3 muon:1e-3 adamw:1e-3"
"""Runs of the second call. Pairs of Muon and AdamW first, because time may run out."""
LONG = "muon:{muon} adamw:{adamw}"

PARTS: tuple[Part, ...] = (
    Part(
        name="parity",
        shows="every exchange, layout and placement computes what one CPU process does, in the memory of the plan; "
        "over NCCL also without a device sync and a new communicator (4 ranks share a single GPU over gloo)",
        command=_ranks("{exchanging_ranks}", "tests.gpu.parity", "--device", "cuda"),
        rehearsal=_ranks("{exchanging_ranks}", "tests.gpu.parity", "--device", "cpu"),
        seconds=120,
        call=1,
        unrehearsed="NCCL, streams and the allocator of a GPU",
    ),
    _one_rank("qwen3_8b", 60),
    _one_rank("qwen3_30b_a3b", 60),
    Part(
        name="links",
        shows="matmul rate by dtype and rate of copies; with several GPUs, latency and bandwidth of the collectives "
        "by size: the machine file",
        command=_ranks("{ranks}", "benchmarks.gpu.links", "--device", "cuda"),
        rehearsal=_ranks("{ranks}", "benchmarks.gpu.links", "--device", "cpu", "--largest", "65536"),
        seconds=45,
        call=1,
        unrehearsed="every figure",
    ),
    Part(
        name="float16",
        shows="Newton-Schulz in float16 neither overflows nor loses accuracy on matrices with a dominating row",
        command=_module("benchmarks.one_gpu.float16", "--device", "cuda"),
        rehearsal=_module("benchmarks.one_gpu.float16", "--device", "cpu"),
        seconds=30,
        call=1,
        unrehearsed="the sums of the GPU's library",
    ),
    Part(
        name="newton_schulz",
        shows="Newton-Schulz by shape and kernel against the measured matmul rate, eager and as a CUDA graph, and "
        "which kernel wins",
        command=_module("benchmarks.gpu.newton_schulz", "--device", "cuda"),
        rehearsal=_module("benchmarks.gpu.newton_schulz", "--device", "cpu"),
        seconds=100,
        call=1,
        needs=("tyro",),
        unrehearsed="every time, graphs, and the symmetric kernels",
    ),
    _one_rank("kimi_k2", 120),
    Part(
        name="tests",
        shows="one GPU computes what the CPU does: orthogonalization, kernels, a Muon step, and no step waits for it",
        command=("{python}", "-m", "pytest", "tests/gpu", "-q", "-m", "gpu", "-p", "no:cacheprovider"),
        rehearsal=("{python}", "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"),
        seconds=120,
        call=1,
        needs=("pytest", "pytest_timeout"),
        unrehearsed="numbers: fake tensors have shapes, dtypes and devices alone",
    ),
    _training(
        "sweep", 2, 390, "loss of Muon beside AdamW at three rates, and of other Muons, 40 M tokens", SWEEP, "4e7"
    ),
    _training("long", 3, 270, "loss of Muon beside AdamW at the best rates, 100 M tokens", LONG, "1e8"),
    Part(
        name="recipe",
        shows="the main recipe learns in 50 steps, shard0 and owned alike",
        command=_recipe("shard0 owned", "--steps", "50", "--fall", "0.5"),
        rehearsal=_recipe("shard0 owned", "--steps", "3", "--tiny"),
        seconds=150,
        call=3,
        needs=TITAN,
        unrehearsed="CUDA's fused AdamW, FlexAttention and NCCL",
    ),
    Part(
        name="exchanges",
        shows="time of a step: our exchanges, torch.optim.Muon, TorchTitan's DistMuon, AdamW",
        command=_script("bench_step", "--device", "cuda", "--nproc", "{ranks}", "--model", "gpu", "--repeats", "15"),
        rehearsal=_script("bench_step", "--nproc", "{ranks}", "--model", "tiny", "--repeats", "2"),
        seconds=100,
        call=3,
        needs=("tyro",),
        unrehearsed="every time, and DistMuon's streams",
    ),
    Part(
        name="compile",
        shows="compiled layers and compiled FlexAttention follow the dense attention's losses",
        command=_recipe("dense flex compiled", "--steps", "6"),
        rehearsal=_recipe("dense traced", "--steps", "2", "--tiny"),
        seconds=180,
        call=3,
        needs=TITAN,
        unrehearsed="the compiler, and FlexAttention, which has no backward on the CPU",
    ),
    Part(
        name="layouts",
        shows="the recipe under HSDP, TP, EP and PP follows FSDP's losses",
        command=_recipe("fsdp hsdp tp ep pp", "--steps", "6"),
        rehearsal=_recipe("fsdp tp ep pp", "--steps", "2", "--tiny"),
        seconds=270,
        least_gpus=2,
        needs=TITAN,
        unrehearsed="NCCL; HSDP, which the test suite trains on gloo",
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
)


def chosen(names: list[str], call: int | None = None, parts: tuple[Part, ...] = PARTS) -> tuple[Part, ...]:
    """Parts by name, all for no names, and of a call. Raises ValueError for an unknown name, and for no part."""
    known = [part.name for part in parts]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no part {', '.join(unknown)}; the parts are {', '.join(known)}")
    wanted = tuple(part for part in parts if (not names or part.name in names) and call in (None, part.call))
    if not wanted:
        raise ValueError(f"call {call} has no part {', '.join(names)}; leave out --call, or --parts")
    return wanted

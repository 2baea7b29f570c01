"""One table: the run of a recipe has the losses of a reference, at any layout, with any option, and continued."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import models
from tests import tiny
from tests.dist.harness import run_ranks
from tests.machines import machine_file
from tests.unit.recipe_files import KEYS
from titan_muon.trainer.recipe import degrees

Keys = dict[str, str]
STEPS, SEQUENCE, BATCH = 4, 256, 4
# Sums in another order differ in the last digits: by 2e-5 at most here. TorchTitan's experts compute in bfloat16 for
# every recipe, with 2e-4.
TOLERANCES = {"llama3/tiny": 1e-4, "qwen3/moe_tiny": 1e-3, "deepseek_v3/tiny": 1e-3, "qwen3/two_experts": 1e-3}
DENSE, EXPERTS, LATENT, TWO_EXPERTS = TOLERANCES
NORM_TOLERANCE, CLIPPED_TOLERANCES = 0.02, {DENSE: 2e-3, LATENT: 5e-3}


def keys(*texts: str) -> Keys:
    """Keys of a recipe from `key=value`; a semicolon is between the elements of a list."""
    pairs = (word.split("=", 1) for text in texts for word in text.split())
    return {KEYS.get(key, key): value for key, value in pairs}


RECIPE = keys(
    f"data.source=files data.validation_fraction=0.05 steps={STEPS} local=-1 batch={BATCH} training.seq_len={SEQUENCE}",
    f"training.mixed_precision_param=float32 lr_scheduler.warmup_steps=2 lr_scheduler.total_steps={STEPS}",
    "metrics.log_freq=1 metrics.enable_tensorboard=false validator.steps=-1 checkpoint.enable=false",
)
PIPELINE = "pp=2 local=2 steps=3 validator.enable=false"
BLOCKS = ",".join(f'"{name}"' for name in ("tok_embeddings", *(f"layers.{index}" for index in range(6))))
RULES = (
    "muon=owned placement.rule={match='*_norm.weight',placement='owned',owner='layer'};"
    "{match='*.wo.weight',placement='owned',owner=1};{match='*.w1.weight',placement='shard0'}"
)
# The defaults on GPUs, and the settings of large models.
AS_ON_GPUS = "loss.chunks=8 ac=selective optimizer.implementation=fused"
CLIPPED = "qk_clip.mode=clip steps=2 batch=2 local=1 muon.expert.ns_dtype=float32 validator.enable=false"
SLOW = machine_file(node_gb=1e-6, tflops=1.0, tflops_float32=1.0, node_latency_us=0.0).file
# Experts on both ranks, two passes to a step, and slow links, so that a plan defers many updates.
DEFERRED = (
    "ep=2 local=1 muon.expert.ns_dtype=float32 muon.expert.wire_dtype=float32 muon.ns_steps=2 "
    f"muon.expert.buffer_gib=2e-4 machine.file={SLOW} checkpoint.enable=true checkpoint.freq=2"
)
COMPILED = "compile.enable=true compile.backend=aot_eager"
FULL, ASYNC = f"{DEFERRED} ac=full", f"{DEFERRED} {COMPILED} checkpoint.async_mode=async"
FORWARD = "muon.overlap=forward"
STATE_ON_HOST, ALL_ON_HOST = "optimizer.offload=state cpu_offload=false", "optimizer.offload=none cpu_offload=true"
WARMUP = "ep=2 muon.momentum_warmup_steps=5"
STEP_2 = "steps=2 checkpoint.enable=true checkpoint.freq=2"


@dataclass(frozen=True)
class Row:
    """A claim about the run of a recipe.

    Attributes:
        then: ranks and further keys of a second run, which continues after half of the steps.
        reference: ranks and keys of the reference.
        exact: every digit is equal, and so are the tensors of the last checkpoints.
        fast: whether the row runs without `make slow`.
        says: texts of the list of parameters and owners.
    """

    name: str
    ranks: int
    model: str
    keys: Keys
    then: tuple[int, Keys] | None = None
    reference: tuple[int, Keys] = (1, {})
    exact: bool = False
    fast: bool = False
    says: tuple[str, ...] = ()

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        keys = [need.key for need in degrees.TORCH_NEEDS if need.key in self.keys]
        return [*([] if self.fast else [pytest.mark.slow]), *map(tiny.needs_torch_for, keys)]


def row(name: str, ranks: int, model: str, text: str = "", then: tuple[int, str] | None = None, **fields: Any) -> Row:
    further = None if then is None else (then[0], keys(then[1]))
    return Row(name, ranks, model, keys(text), further, **{"fast": True, **fields})


def staged(name: str, ranks: int, model: str, text: str = "") -> Row:
    size = ranks // 2
    places = (f"rank {at}" if size == 1 else f"ranks {at * size} to {at * size + size - 1}" for at in range(2))
    says = tuple(f"pipeline rank {at} of 2, {place}: " for at, place in enumerate(places))
    return row(name, ranks, model, f"{PIPELINE} {text}", says=says)


def clipped(name: str, family: str, text: str = "") -> Row:
    """A row of two ranks with clipped heads in each step."""
    base = f"{CLIPPED} qk_clip.threshold={3.0 if family == DENSE else 0.05}"
    return row(f"qk_clip {name}", 2, family, f"{base} {text}", reference=(1, keys(base)))


def exact(name: str, base: str, first: str, second: str) -> Row:
    """A row of two ranks in halves, whose keys change no digit of `base`."""
    return row(name, 2, EXPERTS, f"{base} {first}", (2, second), reference=(2, keys(base)), exact=True, fast=False)


ROWS = [
    row("fsdp2 tp2", 4, DENSE, "tp=2"),
    row("owned", 2, EXPERTS, "muon=owned", says=("owned by rank",)),
    row("fsdp4", 4, DENSE, fast=False),
    row("fsdp2 cp2", 4, DENSE, "cp=2", fast=False),
    row("hsdp2 fsdp2", 4, EXPERTS, "hsdp=2", fast=False),
    row("ep2 fsdp2", 4, EXPERTS, "ep=2", fast=False),
    row("tp2 ep2 as on gpus", 4, EXPERTS, f"tp=2 ep=2 {AS_ON_GPUS}", fast=False),
    row("mla ep4", 4, LATENT, "ep=4", fast=False),
    row("mla cp2", 2, LATENT, "cp=2 parallelism.context_parallel_load_balancer=none", fast=False),
    row("tp2 cp2", 4, DENSE, "tp=2 cp=2", fast=False),
    row("microbatches", 1, DENSE, "local=1"),
    staged("pp2", 2, DENSE),
    staged("pp2 tp2", 4, DENSE, "tp=2"),
    staged("pp2 tp2 owned", 4, DENSE, "tp=2 muon=owned"),
    staged("pp2 fsdp2", 4, DENSE),
    staged("pp2 fsdp2 owned", 4, DENSE, "muon=owned"),
    staged("pp2 ep2", 4, EXPERTS, "ep=2"),
    # The last stage has no Muon matrix, and takes part in agreements.
    staged("no matrices", 2, DENSE, f'parts=[{BLOCKS}];["norm","lm_head"]'),
    staged("interleaved", 2, DENSE, "schedule=Interleaved1F1B"),
    staged("zero bubble", 2, DENSE, "schedule=ZBVZeroBubble local=4"),
    row("owned microbatches", 2, DENSE, "muon=owned local=1"),
    row("owned ep2", 2, EXPERTS, "muon=owned ep=2"),
    row("owned, more ranks than experts", 4, TWO_EXPERTS, "muon=owned ep=2"),
    row("owned hsdp2, each", 4, DENSE, "muon=owned hsdp=2 placement.replicas=each muon.expert.replicas=split local=1"),
    row("owned hsdp2, one", 4, DENSE, "muon=owned hsdp=2 placement.replicas=one", fast=False),
    row("owned tp2", 4, DENSE, "muon=owned tp=2", says=("tensor parallelism cuts owned matrices",), fast=False),
    row("owned, recomputed", 2, EXPERTS, "muon=owned ac=selective", fast=False),
    row("owned, compiled", 2, DENSE, f"muon=owned {COMPILED}"),
    row("owned by rules", 2, DENSE, RULES, says=("owned by rank 1", "the step communicates:", "w1.weight): sharded; ")),
    row("from owned to fsdp2", 4, DENSE, "muon=owned", (2, "muon=shard0")),
    row("from fsdp2 to one rank", 2, DENSE, "", (1, "muon=owned")),
    row("from ep2 to one rank", 2, EXPERTS, "ep=2", (1, "ep=1"), fast=False),
    row("from stages to one rank", 2, DENSE, PIPELINE, (1, "pp=1")),
    row("from one rank to stages", 1, DENSE, f"{PIPELINE} pp=1", (2, "pp=2")),
    clipped("fsdp", DENSE),
    clipped("hsdp", DENSE, "hsdp=2"),
    clipped("cp", DENSE, "cp=2"),
    clipped("owned", DENSE, "muon=owned"),
    clipped("tp", LATENT, "tp=2"),
    clipped("ep", LATENT, "ep=2"),
    # Each rank observes the layers of the stage. Observations before the first step do not count: a trial run on
    # uninitialized memory, which deterministic runs fill with NaN.
    clipped("pp", DENSE, f"{PIPELINE} steps=2 debug.deterministic=true"),
    row("validated", 1, EXPERTS, "validator.freq=1", reference=(1, keys("validator.enable=false")), exact=True),
    row("resumed", 2, EXPERTS, WARMUP, (2, ""), reference=(2, keys(WARMUP)), exact=True),
    exact("forward", FULL, FORWARD, FORWARD),
    exact("forward, asynchronous, compiled", ASYNC, FORWARD, FORWARD),
    exact("states, then all on the host", FULL, STATE_ON_HOST, ALL_ON_HOST),
    exact("all, then states on the host", FULL, ALL_ON_HOST, STATE_ON_HOST),
    exact("states on the host, then none", FULL, STATE_ON_HOST, "optimizer.offload=none"),
    exact("owned on the host, then not", f"{DEFERRED} muon=owned", ALL_ON_HOST, "cpu_offload=false"),
]


@dataclass(frozen=True)
class Run:
    """A run's folder, its records by step, and its list of parameters and owners."""

    folder: Path
    records: dict[str, dict[int, Any]]
    optimizers: str

    def counts(self) -> list[str]:
        return re.findall(r"^\w+: .* of parameters$", self.optimizers, re.MULTILINE)

    def tensors(self, to: Path) -> dict[str, torch.Tensor]:
        """The tensors of the last checkpoint, if it is one of all steps."""
        last = self.folder / "checkpoint" / f"step-{STEPS}"
        if not last.is_dir():
            return {}
        dcp_to_torch_save(last, to)
        flat, _ = flatten_state_dict(torch.load(to, weights_only=False))
        return {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}


def run(rank: int, world_size: int, path: str, overrides: list[str]) -> Run:
    flavors = models._family("qwen3").FLAVORS
    flavors["two_experts"] = replace(flavors["moe_tiny"], layers=2, experts=2)
    folder = tiny.train(path, overrides)
    records = {key: tiny.records(folder, key) for key in ("loss", "grad_norm", "val_loss", "tokens", "qk")}
    return Run(folder, records, (folder / "optimizers.txt").read_text())


Train = Callable[[int, str, Keys], Run]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`trained(ranks, model, keys)`: the run of a recipe, trained on first use."""
    folder, made = tmp_path_factory.mktemp("corpus"), dict[str, Run]()
    for index in range(10):
        words = " ".join(f"word{(index * 7 + i * i) % 53} means {i % 11};" for i in range(300))
        (folder / f"{index:02}.txt").write_text(words)
    (folder / "empty.toml").touch()

    def train(ranks: int, model: str, keys: Keys) -> Run:
        words = json.dumps([ranks, model, keys])
        if words not in made:
            family, flavor = model.split("/")
            places = {"dump_folder": f"{folder}/runs", "data.files": f"{folder}/*.txt", "data.cache": f"{folder}/cache"}
            named = {"name": f"run{len(made)}", "model.name": family, "model.flavor": flavor}
            recipe = {**RECIPE, **places, **named, **keys}
            overrides = [word for key, value in recipe.items() for word in (f"--{key}", *value.split(";"))]
            made[words] = run_ranks(run, ranks, str(folder / "empty.toml"), overrides, timeout=600)[0]
        return made[words]

    return train


def run_of(row: Row, trained: Train) -> Run:
    if row.then is None:
        return trained(row.ranks, row.model, row.keys)
    ranks, keys = row.then
    name = re.sub(r"\W+", "_", row.name)
    kept = {**row.keys, "name": name, "checkpoint.enable": "true"}
    first = trained(row.ranks, row.model, {**kept, "training.steps": str(STEPS // 2)})
    second = trained(ranks, row.model, {**kept, **keys, "checkpoint.load": str(first.folder)})
    assert first.folder == second.folder, "a continued run must stay in its folder"
    return second


@pytest.mark.parametrize("row", [pytest.param(row, marks=row.marks, id=row.name) for row in ROWS])
def test_a_recipe_has_the_losses_of_its_reference(row: Row, trained: Train, tmp_path: Path) -> None:
    expected, found = trained(row.reference[0], row.model, row.reference[1]), run_of(row, trained)
    losses, steps = found.records["loss"], int(row.keys.get("training.steps", STEPS))
    assert losses.keys() == set(range(1, steps + 1))
    assert [text for text in row.says if text not in found.optimizers] == []
    if row.exact:
        for key in ("loss", "grad_norm", "tokens", "val_loss"):
            shared = found.records[key].keys() & expected.records[key].keys()
            assert {s: found.records[key][s] for s in shared} == {s: expected.records[key][s] for s in shared}, key
        ours, theirs = (run.tensors(tmp_path / "weights.pt") for run in (found, expected))
        assert [name for name in theirs if ours and not torch.equal(ours[name], theirs[name])] == []
        return
    clips, tolerance = "qk_clip.mode" in row.keys, TOLERANCES[row.model]
    close = {key: {s: expected.records[key][s] for s in losses} for key in ("loss", "grad_norm", "tokens")}
    if not clips:
        assert close["loss"][steps] < close["loss"][1] - 0.5, "the reference must learn, or following it means nothing"
        # Stages start as the whole model does.
        assert losses[1] == pytest.approx(close["loss"][1], abs=1e-5 if row.model == DENSE else tolerance)
    assert found.records["tokens"] == close["tokens"]
    assert losses == pytest.approx(close["loss"], abs=CLIPPED_TOLERANCES[row.model] if clips else tolerance)
    # Muon and AdamW normalize, so that losses do not show gradients that are wrong by a factor.
    assert found.records["grad_norm"] == pytest.approx(close["grad_norm"], rel=NORM_TOLERANCE)
    assert found.counts() == expected.counts(), "the counts are of the whole model"
    if STEPS in found.records["val_loss"]:
        assert found.records["val_loss"][STEPS] == pytest.approx(expected.records["val_loss"][STEPS], abs=tolerance)
    for step, logits in expected.records["qk"].items() if clips else ():
        assert logits["heads_above_threshold"] > 0, "clipping has to matter"
        assert found.records["qk"][step]["max_logit"] == pytest.approx(logits["max_logit"], rel=1e-2), step


def test_hugging_face_weights_are_written_and_read(trained: Train) -> None:
    from safetensors import safe_open

    hf = "checkpoint.last_save_model_only=true checkpoint.last_save_in_hf=true muon=owned"
    exported = trained(2, EXPERTS, keys(STEP_2, hf))
    shapes, folder = {}, exported.folder / "checkpoint" / "step-2"
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            shapes |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (256, 128)
    start = f"{STEP_2} checkpoint.initial_load_path={folder} checkpoint.initial_load_in_hf=true"
    owned, sharded = (
        trained(2, EXPERTS, keys(start, f"muon={placed}")).records["loss"][1] for placed in ("owned", "shard0")
    )
    assert owned == pytest.approx(sharded, abs=1e-3)
    assert owned < exported.records["loss"][2] + 0.1

"""Every shipped recipe is accepted, a dry run's plan orthogonalizes each matrix once, and a wrong recipe is refused."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import models  # noqa: F401 (registers the families)
from titan_muon import registry
from titan_muon.trainer.commands import train
from titan_muon.trainer.dry_run.meta_model import smallest_world
from titan_muon.trainer.dry_run.report import compare, report
from titan_muon.trainer.recipe import Recipe, RecipeError, degrees, load, to_toml
from titan_muon.trainer.recipe.command_line import Command, parse

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(path.stem for path in CONFIGS.glob("*.toml"))
SMALL = ["qwen_moe_muon", "qwen_moe_adamw", "qwen_moe_shard0", "llama_muon", "deepseek_muon"]
WORLDS = [1, 2, 4, 8]
# Their plans take seconds, so they are planned for the last world alone.
LARGE = ["deepseek_v3_muon", "deepseek_v4_style_muon", "kimi_k2_muon"]
OWNED = "--placement.muon owned"


def worlds(recipe: str) -> list[int]:
    """World sizes for the dry runs: those that hold the degrees, at least the smallest."""
    smallest = smallest_world(load(CONFIGS / f"{recipe}.toml"))
    return [size for size in WORLDS if size % smallest == 0][-1 if recipe in LARGE else 0 :] or [smallest]


DryRun = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> DryRun:
    """A function that returns the figures of a dry run, and the printed text."""

    def run(recipe: str, world_size: int | None, words: str = "", **options: Any) -> tuple[dict[str, Any], str]:
        file = tmp_path / "plan.json"
        loaded = load(CONFIGS / f"{recipe}.toml", ["--data.cache", str(tmp_path), *words.split()])
        report(Command(recipe=loaded, world_size=world_size, json=str(file), verbose=True, **options))
        assert not dist.is_initialized(), "a dry run leaves no process group behind"
        return json.loads(file.read_text()), capsys.readouterr().out

    return run


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_on_the_same_tokens_on_every_layout(recipe: str) -> None:
    """With a batch proportional to the ranks, curves of two layouts would show different training."""
    training = load(CONFIGS / f"{recipe}.toml").training
    assert training.global_batch_size > 0
    if recipe in SMALL:
        assert training.global_batch_size * training.seq_len == 2048, "README says so"


@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [
        pytest.param(recipe, size, marks=pytest.mark.slow if recipe in LARGE else ())
        for recipe in RECIPES
        for size in worlds(recipe)
    ],
)
def test_every_recipe_dry_runs(recipe: str, world_size: int, dry_run: DryRun, tmp_path: Path) -> None:
    plan, printed = dry_run(recipe, world_size)
    assert f"on {world_size} rank{'s' if world_size > 1 else ''}" in printed
    assert to_toml(load(CONFIGS / f"{recipe}.toml", ["--data.cache", str(tmp_path)])) in printed
    optimizers = {parameter["optimizer"] for parameter in plan["parameters"]}
    if recipe.endswith("_adamw"):
        assert optimizers == {"adamw"}
        return
    assert optimizers == {"adamw", "muon"}
    assert plan["orthogonalizations"] == plan["muon_matrices"] > 0
    assert len(plan["ranks"]) == world_size


@pytest.mark.parametrize(("recipe", "world_size"), [("qwen_moe_owned", 4), ("llama_muon", 64), ("deepseek_muon", 64)])
def test_the_dry_run_of_owned_lists_the_owners(recipe: str, world_size: int, dry_run: DryRun) -> None:
    """The table has the owned matrices' bytes and the plan's FLOPs; no step communicates."""
    experts = f"--parallelism.expert_parallel_degree {min(world_size, 16)}" if recipe != "llama_muon" else ""
    plan, printed = dry_run(recipe, world_size, f"{OWNED} {experts} --training.global_batch_size 64")
    # Where there are more ranks than experts, stacks are owned too.
    stacks = 3 if world_size > 16 else 2
    owned = [p for p in plan["parameters"] if p["optimizer"] == "muon" and len(p["shape"]) <= stacks]
    matrices = sum(p["shape"][0] if len(p["shape"]) == 3 else 1 for p in owned)
    assert sum(owner["bytes"] for owner in plan["owners"]) == sum(4 * prod(p["shape"]) for p in owned)
    assert sum(owner["matrices"] for owner in plan["owners"]) == matrices
    flops = {rank["rank"]: rank["ns_flops"] for rank in plan["ranks"]}
    assert {owner["rank"]: owner["flops"] for owner in plan["owners"]} == dict.fromkeys(range(world_size), 0) | flops
    assert f"at rest on the fullest of {world_size} ranks" in printed
    assert ("ranks own nothing" in printed) == (matrices < world_size)
    assert plan["collectives_per_step"] == 0
    assert f"Muon step: {plan['muon_matrices']:,} matrices local, 0 exchanged" in printed
    assert plan["memory"]["parameters"] >= max(owner["bytes"] for owner in plan["owners"])


REPLICAS, PEERS = "--parallelism.data_parallel_replicate_degree 2", "--parallelism.tensor_parallel_degree 2"
EACH, REDUNDANT, SPLIT = "--placement.replicas each", "--muon.expert.replicas redundant", "--muon.expert.replicas split"
SKIP, EP2 = "--muon.expert.on_bad_gradient skip_missing", "--parallelism.expert_parallel_degree 2"
BF16, BATCH = "--training.dtype bfloat16 --muon.expert.rounding", "--training.global_batch_size 64"
FILES = "--data.files absent/*.txt --data.tokenizer hf --data.tokenizer_path absent"
EACH4, EXPERTS8 = f"llama_muon 4 {OWNED} {REPLICAS} {EACH}", f"qwen_moe_muon 8 {OWNED} {REPLICAS} {EP2}"
TALKS, MS = "owned, and yet the step communicates:", r"[\d.,]+ ms of"
SHOWN = [
    # A recipe, ranks and words; and a pattern of the printed text, or of a text that is not there.
    ("moonlight_muon 8", "logits above 100 are clipped, alpha 0.5; one all-reduce of 1,728 bytes a step"),
    (EACH4, "matrices local, 0 exchanged"),
    (EACH4, f"not {TALKS}"),
    (f"{EACH4} {SPLIT}", f'{TALKS}\n.*muon.expert.replicas = "split" shares out replicas; "redundant" would not'),
    (f"{EACH4} {SKIP}", f"{TALKS}\n.*muon.expert.on_bad_gradient skips missing gradients: replicas compare theirs"),
    (f"llama_muon 4 {OWNED} {PEERS}", f"{TALKS}\n.*: tensor parallelism cuts owned matrices; placement.muon = "),
    (f"{EXPERTS8} {REDUNDANT}", '"split", which sends results'),
    (EXPERTS8, "not repeated"),
    ("llama3_8b_muon 64 --muon.overlap forward", f"in forward +{MS} results.* hidden .*; in the step {MS} the ex"),
    ("llama_muon 2 --full", r"layers\.0\.attention\.wo\.weight.*layers\.5\.attention\.wo\.weight"),
    (
        "llama_muon 2 --muon.expert.ns_dtype float32",
        "12 of 128x128 by standard float32; keller_jordan x 5, eps 1e-14: alone .*6 of 128x512 by gram float32; .*: 1",
    ),
    (f"llama_muon 2 {BF16} stochastic", "adamw rounds to the nearest"),
    (f"llama_muon 2 {BF16} stochastic", "muon rounds stochastically"),
    (f"llama_muon 2 {BF16} nearest", "not muon rounds stochastically"),
    # Users plan a cluster on a laptop, whose CPU is irrelevant.
    (f"llama_muon 64 {BATCH}", "planned for GPUs.*estimate for 64 ranks of h100x8"),
    (f"llama_muon 1 {BATCH}", "planned for GPUs.*estimate for 1 rank of h100x8"),
    (f"llama_muon here {BATCH}", "planned for CPUs.*estimate for 1 rank of cpu"),
    (f"llama_muon 64 {BATCH} --device cpu", "planned for CPUs.*estimate for 64 ranks of cpu"),
    (f"qwen_moe_muon 16 {BATCH} --machine.name h100x8", r"memory +fits: [\d.]+ GiB of 79.0 GiB"),
    (f"qwen_moe_muon 16 {BATCH}", r"a step takes [\d.]+ \w+, and with AdamW for all parameters.*too small for a share"),
    ("llama3_8b_muon 64", r"[\d.]+ % over the products of [\d,]+ tokens in 8 passes, [\d.]+ s at 57 % of "),
    (f"llama_muon here {BATCH}", "not % over the products"),
    # Another machine has files.
    (f"qwen_moe_muon 16 {BATCH} {FILES}", "would be refused.*data.tokenizer_path = 'absent' has no tokenizer.json"),
]


@pytest.mark.parametrize(("words", "shown"), SHOWN)
def test_a_dry_run_explains(words: str, shown: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe, ranks, *rest = words.split()
    world = [] if ranks == "here" else ["--world-size", ranks]
    report(parse(["--config", recipe, "--dry-run", *world, "--data.cache", str(tmp_path), *rest]))
    found = re.search(shown.removeprefix("not "), capsys.readouterr().out, re.DOTALL)
    assert (found is None) == shown.startswith("not ")


def test_the_default_of_owned_placement_is_the_documented_default(dry_run: DryRun) -> None:
    """Also a rule with an owner has one in each replica: the rank is a place on the FSDP axis."""
    words = f"{OWNED} {REPLICAS}"
    plan, _ = dry_run("llama_muon", 4, words)
    assert dry_run("llama_muon", 4, f"{words} --placement.replicas one")[0] == plan
    assert dry_run("llama_muon", 4, f"{words} {EACH}")[0] != plan
    words += " --placement.rule {match='*.wo.weight',placement='owned',owner=1}"
    each = f"{EACH} --muon.expert.replicas split"
    assert dry_run("llama_muon", 4, words)[0] == dry_run("llama_muon", 4, f"{words} {each}")[0]


@pytest.fixture
def _registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries that a test may add to."""
    for values in (registry.placements, registry.models, registry.optimizers):
        monkeypatch.setattr(values, "_values", dict(values._values))


@pytest.mark.usefixtures("_registries")
def test_a_package_may_bring_another_placement(dry_run: DryRun) -> None:
    placed = []

    def theirs(parallelize: registry.Parallelize, recipe: Recipe) -> registry.Parallelize:
        placed.append(recipe.placement.muon)
        return parallelize

    registry.placements.register("theirs", theirs)
    assert dry_run("qwen_moe_muon", 2, "--placement.muon theirs")[0]["muon_matrices"] == 208
    assert placed == ["theirs"]


@pytest.mark.usefixtures("_registries")
def test_a_package_may_bring_another_model(dry_run: DryRun) -> None:
    """titan/ knows model families only by registration."""
    built = []

    def build(flavor: str, vocab_size: int | None) -> Any:
        from torchtitan.models.llama3 import model_registry

        built.append((flavor, vocab_size))
        return model_registry("debugmodel")

    registry.models.register("their_llama", registry.ModelFamily(lambda: ("small",), build))
    plan, _ = dry_run("llama_muon", 2, "--model.name their_llama --model.flavor small")
    assert built == [("small", 258)]
    names = [p["fqn"] for p in plan["parameters"] if p["optimizer"] == "muon"]
    # Queries, keys and values of a fused projection are three matrices.
    assert plan["muon_matrices"] == sum(3 if "wqkv" in fqn else 1 for fqn in names) > len(names)


@pytest.mark.usefixtures("_registries")
def test_uncounted_states_of_another_packages_optimizer_are_reported(dry_run: DryRun) -> None:
    registry.optimizers.register("their_sgd", registry.OptimizerEntry(torch.optim.SGD))
    rule = "{match='*norm*',optimizer='their_sgd',options={lr=0.1}}"
    plan, printed = dry_run("llama_muon", 1, f"--optimizer.rule {rule}")
    assert plan["memory"]["uncounted_optimizers"] == ["their_sgd"]
    assert "the states of their_sgd are not counted" in printed


def elements_of(plan: dict[str, Any]) -> Counter[str]:
    elements: Counter[str] = Counter()
    for parameter in plan["parameters"]:
        elements[parameter["optimizer"]] += prod(parameter["shape"])
    return elements


def test_momentum_kept_by_owners_is_counted_on_the_fullest_rank(dry_run: DryRun) -> None:
    once, _ = dry_run("llama_muon", 4, "--parallelism.data_parallel_replicate_degree 4 --muon.state owner")
    kept, elements = [cost["state_elements"] for cost in once["ranks"]], elements_of(once)
    assert sum(kept) == elements["muon"] > 2 * max(kept)
    assert once["memory"]["optimizer_states"] == 4 * max(kept) + 8 * elements["adamw"]


def test_memory_of_optimizer_states_follows_the_state_dtypes(dry_run: DryRun) -> None:
    """Momentum in the state dtype, two averages for AdamW, both exact on one rank."""
    for size, dtype in ((4, "float32"), (2, "bfloat16")):
        plan, _ = dry_run("llama_muon", 1, f"--muon.state_dtype {dtype}")
        memory, elements = plan["memory"], elements_of(plan)
        assert memory["optimizer_states"] == size * elements["muon"] + 8 * elements["adamw"]
        others = ("total", "host_parameters", "host_gradients", "host_states", "uncounted_optimizers")
        assert memory["total"] == sum(size for name, size in memory.items() if name not in others)
        assert memory["host_parameters"] == memory["host_gradients"] == memory["host_states"] == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_offloaded_states_count_on_the_host_and_two_loads_count_on_the_device(device: str, dry_run: DryRun) -> None:
    words = "--optimizer.offload state --adamw.state_dtype bfloat16"
    plan, _ = dry_run("llama_muon", 1, words, device=device)
    sizes = [4 * prod(a["shape"]) for a in plan["parameters"] if a["optimizer"] == "muon"]
    sizes += 2 * [2 * prod(a["shape"]) for a in plan["parameters"] if a["optimizer"] == "adamw"]
    memory, (cost,) = plan["memory"], plan["ranks"]
    # Pinned memory is allocated in powers of two.
    assert memory["host_states"] == sum(2 ** math.ceil(math.log2(s)) if device == "cuda" else s for s in sizes)
    # Local matrices: the largest batch of one shape decides.
    muon = Counter(tuple(a["shape"]) for a in plan["parameters"] if a["optimizer"] == "muon")
    assert cost["buckets"] == len(muon)
    assert cost["bucket_elements"] == max(count * prod(shape) for shape, count in muon.items())
    assert memory["optimizer_states"] == max(8 * cost["bucket_elements"], 8 * elements_of(plan)["adamw"])


def test_offloaded_parameters_count_on_the_host_and_two_loads_count_on_the_device(dry_run: DryRun) -> None:
    words = "--training.enable_cpu_offload true --muon.state_dtype bfloat16"
    plan, printed = dry_run("llama_muon", 1, words, device="cpu")
    memory, (cost,), elements = plan["memory"], plan["ranks"], elements_of(plan)
    assert (memory["parameters"], memory["gradients"]) == (0, 0)
    assert memory["host_parameters"] == memory["host_gradients"] == 4 * elements.total()
    assert memory["host_states"] == 2 * elements["muon"] + 8 * elements["adamw"]
    # Momentum in bfloat16 with the gradient, and of AdamW's both averages, the parameter and the gradient.
    assert memory["optimizer_states"] == max(2 * (2 + 4) * cost["bucket_elements"], 2 * 16 * elements["adamw"])
    assert re.search(r"host gradients +[\d.,]+ MiB\n +host states", printed)


def test_the_smallest_world_fits_the_degrees() -> None:
    ep4, shards = "--parallelism.expert_parallel_degree 4", "--parallelism.data_parallel_shard_degree 3"
    for words, ranks in (("", 1), (ep4, 4), (f"{PEERS} {ep4}", 4), (f"{shards} {REPLICAS}", 6)):
        assert smallest_world(load(CONFIGS / "qwen_moe_muon.toml", words.split())) == ranks


@pytest.fixture
def _cut_by_any_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run only cuts the model, which torch could do before TorchTitan could train the parts."""
    others = tuple(need for need in degrees.TORCH_NEEDS if need.key != "parallelism.pipeline_parallel_degree")
    monkeypatch.setattr(degrees, "TORCH_NEEDS", others)


@pytest.mark.usefixtures("_cut_by_any_torch")
@pytest.mark.parametrize("placement", ["shard0", "owned"])
def test_every_pipeline_rank_has_a_separate_plan(placement: str, dry_run: DryRun) -> None:
    """Counts cover the whole model; tables, plans, owners and memory cover a pipeline rank."""
    whole, alone = dry_run("qwen_moe_muon", 2)
    cut = f"--parallelism.pipeline_parallel_degree=2 --placement.muon={placement}"
    plan, printed = dry_run("qwen_moe_muon", 4, cut)
    parts = plan["pipeline_ranks"]
    assert sum(part["muon_matrices"] for part in parts) == whole["muon_matrices"]
    names = sorted(p["fqn"] for part in parts for p in part["parameters"])
    assert names == sorted(p["fqn"] for p in whole["parameters"])
    assert [[cost["rank"] for cost in part["ranks"]] for part in parts] == [[0, 1], [2, 3]]
    owners = [[owner["rank"] for owner in part["owners"]] for part in parts]
    assert owners == ([[0, 1], [2, 3]] if placement == "owned" else [[], []])
    assert all(part["memory"]["total"] < whole["memory"]["total"] for part in parts)
    counts = re.compile(r"^\w+: .* of parameters$", re.MULTILINE)
    assert counts.findall(alone) == counts.findall(printed)
    for rank in range(2):
        # In the table, in the plan with the memory, and in the verdict.
        assert printed.count(f"pipeline rank {rank} of 2, ranks {2 * rank} to {2 * rank + 1}: ") == 3


def test_compare_lists_the_shortest_fitting_step_first() -> None:
    words = ["--config", str(CONFIGS / "qwen_moe_muon.toml"), "--dry-run", "--world-size", "4"]
    asked = parse([*words, "--compare", "placement.muon=owned,shard0,nowhere"])
    lines = [line for line in compare(asked.alternatives, 4, None) if "placement.muon" in line]
    tabled = [line for line in lines if "refused" not in line]
    assert len(tabled) == 2
    times = [float(re.split(r" {2,}", line.strip())[3].replace(",", "")) for line in tabled]
    assert times == sorted(times)
    assert [line for line in lines if "refused: " in line] == [lines[-1]]
    assert "nowhere" in lines[-1]


# Recipes that a training refuses before its first step, each by a dry run, with the text of the error

EP, TP = "--parallelism.expert_parallel_degree", "--parallelism.tensor_parallel_degree"
PLACE, RULE = "--placement.rule", "--optimizer.rule"
BETAS = "options={betas=[0.9,2.0]}"
ALONE = "--training.global_batch_size -1 --training.local_batch_size 1 --world-size"
STAGES = f"--parallelism.pipeline_parallel_degree 2 {ALONE} 2 --parallelism.pipeline_parallel_schedule"
PARTS = "--parallelism.module_fqns_per_model_part"
FIRST, SECOND = '["tok_embeddings","layers.0"]', '["layers.1","layers.2"]'
THIRD, LAST = '["layers.3"]', '["norm","lm_head"]'
OWNS = "placement='owned'"
REFUSED = [
    # By Muon.
    ("--muon.algorithm muonh", r"muon\.weight_decay = 0\.1: algorithm = 'muonh' keeps the norm"),
    ("--muon.algorithm normoun", r"muon\.algorithm = 'normoun' is unknown; did you mean 'normuon'\?"),
    ("--muon.expert.orthogonalize gram --muon.expert.ns_dtype bfloat16", r"ns_dtype = 'bfloat16'.* diverges"),
    ("--muon.expert.ns_kernel triton", r"muon\.expert\.ns_kernel = 'triton' needs CUDA and the package triton"),
    ("--muon.expert.buffer_gib 1e-6 --world-size 2", r"muon\.expert\.buffer_gib = .* is too small"),
    ("--muon.split {match='*.wq.weight',dims='(hf)d->h|fd',lengths={f=7}}", r"muon\.split: dims = "),
    # By rules, placements and models.
    ("--placement.muon own", r"placement\.muon = 'own' is unknown; did you mean 'owned'\?"),
    ("--model.flavor moe_tinny", r"^command line: model\.flavor = 'moe_tinny' is unknown; .* 'moe_tiny'"),
    (f"{RULE} {{match='*norm*',optimizer='muon'}}", r"optimizer\.rule\[0\] .* gives Muon \S+norm.weight of"),
    (f"{RULE} {{match='*norm*',optimizer='adamw',{BETAS}}}", "betas"),
    (f"{RULE} {{match='layer.0.*',optimizer='adamw'}}", r"^command line: optimizer\.rule\[0\]: 'layer\.0\.\*' take"),
    (f"{RULE} {{match='layers.*',optimizer='adamw'}} --placement.muon owned", "Muon takes no"),
    (f"{RULE} {{match='*wq*',optimizer='muon'}} --optimizer.defaults false", "no rule matches"),
    # By data, batch and machine.
    ("--model.vocab_size 10", r"data\.tokenizer has 258 tokens and the model embeds 10"),
    ("--data.tokenizer hf --data.tokenizer_path absent --model.vocab_size 9", r"data\.tokenizer_path = 'absent' has"),
    (f"--training.disable_cuda_graphs false {EP} 2", "disable_cuda_graphs"),
    ("--training.global_batch_size 7 --world-size 2", r"training\.global_batch_size = 7 is not accepted on 2"),
    (f"{TP} 3 --world-size 2", "takes a multiple of 3 processes, and this is 2"),
    ("--checkpoint.async_mode async_with_pinned_mem", r"checkpoint\.async_mode .* not accepted on the CPU"),
    # By the model.
    ("--model.name qwen", r"^command line: model\.name = 'qwen' is unknown; did you mean 'qwen3'\?.*llama3"),
    (f"{TP} 8 {ALONE} 8", "= 8 must divide the model's 8 query heads and 4 key-value"),
    (f"{EP} 3 {ALONE} 3", "= 3 must divide the model's 16 experts"),
    (f"--model.name llama3 --model.flavor tiny {EP} 2 {ALONE} 2", "but the model has no experts"),
    (f"--training.seq_len 384 --parallelism.context_parallel_degree 2 {ALONE} 2", "= 384 is not a multiple of 256"),
    ("--training.seq_len 60000", r"training\.seq_len = 60000 exceeds the 40960 positions .* set it to 40960"),
    ("--model.attention flex", r"model\.attention = 'flex' has no backward on the CPU"),
    ("--model.attention varlen", r"model\.attention = 'varlen' has no backward on the CPU"),
    ("--model.name gpt_oss --model.flavor debugmodel", r"model\.attention = 'dense'.* no linear attention, .*'flex'"),
    ("--qk_clip.mode clip", r'qk_clip\.mode = "clip" is not possible: layers\.0 normalizes .* "log" or "off"'),
    # By the schedule and the cut of a pipeline. TorchTitan would drop unlisted modules, and run stages as listed.
    (f"{STAGES} 1F1C", r"schedule = '1F1C'.*valid options"),
    (f"{STAGES} PipelineScheduleMulti", "has no order of its own"),
    (f"{STAGES} zbvzerobubble", "write it 'ZBVZeroBubble'"),
    (f"{STAGES} DualPipeV", "'DualPipeV'.*use 'ZBVZeroBubble'"),
    (f"{STAGES} 1F1B {PARTS} [{FIRST},{SECOND}]", "it names 4 modules"),
    (f"{STAGES} 1F1B {PARTS} [{FIRST},{THIRD},{SECOND},{LAST}]", r"it has 'layers\.3' in the place of 'layers\.1'"),
    (f"{STAGES} 1F1B {PARTS} [{FIRST},{SECOND},{THIRD},{LAST}]", r"has 4 parts; 1F1B on .*degree = 2 takes 2 parts"),
    (f'{STAGES} Interleaved1F1B {PARTS} [{FIRST},{SECOND},["layers.3","norm","lm_head"]]', "a multiple of 2 parts"),
    # By the owners.
    (f"{PLACE} {{match='*embed*',{OWNS}}} --world-size 2", r"tok_embeddings\.weight cannot be owned: .*in no layer"),
    (f"{PLACE} {{match='*.wo.weight',{OWNS},owner=2}} --world-size 2", r"layers\.0\..*wo\.weight cannot have owner"),
    (f"{PLACE} {{match='*experts*',{OWNS},owner=1}} {EP} 2 --world-size 2", r"experts\..* cannot have owner = 1; 0"),
    (
        f"{PLACE} {{match='*experts*',{OWNS}}} --world-size 2 --checkpoint.last_save_in_hf "
        "--checkpoint.last_save_model_only",
        r'placement\.rule: .*experts.* cannot be owned with checkpoint\.last_save_in_hf; set placement = "shard0"',
    ),
    # By files and packages.
    ("--import no_module", r"^imports: there is no module 'no_module'; install it, or start in the folder of"),
    ("--model.hf_assets_path /no/where", r"model\.hf_assets_path = '/no/where': no such folder"),
    ("--checkpoint.initial_load_path /", r"checkpoint\.initial_load_path = '/' has no \.metadata"),
    ("--compile.enable --compile.backend foo", r"compile\.backend = 'foo': torch\.compile has no such"),
]


@pytest.mark.usefixtures("_cut_by_any_torch")
@pytest.mark.parametrize(("words", "problem"), REFUSED)
def test_a_recipe_is_refused_before_training(words: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        train.train(parse(["--config", "configs/qwen_moe_muon.toml", "--dry-run", *words.split()]))

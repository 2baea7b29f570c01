"""States of Muon on ranks: stored once, saved without rounding, refused by name; ranges of rows. Bits: tests/parity."""

import copy
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.dist.harness import on_all_ranks, on_ranks, run_ranks
from tests.dist.small_params import full, parameters, placed
from tests.parity import layouts
from tests.parity.checkpoints import load, saved
from tests.parity.references import ALGORITHM
from tests.parity.table import ELEMENTS_SMOOTHED, NORMUON_AND_SOAP, ROWS_SMOOTHED, SPHERE, row
from tests.parity.training import Training, differences
from tests.reference_muon import newton_schulz
from tests.shared import equal, local, message, muon_keywords, whole
from titan_muon import Expert, Muon, registry
from titan_muon.adamw import AdamW
from titan_muon.engine.tensors.dtensor import copy_rows, set_rows
from titan_muon.features.mask import IDLE_STEPS
from titan_muon.options import Split
from titan_muon.planner.summary import summarize

SHAPES, MATRICES = ("wide", "tall", "uneven", "experts"), 3 + 8
ALGORITHMS: dict[str, dict[str, Any]] = {"normuon": ROWS_SMOOTHED, "adamuon": ELEMENTS_SMOOTHED, "muonh": SPHERE}
INT8 = {"state_dtype": "int8"}


def trained(
    world: int,
    layout: str,
    *seeds: int,
    math: dict[str, Any] | None = None,
    shapes: tuple[str, ...] = SHAPES,
    **options: Any,
) -> Training:
    """A training after steps with the gradients of `seeds`."""
    made = Training(row("states", world, (layout,), shapes=shapes, math=math or {}, options=options))
    for seed in seeds:
        made.step_on(seed)
    return made


def states(training: Training, key: str = "") -> dict[str, Tensor]:
    return {
        f"{name.rpartition('.')[2]}.{kind}": local(value)
        for name, param in training.params.items()
        for kind, value in training.muon.state[param].items()
        if key in kind and local(value).numel()
    }


@on_ranks(2)
def test_the_states_of_an_algorithm_are_on_the_owner_alone(rank: int) -> None:
    for layout in ("owned", "plain"):
        for name, math in ALGORITHMS.items():
            training = trained(2, layout, 1, math=math)
            calls = training.muon.exchange.collectives.traffic.calls
            training.step_on(2)
            calls = training.muon.exchange.collectives.traffic.calls - calls
            assert layout == "plain" or calls == 0, "owned matrices need no exchange"
            held = on_all_ranks(len(states(training, "second_moment")))
            assert sum(held) == (0 if name == "muonh" else MATRICES), (layout, name)
    elsewhere = trained(2, "fsdp", math=ROWS_SMOOTHED)
    moments = [elsewhere.muon.build().state[param]["second_moment.0"] for param in elsewhere.params.values()]
    texts = [message(moment.full_tensor) for moment in moments if not local(moment).numel()]
    assert texts
    assert all("load the state with torch.distributed.checkpoint" in text for text in texts)


@on_ranks(2)
def test_states_are_loaded_in_place(rank: int) -> None:
    for layout in ("fsdp", "owned", "plain"):
        training = trained(2, layout, 1, math=ROWS_SMOOTHED)
        storage = [moment.data_ptr() for moment in states(training, "second_moment").values()]
        training.muon.load_state_dict(copy.deepcopy(training.muon.state_dict()))
        assert storage == [moment.data_ptr() for moment in states(training, "second_moment").values()]


@on_ranks(2)
def test_only_the_buckets_of_soap_travel_in_float32_and_options_of_another_stage_are_in_use(rank: int) -> None:
    plan = Training(row("widths", 2, ("fsdp",), **NORMUON_AND_SOAP)).muon.plan
    assert {plan.wire_bytes(bucket) for bucket in plan.buckets} == {2, 4}
    assert "travel in float32, because their algorithm needs this" in plan.reason
    # Pipeline stages of one rank, with SOAP on rank 0 alone, and on no rank.
    params = [(f"{rank}.w", nn.Parameter(placed(torch.ones(16, 24), DeviceMesh("cpu", [rank]))))]
    groups = [[{"params": params, "algorithm": name}] for name in ("muon" if rank else "soap", "muon")]
    used, unused = (message(Muon(group, expert=Expert(soap_freq=5)).build) for group in groups)
    assert used == ""
    assert "soap_freq = 5 has no effect without algorithm = 'soap'" in unused


def test_a_matrix_of_zeros_under_muonh_is_an_error_after_the_step() -> None:
    """The norm would stay 0."""
    param = nn.Parameter(torch.zeros(16, 24))
    param.grad = torch.ones(16, 24)
    muon = Muon([("w", param)], **muon_keywords(**{ALGORITHM: "muonh", "weight_decay": 0.0}))
    muon.step()
    assert "w: a matrix of zeros, which keeps the norm 0" in message(muon.check_last_step)


@on_ranks(4)
def test_every_momentum_is_stored_once(rank: int) -> None:
    """`state = "owner"` beside a momentum on every replica."""
    for layout, shards in (("plain", 1), ("replicated", 1), ("hsdp", 2)):
        held = []
        for state in ("owner", "replicated"):
            training = trained(4, layout, 1, shapes=("wide", "tall", "experts"), state=state)
            held.append(sum(value.nbytes for value in states(training, "momentum_buffer").values()))
            assert 4 * summarize(training.muon.plan).ranks[rank].state_elements == held[-1], "as planned"
        owned = on_all_ranks(held[0])
        assert sum(owned) == shards * held[1] > max(owned)


@on_ranks(2)
def test_a_replicated_state_dict_is_loaded_and_an_owners_state_dict_is_refused(rank: int) -> None:
    owner, everyone = (trained(2, "plain", 1, state=state) for state in ("owner", "replicated"))
    kept = copy.deepcopy(owner.muon.state_dict())
    owner.step_on(50)
    for name, param in owner.params.items():
        param.data.copy_(everyone.params[name].data)
    owner.muon.load_state_dict(everyone.muon.state_dict())
    for training in (owner, everyone):
        training.step_on(2)
    assert equal(owner.params.values(), everyone.params.values())
    refused = message(lambda: everyone.muon.load_state_dict(kept))
    assert "wide: the state dict has no momentum" in refused
    assert "muon.state with torch.distributed.checkpoint" in refused
    momenta: list[Any] = [owner.muon.state[param]["momentum_buffer"] for param in owner.params.values()]
    elsewhere = next(momentum for momentum in momenta if local(momentum).numel() == 0)
    read = message(elsewhere.full_tensor)
    assert "the momentum is on its owner alone" in read, "an empty tensor would be taken for the momentum"


@on_ranks(2)
def test_the_momentum_of_bfloat16_weights_has_the_dtype_of_the_option_and_is_loaded(rank: int) -> None:
    """After 300 equal gradients an average in bfloat16 stalls at 0.96."""
    param = nn.Parameter(placed(torch.ones(16, 24, dtype=torch.bfloat16)))
    param.grad = torch.ones_like(param)
    for name, error in (("float32", 1e-5), ("bfloat16", 0.05)):
        optimizer, again = (Muon([("w", param)], lr=0.0, state_dtype=name).build() for _ in range(2))
        for _ in range(300):
            optimizer.step()
        average = local(optimizer.state[param]["momentum_buffer"])
        assert average.dtype == getattr(torch, name)
        assert float((average - 1).abs().max()) < error
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert torch.equal(average, local(again.state[param]["momentum_buffer"]))


def eight_bits(rank: int, world_size: int, layout: str, folder: str, reads: bool) -> list[Tensor]:
    """Whole states after a save, or after a load in place of others."""
    made = trained(world_size, layout, *((9,) if reads else (1, 2)), math=INT8, shapes=("wide", "uneven", "experts"))
    state = saved(made, False)
    if reads:
        dcp.load(state, checkpoint_id=folder)
        load(made, False, state)
    else:
        dcp.save(state, checkpoint_id=folder)
    return [whole(value).clone() for param in made.params.values() for value in made.muon.state[param].values()]


def test_an_int8_momentum_loads_in_another_layout_and_world_without_rounding(tmp_path: Path) -> None:
    expected = run_ranks(eight_bits, 4, "hsdp", str(tmp_path), False)[0]
    for world_size, layout in ((4, "fsdp x tp rows"), (2, "fsdp"), (1, "plain")):
        assert equal(expected, run_ranks(eight_bits, world_size, layout, str(tmp_path), True)[0]), layout


@on_ranks(2)
def test_blocks_of_an_int8_momentum_across_shards_are_refused(rank: int) -> None:
    text = message(Muon([("w", nn.Parameter(placed(torch.ones(16, 96), dim=1)))], state_dtype="int8").build)
    assert "state_dtype = 'int8'" in text
    assert "w has 96 columns on 2 ranks" in text


@on_ranks(2)
def test_an_idle_matrix_is_only_decayed_and_named_once(rank: int) -> None:
    """Also a tensor of rank-specific values, idle on rank 1.

    From the second step on, a matrix and an expert are idle, and a quarter of another matrix is zero.
    """
    params, own = parameters(), nn.Parameter(torch.full((4, 6), 1.0 + rank))
    expected = own.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        muon = Muon([*params.items(), ("own", own)], lr=0.02, expert=Expert(idle="hold", replicas="redundant")).build()
        for seed in range(1, IDLE_STEPS + 4):
            grads = {name: full(name, seed) for name in params}
            if seed > 1:
                grads["layers.0.weight"].zero_()
                grads["layers.1.weight"][:6] = 0
                grads["layers.2.experts"][2] = 0
            for name, grad in grads.items():
                params[name].grad = placed(grad)
            own.grad = torch.ones(4, 6) * (seed == 1 or rank == 0)
            muon.step()
            expected = own.detach().clone() if seed == 1 else expected * (1 - 0.02 * 0.1)
    assert torch.equal(own, expected) == (rank > 0)
    (text,) = (str(w.message) for w in caught if "zero in each" in str(w.message))
    assert text.startswith(f"layers.0.weight, layers.2.experts 2{', own' if rank else ''}: the gradient was zero")


# --- the algorithms of docs/your_own_algorithm.md ---


PAGE = Path(__file__).parents[3] / "docs" / "your_own_algorithm.md"
LAYOUTS = ("fsdp", "hsdp", "fsdp x tp rows", "fsdp x tp columns", "tp rows", "ep x rows", "tp x ep", "owned")
BETA = 0.9
NAMES = ("smooth", "columns", "polar")


def register() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert all(len(code.splitlines()) <= 40 for code in blocks)
    if "smooth" not in registry.algorithms:
        names = {"model": nn.Linear(16, 16, bias=False)}
        for code in blocks:
            exec(code, names)


@pytest.fixture
def _registered() -> Iterator[None]:
    register()
    yield
    # The tests of the docs register them again.
    for name in NAMES:
        del registry.algorithms._values[name]


@pytest.mark.usefixtures("_registered")
def test_the_examples_compute_their_definitions_in_one_process() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(24, 40, generator=generator) for _ in range(2))
    blended = (0.05 * grad).lerp(grad, 0.05)
    rounded = blended.bfloat16().float()
    left, _, right = torch.linalg.svd(blended, full_matrices=False)
    normalized = (rounded / (rounded.norm(dim=0) + 1e-8)).bfloat16()
    updates = {
        "smooth": (1 - BETA) * newton_schulz(blended).float(),
        "columns": newton_schulz(normalized).float(),
        "polar": left @ right,
    }
    for name, expected in updates.items():
        param = nn.Parameter(weight.clone())
        muon = Muon([("w", param)], lr=1.0, algorithm=name, expert=Expert(orthogonalize="reference"), weight_decay=0.0)
        param.grad = grad.clone()
        muon.step()
        torch.testing.assert_close((weight - param.detach()) / (0.2 * 40**0.5), expected, rtol=4e-3, atol=1e-3)


@on_ranks(4)
@pytest.mark.parametrize("name", NAMES)
def test_the_examples_have_the_same_bits_on_every_layout(rank: int, name: str) -> None:
    register()
    fields = {"math": {ALGORITHM: name}, "reference": "one process", "shapes": ("wide", "tall", "experts")}
    assert differences(rank, 4, row(name, layouts=LAYOUTS, close=1e-9, **fields)) == []


# --- ranges of rows and several meshes on real ranks: refusals by name, and each state stored once ---


HALVES = [Split(match="w", dims="(g f) d -> g | f d", lengths={"g": 2})]


def parameter(part: torch.Tensor, shape: tuple[int, int], placement: Placement) -> nn.Parameter:
    """A parameter with this part on this rank of a mesh of all."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = {"shape": shape, "stride": (shape[1], 1), "run_check": False}
    return nn.Parameter(DTensor.from_local(part, mesh, [placement], **whole))


@on_ranks(4)
def test_the_order_of_megatron_fsdp_without_rows_is_refused(rank: int) -> None:
    """Rows in the order of Megatron-FSDP's HFSDP, with sizes like DTensor's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "dp"))
    mesh._shard_order = [1, 0]  # type: ignore[attr-defined]
    param = nn.Parameter(distribute_tensor(torch.randn(12, 8), mesh, [Shard(0), Shard(0)]))
    text = message(Muon([("w", param)], split=HALVES).build)
    assert "w: Megatron-FSDP sharded this parameter" in text
    assert "call titan_muon.follow_megatron_fsdp(optimizer, model) before the first step" in text


@on_ranks(2)
def test_rows_on_some_ranks_alone_and_rows_stored_twice_are_refused_on_every_rank(rank: int) -> None:
    for starts, text in (
        ((0, None), "its rows are set on some ranks alone; set the rows on every rank of its mesh"),
        ((0, 4), "its ranks store rows 0:6, 4:10, which are not all 12 rows once"),
    ):
        param = parameter(torch.randn(6, 8), (12, 8), Shard(0))
        if (start := starts[rank]) is not None:
            set_rows(param, start)  # type: ignore[arg-type]
        assert f"layers.w: {text}" in message(Muon([("layers.w", param)]).build)


class RaggedShard(Placement):
    """A placement of another package."""

    def __hash__(self) -> int:
        return hash(RaggedShard)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard)


@on_ranks(2)
def test_a_placement_of_another_package_is_refused_by_name_and_read_where_rows_are_set(rank: int) -> None:
    bucket = nn.Parameter(torch.ones(4, 4))
    bucket._placements, bucket._global_shape = (Shard(0),), (8, 4)  # type: ignore[attr-defined]
    text = message(Muon([("plain", bucket)]).build)
    assert "plain: a bucket of FlexShard stores a part of this parameter as a plain tensor" in text
    flat, rows = parameter(torch.ones(48), (12, 8), RaggedShard()), parameter(torch.ones(6, 8), (12, 8), RaggedShard())
    unread = message(Muon([("w", rows)]).build)
    assert "w: Muon cannot read a parameter placed as" in unread
    assert "if its ranks store whole rows, call titan_muon.engine.tensors.dtensor.set_rows" in unread
    for param in (flat, rows):
        set_rows(param, 6 * rank)  # type: ignore[arg-type]
    assert message(Muon([("w", flat)]).build).startswith("w: "), "flat elements are no rows"
    rows.grad = torch.ones_like(rows)
    Muon([("w", rows)]).step()
    assert not torch.equal(local(rows), torch.ones(6, 8))


STORED: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("ranges, hfsdp", {}, 1),
    ("ranges, hsdp", {"state": "owner"}, 2),
)
"""A layout, options of Muon, and how often all ranks together store an average of AdamW."""


@on_ranks(4)
@pytest.mark.parametrize(("layout", "options", "copies"), STORED)
def test_each_state_is_stored_once_but_averages_on_each_replica(
    rank: int, layout: str, options: dict[str, str], copies: int
) -> None:
    sums = []
    for make in (lambda pairs: Muon(pairs, **muon_keywords(**options)), lambda pairs: AdamW([p for _, p in pairs])):
        value = layouts.placed(torch.randn(13, 18), layouts.LAYOUTS[layout])
        param = nn.Parameter(value)
        copy_rows(value, param)
        param.grad = torch.ones_like(param) if local(param).numel() else None
        optimizer = make([("w", param)])
        optimizer.step()
        tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
        sums.append(sum(on_all_ranks(sum(local(t).numel() for t in tensors if isinstance(t, DTensor)))))
    assert sums == [13 * 18, copies * 2 * 13 * 18]


@on_ranks(4)
def test_separate_tensors_on_two_meshes_are_named_and_different_placements_are_refused_on_every_rank(rank: int) -> None:
    """One Muon for layers under FSDP2 and layers under FSDP2 with tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, kinds = torch.ones(16, 16), [Shard(0), Shard(0) if mesh.get_local_rank("tp") == 0 else Replicate()]
    joint = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0), Shard(0)]))
    muons = [Muon([("a", joint), ("b", nn.Parameter(distribute_tensor(whole, mesh["dp"], [kind])))]) for kind in kinds]
    assert "b: separate tensors on separate meshes" in muons[0].plan.reason
    text = message(muons[1].build)
    assert text.startswith("b: has shape (16, 16) and placements (Shard(dim=0),) on mesh Mesh(shape=(2,), ranks=(0")
    assert "placements (Replicate(),) on mesh Mesh(shape=(2,), ranks=(1, 3)); build a Muon for each mesh" in text

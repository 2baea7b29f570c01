"""A step allocates, reads and writes the planned bytes, stage by stage."""

from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.memory_use import allocated
from tests.shared import muon_keywords
from titan_muon import Expert, Muon, own
from titan_muon.engine.exchange.exchange import fragmentation
from titan_muon.engine.layout.work import CPU_CHUNK_BYTES, ElementKind, Elements, ElementTraffic
from titan_muon.engine.step.foreach import MomentumCall, Rectangle, UpdateCall
from titan_muon.engine.step.muon import MuonAlgorithm
from titan_muon.engine.tensors.storage import check_devices, trained_params
from titan_muon.forecast.fake_world import fake_world
from titan_muon.options import MuonOptions
from titan_muon.planner.ownership import PlacementRule
from titan_muon.planner.planner import passes_of
from titan_muon.planner.summary import summarize

MIB = 2**20
# One Newton-Schulz step in the dtype of the workspace, because the tests are about the remaining stages.
OPTIONS: dict[str, Any] = {"ns_steps": 1, "ns_dtype": "bfloat16", "orthogonalize": "standard"}


def peak(muon: Muon) -> tuple[int, int]:
    """Peak bytes allocated by a second step, and the bytes of the plan."""
    muon.step()
    _, new, left = allocated(muon.step)
    assert left == 0, "a step keeps no memory"
    cost = summarize(muon.plan).ranks[0]
    return new, cost.buffer_bytes + cost.work_bytes


def with_gradient(param: nn.Parameter) -> nn.Parameter:
    param.grad = torch.full_like(param, 1e-3)
    return param


@pytest.mark.usefixtures("zero_products")
@pytest.mark.parametrize(
    ("dtype", "rows", "is_owned", "options"),
    [
        (torch.bfloat16, 2**20, False, {}),
        (torch.float32, 2**19, False, {}),
        (torch.bfloat16, 2**19, True, {}),
        (torch.float32, 2**18, True, {}),
        (torch.bfloat16, 2**18, False, {"rounding": "nearest"}),
        (torch.bfloat16, 2**18, False, {"state_dtype": "bfloat16"}),
        (torch.float32, 2**18, False, {"state_dtype": "bfloat16", "cautious": True}),
        (torch.float32, 2**18, False, {"algorithm": "normuon"}),
        (torch.float32, 2**18, False, {"wire_dtype": "float32"}),
    ],
    ids=str,
)
def test_the_peak_of_a_step_equals_the_plan(
    dtype: torch.dtype, rows: int, is_owned: bool, options: dict[str, Any]
) -> None:
    """A local matrix of 16 to 128 MiB. Momentum and weights are updated in chunks of rows."""
    module = nn.Linear(64, rows, bias=False, dtype=dtype)
    with fake_world(2) if is_owned else nullcontext():
        if is_owned:
            rule = PlacementRule(match="weight", placement="owned", owner=0)
            own(module, mesh=init_device_mesh("cpu", (2,)), params=[module.weight], rules=[rule])
        with_gradient(module.weight)
        measured, planned = peak(Muon(module.named_parameters(), **muon_keywords(**OPTIONS, **options)))
    assert 0.98 * planned < measured < 1.02 * planned + MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_plan_of_an_accelerator_counts_the_copies_of_a_step(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU runs a call of each stage of a step with a GradScaler here, without the conversion that only CPUs need."""
    monkeypatch.setattr("titan_muon.engine.step.muon.is_host", lambda device: False)
    count, options = 2**20, MuonOptions(rounding="nearest")
    average, update = torch.zeros(count), torch.zeros(count, dtype=torch.bfloat16)
    param, grad = torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=dtype)
    scratch = (torch.empty_like(param),) if dtype == torch.float32 else ()
    algorithm = MuonAlgorithm(options)
    group = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "adjust_lr_fn": None}
    parts, no_memory = (Rectangle(0, None),), torch.empty(0).untyped_storage()
    gather = MomentumCall(group, parts, (average,), (update,))
    call = UpdateCall(group, (count, 1), parts, (param,), (update,), no_memory, scratch)

    def advance_call() -> None:
        algorithm.before_gather(gather, gather.momentum, list(torch._foreach_mul([grad], torch.tensor(0.5))))

    _, advance, _ = allocated(advance_call)
    _, apply, _ = allocated(lambda: algorithm.after_return(call, call.params))
    kind = ElementKind(dtype.itemsize, 2, dtype == torch.bfloat16)
    passes = passes_of(Elements((kind,)), options)
    assert 0 <= advance - count * passes.advance_bytes < MIB / 100
    assert 0 <= apply + sum(part.nbytes for part in scratch) - count * passes.apply_bytes < MIB / 100


@pytest.mark.usefixtures("zero_products")
@pytest.mark.parametrize("shape", [(40, 3), (700, 300), (3, 200_000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_stages_of_small_matrices_fit_the_plan(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Several tensors share a call, and a row longer than a chunk has a call of its own."""
    params = [(f"w{i}", with_gradient(nn.Parameter(torch.zeros(shape, dtype=dtype)))) for i in range(5)]
    muon = Muon(params, **muon_keywords(**OPTIONS))
    rows = max(4 * shape[1], 12 * shape[1] if dtype == torch.bfloat16 else 0) + 256
    for call in (call for views in muon.engine.step.views for call in views.updates):
        assert call.scratch_bytes <= max(CPU_CHUNK_BYTES, rows)
    for gather in (call for views in muon.engine.step.views for call in views.gathers):
        assert 4 * sum(momentum.numel() for momentum in gather.momentum) <= max(CPU_CHUNK_BYTES, rows)
    measured, planned = peak(muon)
    assert measured < 1.1 * planned + MIB / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"nesterov": False}, {"state_dtype": "bfloat16"}], ids=str)
def test_chunks_of_rows_have_the_bits_of_whole_tensors(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices, stacks, and columns of a fused projection."""
    results = []
    for limit in (2**24, 2**11, 1):
        monkeypatch.setattr("titan_muon.engine.layout.work.CPU_CHUNK_BYTES", limit)
        generator = torch.Generator().manual_seed(0)
        values = {name: torch.randn(s, generator=generator) for name, s in {"a": (37, 50), "b": (3, 24, 31)}.items()}
        params = {name: nn.Parameter(value.to(dtype)) for name, value in values.items()}
        muon = Muon(list(params.items()), **muon_keywords(lr=0.02, orthogonalize="reference", **options))
        for _ in range(3):
            for param in params.values():
                param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            muon.step()
        states = [muon.state[param]["momentum_buffer"] for param in params.values()]
        results.append([*(param.detach() for param in params.values()), *states])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("kept", [False, True])
def test_buffers_and_workspace_stay_allocated_with_keep_buffers(kept: bool) -> None:
    weight = with_gradient(nn.Parameter(torch.zeros(512, 64)))
    muon = Muon([("w", weight)], **muon_keywords(keep_buffers=kept, **OPTIONS))
    muon.step()
    (views,) = muon.engine.step.views
    workspace = views.batches[0][1].whole.untyped_storage()
    assert workspace.nbytes() == (weight.numel() * 2 if kept else 0)
    address = workspace.data_ptr()
    muon.step()
    assert not kept or workspace.data_ptr() == address


@pytest.mark.parametrize(
    ("device", "mib", "settings", "warns"),
    [
        ("cuda", 1024, {}, True),
        ("cuda", 1024, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128, expandable_segments:False"}, True),
        ("cuda", 1024, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments: True"}, False),
        ("cuda", 16, {}, False),
        ("cpu", 1024, {}, False),
    ],
    ids=str,
)
def test_a_fragmenting_allocator_causes_a_warning(device: str, mib: int, settings: dict[str, str], warns: bool) -> None:
    assert ("keep_buffers" in fragmentation(device, mib * MIB, {"HOME": "/", **settings})) == warns


def test_the_first_use_warns_of_the_steps_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("titan_muon.engine.engine.fragmentation", lambda *of: asked.append(of[:2]) or "fragments")
    with pytest.warns(UserWarning, match="fragments"):
        Muon([("w", nn.Parameter(torch.zeros(512, 64)))]).build()
    assert asked == [("cpu", 512 * 64 * 2)]


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("kept", [False, True])
def test_exchange_buffers_stay_allocated_with_keep_buffers(kept: bool) -> None:
    shard = DTensor.from_local(torch.zeros(4, 8), init_device_mesh("cpu", (2,)), [Shard(0)])
    buffers = Muon([("w", nn.Parameter(shard))], expert=Expert(keep_buffers=kept)).engine.rank.buffers
    assert [tensor.untyped_storage().nbytes() for tensor in buffers.tensors] == [buffers.memory.nbytes * kept]
    assert buffers.memory.nbytes > 0


def test_parameters_on_several_devices_or_without_streams_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [{"param_names": ["a"], "params": [nn.Parameter(torch.zeros(8, 8))]}]
    (trained,) = trained_params(groups, defaultdict(dict), 0, MuonOptions())
    other = replace(trained, fqn="b", param=nn.Parameter(torch.zeros(8, 8, device="meta")))
    with pytest.raises(ValueError, match="b: is on meta, and a on cpu; move all parameters"):
        check_devices([trained, other])
    # As in PyTorch before 2.15.
    monkeypatch.setattr(torch, "mps", object())
    monkeypatch.setattr("titan_muon.engine.tensors.storage.device_of", lambda params: torch.device("mps"))
    with pytest.raises(ValueError, match=r"^a: PyTorch .* has no streams on mps, .* move the model to the CPU$"):
        check_devices([trained])


# Bytes that element-wise passes read and write


SIDE = 256
WRITES_ALONE = ("copy_", "_foreach_copy_", "fill_", "zero_")


def nbytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


class Moved(TorchDispatchMode):
    """While active, counts the bytes read and written by operators, and the operators of large tensors by name."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.calls = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name.startswith(("empty", "resize", "set_")):
            return result
        moved = 0 if func._schema.is_mutable else nbytes(result)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            moved += nbytes(value) * (writes + (not (writes and name in WRITES_ALONE)))
        self.bytes += moved
        self.calls[name] += moved > SIDE
        return result


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"state_dtype": "bfloat16"}),
        (torch.float32, {"wire_dtype": "float32"}),
        (torch.float32, {"cautious": True}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"rounding": "nearest"}),
        (torch.bfloat16, {"rounding": "nearest", "cautious": True}),
        (torch.bfloat16, {"rounding": "nearest", "wire_dtype": "float32", "cautious": True}),
    ],
    ids=str,
)
def test_a_pass_moves_the_planned_bytes(dtype: torch.dtype, options: dict[str, Any]) -> None:
    parameter = with_gradient(nn.Parameter(torch.randn(SIDE, SIDE).to(dtype)))
    muon = Muon([("a.w", parameter)], **muon_keywords(weight_decay=0.1, **options))
    muon.step()
    engine, counted = muon.engine, muon.plan.passes.traffic
    gradients = engine.gradients(muon.param_groups, muon.state)
    engine.workspace.take()
    bucket = engine.step.bucket(engine.step.views[0], gradients)
    with torch.no_grad(), Moved() as momentum:
        next(bucket)
    with torch.no_grad():
        next(bucket)
    with torch.no_grad(), Moved() as update:
        next(bucket, None)
    assert momentum.bytes / parameter.numel() == pytest.approx(counted.advance, rel=0.01)
    assert update.bytes / parameter.numel() == pytest.approx(counted.apply, rel=0.03)
    assert momentum.calls.total() == counted.advance_launches
    if options.get("rounding") == "nearest" or dtype == torch.float32:
        assert update.calls.total() == counted.apply_launches


def test_kinds_with_equal_sums_of_bytes_have_one_cost_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ranks plan differently, because the order of dtypes differs between processes."""
    sums = {2: ElementTraffic(30, 1, 86, 1), 4: ElementTraffic(32, 1, 84, 1)}
    monkeypatch.setattr("titan_muon.planner.planner.traffic", lambda size, state, wire, **_: sums[wire])
    kinds = tuple(ElementKind(4, wire, False) for wire in sums)
    costs = {passes_of(Elements(order), MuonOptions()) for order in (kinds, kinds[::-1])}
    assert len(costs) == 1

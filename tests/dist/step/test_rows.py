"""Ranges of rows and several meshes on real ranks: refusals by name, and each state stored once."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.parity.layouts import LAYOUTS, placed
from tests.shared import message, muon_keywords
from titan_muon import Expert, Muon
from titan_muon.adamw import AdamW
from titan_muon.engine.tensors.dtensor import copy_rows, set_rows
from titan_muon.options import Split

HALVES = [Split(match="w", dims="(g f) d -> g | f d", lengths={"g": 2})]


def last_axis_first(rank: int, world_size: int) -> str:
    """Rows in the order of Megatron-FSDP's HFSDP, with sizes like DTensor's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "dp"))
    mesh._shard_order = [1, 0]  # type: ignore[attr-defined]
    param = nn.Parameter(distribute_tensor(torch.randn(12, 8), mesh, [Shard(0), Shard(0)]))
    return message(Muon([("w", param)], split=HALVES).build)


def test_the_order_of_megatron_fsdp_without_rows_is_refused() -> None:
    for text in run_ranks(last_axis_first, 4):
        assert "w: Megatron-FSDP sharded this parameter" in text
        assert "call titan_muon.follow_megatron_fsdp(optimizer, model) before the first step" in text


def wrong_rows(rank: int, world_size: int) -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (2,))
    texts = []
    for starts in ((0, None), (0, 4)):
        local = torch.randn(6, 8)
        param = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(12, 8), stride=(8, 1)))
        if (start := starts[rank]) is not None:
            set_rows(param, start)
        texts.append(message(Muon([("layers.w", param)]).build))
    return texts[0], texts[1]


def test_rows_on_some_ranks_alone_and_rows_stored_twice_are_refused_on_every_rank() -> None:
    for some, twice in run_ranks(wrong_rows, 2):
        assert "layers.w: its rows are set on some ranks alone; set the rows on every rank of its mesh" in some
        assert "layers.w: its ranks store rows 0:6, 4:10, which are not all 12 rows once" in twice


class RaggedShard(Placement):
    """A placement of another package: `units` of each rank, of the first `dims` dims."""

    def __init__(self, units: tuple[int, ...], dims: int) -> None:
        super().__init__()
        self.units, self.dims = units, tuple(range(dims))

    def __hash__(self) -> int:
        return hash((self.units, self.dims))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and (self.units, self.dims) == (other.units, other.dims)


UNITS = (3, 0, 1, 2)


def ragged(whole: torch.Tensor, mesh: DeviceMesh, dims: int) -> nn.Parameter:
    """A parameter with ragged parts of whole rows, or of the flat elements."""
    flat = whole.flatten(0, dims - 1)
    bounds = [len(flat) * sum(UNITS[:rank]) // sum(UNITS) for rank in range(len(UNITS) + 1)]
    start, stop = bounds[mesh.get_local_rank()], bounds[mesh.get_local_rank() + 1]
    placed = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
    part = DTensor.from_local(flat[start:stop].clone(), mesh, [RaggedShard(UNITS, dims)], **placed)
    return nn.Parameter(part)


def trained_ragged(rank: int, world_size: int) -> tuple[list[str], torch.Tensor]:
    """Messages of refusals, and a rank's rows after three steps."""
    mesh, whole = init_device_mesh("cpu", (world_size,)), torch.arange(96.0).sin().view(12, 8)
    flat, plain = ragged(whole, mesh, 2), nn.Parameter(torch.ones(4, 4))
    plain._placements, plain._global_shape = (Shard(0),), (8, 4)  # type: ignore[attr-defined]
    texts = [message(Muon([("w", flat)]).build), message(Muon([("plain", plain)]).build)]
    set_rows(flat, 0)  # type: ignore[arg-type]
    texts.append(message(Muon([("w", flat)]).build))
    param, grads = ragged(whole, mesh, 1), [whole.cos(), whole.square(), whole.tan()]
    set_rows(param, 2 * sum(UNITS[:rank]))  # type: ignore[arg-type]
    muon = Muon([("w", param)], expert=Expert(orthogonalize="reference"))
    for grad in grads:
        param.grad = ragged(grad, mesh, 1).data
        muon.step()
    return texts, param.detach()._local_tensor  # type: ignore[attr-defined]


def test_ragged_shards_of_whole_rows_train_as_one_process_and_other_parts_are_refused_by_name() -> None:
    results = run_ranks(trained_ragged, 4)
    whole = torch.arange(96.0).sin().view(12, 8)
    single = nn.Parameter(whole.clone())
    muon = Muon([("w", single)], expert=Expert(orthogonalize="reference"))
    for grad in (whole.cos(), whole.square(), whole.tan()):
        single.grad = grad
        muon.step()
    assert torch.equal(torch.cat([rows for _, rows in results]), single.detach())
    for (unread, plain, elements), _ in results:
        assert "w: Muon cannot read a parameter placed as" in unread
        assert "if its ranks store whole rows, call titan_muon.engine.tensors.dtensor.set_rows" in unread
        assert "plain: a bucket of FlexShard stores a part of this parameter as a plain tensor" in plain
        assert elements.startswith("w: "), "flat elements are no rows"


def stored(rank: int, world_size: int, layout: str, muon_options: dict[str, str]) -> tuple[int, int]:
    """Elements of Muon's and AdamW's states on this rank."""
    optimizers = []
    for make in (
        lambda pairs: Muon(pairs, **muon_keywords(**muon_options)),
        lambda pairs: AdamW([p for _, p in pairs]),
    ):
        value = placed(torch.randn(13, 18), LAYOUTS[layout])
        param = nn.Parameter(value)
        copy_rows(value, param)
        param.grad = torch.ones_like(param) if param._local_tensor.numel() else None  # type: ignore[attr-defined]
        optimizer = make([("w", param)])
        optimizer.step()
        optimizers.append(optimizer)
    muon, adamw = ([t for state in o.state.values() for t in state.values()] for o in optimizers)
    sums = [sum(t._local_tensor.numel() for t in tensors if isinstance(t, DTensor)) for tensors in (muon, adamw)]
    dist.barrier()
    return sums[0], sums[1]


def test_hfsdp_stores_each_state_once_over_all_ranks() -> None:
    momentum, averages = zip(*run_ranks(stored, 4, "ranges, hfsdp", {}), strict=True)
    assert sum(momentum) == 13 * 18
    assert sum(averages) == 2 * 13 * 18


def test_hsdp_stores_the_momentum_of_owners_once_and_averages_on_each_replica() -> None:
    for layout in ("ranges, hsdp", "hsdp"):
        momentum, averages = zip(*run_ranks(stored, 4, layout, {"state": "owner"}), strict=True)
        assert sum(momentum) == 13 * 18
        assert sum(averages) == 2 * 2 * 13 * 18


# One Muon for layers under FSDP2 and layers under FSDP2 with tensor parallelism. Bits and states: tests/parity


def placed_differently(rank: int, world_size: int) -> tuple[str, str]:
    """The reason in the plan of a parameter on each of two meshes, and the error if its placement differs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, kinds = torch.ones(16, 16), [Shard(0), Shard(0) if mesh.get_local_rank("tp") == 0 else Replicate()]
    joint = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0), Shard(0)]))
    muons = [Muon([("a", joint), ("b", nn.Parameter(distribute_tensor(whole, mesh["dp"], [kind])))]) for kind in kinds]
    return muons[0].plan.reason, message(muons[1].build)


def test_separate_tensors_on_two_meshes_are_named_and_different_placements_are_refused_on_every_rank() -> None:
    for reason, text in run_ranks(placed_differently, 4):
        assert "b: separate tensors on separate meshes" in reason
        assert text.startswith("b: has shape (16, 16) and placements (Shard(dim=0),) on mesh Mesh(shape=(2,), ranks=(0")
        assert "placements (Replicate(),) on mesh Mesh(shape=(2,), ranks=(1, 3)); build a Muon for each mesh" in text

"""Ranges of rows and several meshes on real ranks: refusals by name, and each state stored once. Bits: tests/parity."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.dist.harness import on_all_ranks, on_ranks
from tests.parity.layouts import LAYOUTS, placed
from tests.shared import local, message, muon_keywords
from titan_muon import Muon
from titan_muon.adamw import AdamW
from titan_muon.engine.tensors.dtensor import copy_rows, set_rows
from titan_muon.options import Split

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
        value = placed(torch.randn(13, 18), LAYOUTS[layout])
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

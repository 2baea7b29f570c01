"""Replacements of collectives in compat.py compute the same results."""

import torch

from tests.dist.harness import run_ranks


def exchanged(rank: int, world_size: int) -> list[list[list[float]]]:
    from titan_muon.trainer.torchtitan import compat

    compat.install()
    import spmd_types._dist as spmd_dist

    # Rank r sends 1 + r rows to rank 0 and 3 rows to rank 1, each row with the sender's number.
    rows = [[1, 3], [2, 3]]
    inputs = [torch.full((count, 2), float(rank)) for count in rows[rank]]
    outputs = [torch.empty(rows[sender][rank], 2) for sender in range(world_size)]
    spmd_dist.dist.all_to_all(outputs, inputs, group=torch.distributed.group.WORLD)
    assert spmd_dist.dist.get_world_size() == world_size
    return [output.tolist() for output in outputs]


def test_spmd_types_exchanges_pieces_of_any_size_on_gloo() -> None:
    first, second = run_ranks(exchanged, 2)
    assert first == [[[0.0, 0.0]], [[1.0, 1.0]] * 2]
    assert second == [[[0.0, 0.0]] * 3, [[1.0, 1.0]] * 3]

"""The kernel launches of a step: PyTorch's rules for lists of tensors."""

import torch
from torch import Tensor

from benchmarks.rehearsal.launches import BLOCKS, CHUNK, Launches, list_launches


def empties(count: int, *shape: int) -> list[Tensor]:
    return [torch.empty(shape, device="meta") for _ in range(count)]


def test_a_launch_takes_as_many_tensors_and_blocks_as_in_pytorch() -> None:
    assert [list_launches(empties(count, 8), 1) for count in (0, 110, 111)] == [0, 1, 2]
    assert list_launches(empties(65, 8), 2) == 2
    assert [list_launches(empties(1, BLOCKS * CHUNK + more), 2) for more in (0, 1)] == [1, 2]


def test_lists_of_unequal_strides_or_dtypes_take_a_launch_for_each_tensor() -> None:
    wide, columns, halves = empties(4, 8, 6), [t[:, :3] for t in empties(4, 8, 6)], [t.half() for t in empties(4, 8, 6)]
    counter = Launches()
    assert counter.weight("_foreach_mul_", (wide,)) == 1
    assert counter.weight("_foreach_copy_", (wide, halves)) == 1
    assert counter.weight("_foreach_add_", (wide, halves)) == 4
    assert counter.weight("_foreach_mul_", (columns,)) == 4, "not dense"
    assert counter.weight("mm", (wide[0], wide[1])) == 1

"""The kernel launches of a step: PyTorch's rules for lists of tensors, and the counts of recipes on fake GPUs."""

import pytest
import torch
from torch import Tensor

from benchmarks.rehearsal.launches import BLOCKS, CHUNK, Launches, is_dense, list_launches
from docs.make_launches import CASES, PAGE, counted, written_launches


def empties(count: int, *shape: int) -> list[Tensor]:
    return [torch.empty(shape, device="meta") for _ in range(count)]


@pytest.mark.parametrize(
    ("tensors", "depth", "launches"),
    [
        (empties(110, 8), 1, 1),
        (empties(111, 8), 1, 2),
        (empties(65, 8), 2, 2),
        (empties(3, 0), 1, 0),
        (empties(1, BLOCKS * CHUNK), 2, 1),
        (empties(1, BLOCKS * CHUNK + 1), 2, 2),
        (empties(2, BLOCKS * CHUNK // 2), 2, 1),
        (empties(3, BLOCKS * CHUNK // 2), 2, 2),
    ],
)
def test_a_launch_takes_as_many_tensors_and_blocks_as_in_pytorch(
    tensors: list[Tensor], depth: int, launches: int
) -> None:
    assert list_launches(tensors, depth) == launches


def test_lists_of_unequal_strides_or_dtypes_take_a_launch_for_each_tensor() -> None:
    wide, columns, halves = empties(4, 8, 6), [t[:, :3] for t in empties(4, 8, 6)], [t.half() for t in empties(4, 8, 6)]
    counter = Launches()
    assert counter.weight("_foreach_mul_", (wide,)) == 1
    assert counter.weight("_foreach_norm", (wide,)) == 2
    assert counter.weight("_foreach_copy_", (wide, halves)) == 1
    assert counter.weight("_foreach_add_", (wide, halves)) == 4
    assert counter.weight("_foreach_add_", (empties(4, 8, 3), columns)) == 4
    assert counter.weight("_foreach_mul_", (columns,)) == 4, "not dense"
    assert counter.weight("cat", (empties(129, 2),)) == 2
    assert counter.weight("mm", (wide[0], wide[1])) == 1
    assert is_dense(wide[0].mT)


def test_the_step_of_a_recipe_launches_little_more_than_muon_alone() -> None:
    for launches in written_launches(PAGE.read_text(encoding="utf-8")).values():
        assert launches["recipe"] <= 1.05 * launches["plain"]


@pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a CUDA build of PyTorch, with or without a GPU: make newest"
)
@pytest.mark.parametrize("recipe", CASES)
def test_the_table_of_launches_has_the_counts_of_this_code(recipe: str) -> None:
    assert written_launches(PAGE.read_text(encoding="utf-8"))[recipe] == counted(recipe)

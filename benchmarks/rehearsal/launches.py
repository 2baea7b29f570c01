"""Counts the kernel launches of a recipe's optimizer step on fake CUDA tensors.

    python -m benchmarks.rehearsal.launches --config configs/qwen3_8b_muon.toml --world-size 64 --rank 0

Prints the launches of Muon's step as JSON: alone (`plain`), as the recipe's trainer calls the step (`recipe`), and in a
step that the device may skip after a non-finite norm (`skippable`). Needs a CUDA build of PyTorch and no GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import models  # noqa: F401 (registers the families)
from benchmarks.rehearsal.fake_gpu import FakeGpu, fake_gpu, fake_rank
from benchmarks.rehearsal.recorder import Operations
from titan_muon.trainer.recipe import Recipe, load

# Rules of PyTorch's foreach kernels: can_use_fast_route in aten/src/ATen/native/cuda/ForeachUtils.h, and the limits of
# a launch in MultiTensorApply.cuh.
TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Most tensors of a launch, by the number of lists."""
BLOCKS, CHUNK = 320, 65536
"""Most blocks of a launch, and elements of a block."""
CONCATENATED = 128
"""Most inputs of a launch of `cat`."""
MIXED_DTYPES = ("_foreach_copy_",)
"""Operators whose lists may differ in dtype."""


class Launches(Operations):
    """Counts kernel launches by operator in `counts`.

    Lists of tensors take a launch for many tensors if dtypes, sizes and strides agree and the tensors are dense;
    otherwise a launch for each tensor.
    """

    def weight(self, name: str, args: Any) -> int:
        lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
        if name in ("cat", "stack"):
            return -(-len(lists[0]) // CONCATENATED)
        if not name.startswith(("_foreach", "_fused")):
            return 1
        if name.startswith("_fused"):
            # The list of step counters has other sizes, and is not among the kernel's lists.
            return list_launches(lists[0], 4)
        if not is_fast(name, lists):
            return len(lists[0])
        if name == "_foreach_norm":
            # The second launch adds the sums of the blocks.
            return list_launches(lists[0], 1) + 1
        return list_launches(lists[0], len(lists) + (not name.endswith("_")))


def is_fast(name: str, lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the lists of a foreach operator take PyTorch's fast route."""
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    equal = all(len(kinds) == 1 for kinds in dtypes) if name in MIXED_DTYPES else len(set().union(*dtypes)) == 1
    shapes = [[(tensor.shape, tensor.stride()) for tensor in tensors] for tensors in lists]
    return equal and all(shape == shapes[0] for shape in shapes) and all(map(is_dense, lists[0]))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, in any order of the dimensions."""
    expected = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def list_launches(tensors: Sequence[Tensor], depth: int) -> int:
    """Launches of `depth` lists with the sizes of `tensors`."""
    launches = blocks = count = 0
    for tensor in tensors:
        count += tensor.numel() > 0
        chunks = -(-tensor.numel() // CHUNK)
        while chunks:
            taken = min(chunks, BLOCKS - blocks)
            chunks, blocks = chunks - taken, blocks + taken
            if blocks == BLOCKS or (count == TENSORS[depth] and not chunks):
                # The rest of a tensor goes on in the next launch.
                launches, blocks, count = launches + 1, 0, int(chunks > 0)
    return launches + (blocks > 0)


def counted(recipe: Recipe, world_size: int, rank: int, gpu: FakeGpu, folder: str) -> dict[str, int]:
    """Launches of Muon's step on a rank by kind of step, see this module's docstring."""
    # Only under `fake_gpu`, because TorchTitan copies the device on import.
    from benchmarks.rehearsal.subject import build_trainer, without_files
    from benchmarks.rehearsal.training import give_gradients
    from titan_muon.engine.faults.clip import NormCheck
    from titan_muon.muon import Muon

    with fake_rank(world_size, rank):
        trainer = build_trainer(without_files(recipe), world_size, gpu, folder)
        muon = next(optimizer for optimizer in trainer.optimizers if isinstance(optimizer, Muon))
        parameters = [parameter for part in trainer.model_parts for parameter in part.parameters()]
        trainer.reported = trainer.monitored = False
        finite = NormCheck(torch.ones((), device="cuda"), (), torch.zeros(0))

        def launches(prepare: Callable[[], object]) -> int:
            give_gradients(parameters)
            prepare()
            with Launches() as counter:
                muon.step()
            return counter.counts.total()

        # The first step makes tensors.
        launches(lambda: None)
        return {
            "plain": launches(lambda: None),
            "recipe": launches(trainer._clip_gradients),
            "skippable": launches(lambda: muon.skip_unless_finite(finite)),
        }


def main() -> None:
    """Count in this process, with a replaced torch.cuda."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    options, overrides = parser.parse_known_args()
    with fake_gpu() as gpu, tempfile.TemporaryDirectory() as folder:
        from titan_muon.trainer.torchtitan import compat

        compat.install()
        launches = counted(load(options.config, overrides), options.world_size, options.rank, gpu, folder)
    print(json.dumps(launches))


if __name__ == "__main__":
    main()

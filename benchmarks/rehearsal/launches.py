"""Counts the kernel launches of operators on fake CUDA tensors, by PyTorch's rules for lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self
from unittest import mock

from torch import Tensor

from benchmarks.rehearsal.recorder import Operations
from titan_muon.kernels.batches import TableLaunch

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
    otherwise a launch for each tensor. Launches of Triton's kernels are counted by kernel.
    """

    def __enter__(self) -> Self:
        self._kernels = mock.patch.object(TableLaunch, "run", lambda launch, *_: self.launched(launch.kernel))
        self._kernels.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kernels.stop()

    def launched(self, kernel: str) -> None:
        """Count a launch of a kernel."""
        self.counts[kernel] += 1

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

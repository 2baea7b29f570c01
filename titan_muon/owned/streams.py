"""The streams that carry owned parameters and gradients beside the computation."""

from __future__ import annotations

from typing import Any

import torch

HIGH_PRIORITY = -1

# [Note: streams and memory]
# - Memory is of the stream that was current when it was allocated, and is free for that stream's next kernels as soon
#   as the host lets go of it. So its stream has to wait before that for whatever another one does with it.
# - Unsharded buffers are of the computing stream, as all that reads them is. The gather stream waits for that stream
#   before it fills one, since the memory may be what the last kernel there still reads.
# - Gradients that autograd made are of the computing stream too. They are held until that stream has waited for their
#   copying, which is at the end of the next module's backward.
# - What gradients are copied into and summed in is of the reduce stream. It may be let go as soon as the reduction is
#   launched; what the all-reduce stream does with it is waited for by the reduce stream.
# - The reduce stream waits for the computing one before it allocates: an optimizer may have just read the gradients of
#   the pass before, whose memory this may be.


class Streams:
    """Streams of FSDP2's kinds and priorities; on the CPU they do nothing, and what is called is done on return.

    Attributes:
        gather: fills unsharded buffers on the owner and sends them to all ranks.
        reduce: copies gradients, sends them to the owners, and adds them to what these have.
        all_reduce: sums an owner's gradients over replicas.
    """

    def __init__(self, device_type: str) -> None:
        self._device: Any = torch.get_device_module(device_type)
        # Their kernels are few and short, and other ranks wait for them: behind a layer's products, all ranks would be
        # late. The replicas have the time of a whole layer.
        self.gather: Any = self._device.Stream(priority=HIGH_PRIORITY)
        self.reduce: Any = self._device.Stream(priority=HIGH_PRIORITY)
        self.all_reduce: Any = self._device.Stream()

    @property
    def current(self) -> Any:
        """The stream that computes."""
        return self._device.current_stream()

    def within(self, stream: Any) -> Any:
        """Have what is called in this context run in a stream."""
        return self._device.stream(stream)

"""Exchange of a GPU's gradients through pinned memory of the processor.

gloo's collectives and the compressors work on the processor. They serve GPUs that NCCL does not connect: ranks of which
some have no GPU, or two that share one. A bucket is copied to pinned memory while backward continues, exchanged there,
and copied back; DDP gets a future that knows the GPU's stream.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from shoal.sync.compression.base import Bucket, BufferPool, Compressor, CompressorState
from shoal.sync.helper_threads import compute_alone


class StagedCompressor(CompressorState):
    """A compressor for buckets of a GPU, made of one for the processor."""

    def __init__(self, compressor: Compressor, device: torch.device) -> None:
        self._compressor: Compressor = compressor
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pinned = BufferPool(lambda bucket: torch.empty_like(bucket.flat, device="cpu", pin_memory=True))
        # One thread: every rank must begin the exchanges in the same order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging", initializer=compute_alone)

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        pinned = self._pinned.of(bucket)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            pinned.copy_(bucket.flat, non_blocking=True)
            copied = self._stream.record_event()
        own: Future[Any] = Future(devices=[self._device])
        # An error must be raised in a callback to reach DDP: set on the future it would pass for a value.
        outcome: Future[Tensor] = own.then(_unwrap)
        self._thread.submit(self._exchange, bucket, pinned, copied, own)
        return outcome

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if hasattr(self._compressor, "close"):
            self._compressor.close()

    def _exchange(self, bucket: Bucket, pinned: Tensor, copied: torch.cuda.Event, own: Future[Any]) -> None:
        try:
            copied.synchronize()
            staged = Bucket(bucket.index, pinned, bucket.parameters, bucket.is_last)
            self._compressor(staged).add_done_callback(lambda done: self._return(bucket, done, own))
        except Exception as error:
            own.set_result(_Failed(error))

    def _return(self, bucket: Bucket, done: Future[Tensor], own: Future[Any]) -> None:
        """Copy the sum back. The future's waiters wait for this stream too."""
        try:
            summed = done.value()
            with torch.cuda.stream(self._stream), torch.no_grad():
                bucket.flat.copy_(summed, non_blocking=True)
                own.set_result(bucket.flat)
        except Exception as error:
            own.set_result(_Failed(error))


class _Failed:
    """Carries an error through a future that looks for tensors in its value."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _unwrap(done: Future[Any]) -> Tensor:
    value = done.value()
    if isinstance(value, _Failed):
        raise value.error
    result: Tensor = value
    return result

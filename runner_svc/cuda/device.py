"""What a backend needs of a GPU besides kernels: a stream, pinned memory, events, graphs, and its memory's size."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from runner_svc.interface.pool_size import MemoryProfile

# While the host launches a step kernel by kernel it takes no result, of which a client waits for the one before:
# tolerated where that is at most this part of the step's own time.
_HOST_SHARE = 0.1


class GpuDevice:
    """One GPU and the stream that all steps are launched on."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._stream = torch.cuda.Stream(self.device)
        self._graph_pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def stream(self) -> Iterator[int]:
        """Makes the stream the current one of this thread; its handle."""
        with torch.cuda.stream(self._stream):
            yield self._stream.cuda_stream

    def current_stream(self) -> int:
        """Handle of the thread's current stream, which during a capture is that of the capture."""
        return torch.cuda.current_stream().cuda_stream

    def synchronize(self) -> None:
        """Waits for all that was launched."""
        torch.cuda.synchronize(self.device)

    def pinned(self, words: int) -> Tensor:
        """Page-locked int32 [words] on the host."""
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def event(self) -> torch.cuda.Event:
        """An event, recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph of what `function` launches; it runs once before, so that libraries are loaded."""
        function()
        graph = torch.cuda.CUDAGraph()
        with _without_collection(), torch.cuda.graph(graph, pool=self._graph_pool, stream=self._stream):
            function()
        return graph.replay

    def seconds(self, replay: Callable[[], None], repeats: int = 5) -> float:
        """Time of one replay, the mean of several."""
        replay()
        begin = self.event()
        for _ in range(repeats):
            replay()
        end = self.event()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / repeats

    def is_late(self, launch: Callable[[], None], replay: Callable[[], None]) -> bool:
        """Whether launching takes the host long, beside what the GPU takes for a replay."""
        self.synchronize()
        begin = time.perf_counter()
        launch()
        launching = time.perf_counter() - begin
        return launching > _HOST_SHARE * self.seconds(replay, repeats=1)

    def profile(self, largest_step: Callable[[], None]) -> MemoryProfile:
        """Runs the largest step and sees what it takes."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        largest_step()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated()
        free, total = torch.cuda.mem_get_info()
        other = total - free - torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        return MemoryProfile(total=total, peak=peak, other=other)


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage is collected meanwhile: to free what an earlier backend had on the GPU would invalidate a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

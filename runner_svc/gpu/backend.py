"""The backend that computes a model on a GPU; it launches the next step while the current one computes.

A step consists of one copy to the device (`step_buffers`, by a kernel that reads the host's memory), a kernel that
applies the changes of the slots, the forward pass (a CUDA graph where all rows decode, see `gpu.steps`), the sampler's
launch, and one copy back. Launching does not block the host; `PendingCudaStep` waits for the result by an event.
Sampled tokens are written into the device's token buffer, from which the next step reads them.

Buffers of fixed size are allocated first; the KV pool takes the memory that the largest step leaves (`pool_size`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from roster_protos import plan_pb2
from runner_svc.cuda.tiers.block_copier import BlockCopier
from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.decoder.hidden import Hidden
from runner_svc.gpu.blocks.device_blocks import DeviceBlocks
from runner_svc.gpu.capture import capture_decode_steps, capture_mixed_steps
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.graphs import StepGraphs
from runner_svc.gpu.kv_scales import calibrated_scales, stated_scales
from runner_svc.gpu.masked_rows import CudaMaskedRows
from runner_svc.gpu.pending_step import HostBuffers, PendingCudaStep, result_words
from runner_svc.gpu.profiling_batch import largest_batch
from runner_svc.gpu.step_buffers import PackedRows, PackedStep, PlacedRecords, Ring, aligned
from runner_svc.gpu.steps import CudaSteps
from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.device import Device, Event, SharedTensor
from runner_svc.interface.kv_cache import FP8, KVCache
from runner_svc.interface.launchers import Launchers, SamplingLauncher
from runner_svc.interface.progress import Progress
from runner_svc.interface.served_config import ServedConfig
from runner_svc.interface.step import StepBatch, StepOutput
from runner_svc.model.fingerprints import fingerprints
from runner_svc.sampling.device_logprobs import CHUNK, PendingLogprobs, launch_row_logprobs
from runner_svc.sampling.sample_records import RowPacker, SampleRows
from runner_svc.tiers.block_copies import Region
from runner_svc.timings.start_timings import StartTimings
from runner_svc.timings.timings_file import TimingsFile
from runner_svc.transformers_decoder.gpu.cuda_decoder import TransformersCudaDecoder

log = structlog.get_logger()

Forward = Callable[[int], Hidden | None]
"""Launches a packed step's pass on a stream; returns its hidden states if its rows may score their prompts."""

# Maximum number of steps that are launched but not yet waited for.
MAX_IN_FLIGHT = 4
# Room for a step's slot changes and sampling records; data that does not fit is copied separately.
TAIL_WORDS = 1 << 17


@dataclass(frozen=True, slots=True)
class CudaSizes:
    """Sizes that the operator sets. `num_blocks` None: all that fit into the share `gpu_memory` of the GPU's memory."""

    num_slots: int
    block_size: int
    max_step_tokens: int
    context_length: int
    num_blocks: int | None = None
    gpu_memory: float = 0.9
    fp8_cache: bool = False
    shares_cache: bool = False
    """Whether other processes can map the cache."""

    @property
    def max_table(self) -> int:
        """Maximum number of blocks of one sequence."""
        return -(-self.context_length // self.block_size)


class CudaBackend:
    """Implements `runner_svc.interface.backend.OverlappingBackend`."""

    tile_tokens = 128  # of cuBLAS's kernels for many rows, and of most of Roster's

    def __init__(
        self,
        model: plan_pb2.Model,
        config: ServedConfig,
        make_decoder: Callable[[], CudaDecoder | TransformersCudaDecoder],
        launchers: Launchers,
        device: Device,
        sizes: CudaSizes,
        progress: Progress,
        kept_timings: TimingsFile | None = None,
    ) -> None:
        """`make_decoder` is called on the device's stream. Times in `kept_timings` are used and not measured again.

        Raises OutOfMemory, UnsupportedModel, and ValueError for sizes that the kernels do not support.
        """
        self.model = model
        self.device = str(device.device)
        self.block_size = sizes.block_size
        self.num_slots = sizes.num_slots
        self.max_step_tokens = sizes.max_step_tokens
        self.kept_timings = kept_timings
        self._device = device
        self._launchers = launchers
        self._sizes = sizes
        with device.stream(), torch.no_grad():
            self._decoder = make_decoder()
            self._slots = self._make_slots()
            self._copy = launchers.copy()
            self._scatter = launchers.scatter()
            self._sampling = self._make_sampling()
            self._logprobs = launchers.logprobs()
            self._pack_rows = RowPacker()
            words = result_words(self._most_draws, sizes.num_slots)
            self._result = torch.zeros(words, dtype=torch.int32, device=device.device)
            self._cache_dtype = FP8 if sizes.fp8_cache else self._decoder.dtype
            self.fingerprints = fingerprints(config, device.device, self._decoder.dtype, self._cache_dtype)
            self.num_blocks = sizes.num_blocks or self._fitting_blocks(progress)
            scales = self._kv_scales(progress) if sizes.fp8_cache else None
            self.shared_cache = self._share(config) if sizes.shares_cache else None
            memory = None if self.shared_cache is None else self.shared_cache.tensor
            layout = (config, self.num_blocks, sizes.block_size, self._cache_dtype)
            self.cache = KVCache(*layout, device.device, scales, memory)
            self._steps = self._make_steps(self.cache)
            self._graphs, self._mixed_graphs = self._captured_at_start(progress)
        self._ring = self._make_ring()
        self._changes: NDArray[np.int32] | None = None  # of the slots, for the next step
        self._drawn_views: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by number of rows
        self._last_end: Event | None = None

    @property
    def decode_graphs(self) -> StepGraphs:
        """The CUDA graphs of decode steps."""
        return self._graphs

    @property
    def has_experts(self) -> bool:
        """Whether layers of the model are mixtures of experts."""
        return self._steps.has_experts

    @property
    def decoder(self) -> CudaDecoder | TransformersCudaDecoder:
        """The decoder that computes its steps."""
        return self._decoder

    def change_slots(self, changes: SlotChanges) -> None:
        """Encodes the changes; the next batch applies them to the device's token buffer and block tables."""
        if self._changes is not None:  # of a plan that launched no batch
            with self._device.stream() as stream:
                on_device = torch.from_numpy(self._changes).to(self._device.device)
                self._scatter(stream, self._slots.words, on_device, int(self._changes[0]))
        self._changes = self._slots.encode(changes)

    @torch.inference_mode()
    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copies whole blocks; all sources are read before any target is written."""
        with self._device.stream():
            self.cache.copy_blocks(self._index(sources), self._index(targets))

    @property
    def cache_regions(self) -> list[Region]:
        """The cache itself, as a copier to and from a host pool reads and writes it."""
        return [Region.of(parts, self.num_blocks + 1) for parts in self._kept_by_block()]

    def host_copier(self, num_host_blocks: int, progress: Progress) -> BlockCopier:
        """Returns what copies blocks between the cache and a new host pool; see `BlockCopier`."""
        return BlockCopier(self._device, self._launchers.blocks(), self.cache_regions, num_host_blocks, progress)

    def block_store(self) -> DeviceBlocks:
        """Returns the KV blocks as bytes, for moves to and from other runners."""
        forget = getattr(self, "forget_drafts", lambda blocks: None)
        return DeviceBlocks(self._device, self._launchers.blocks, self.cache_regions, forget)

    def _share(self, config: ServedConfig) -> SharedTensor:
        num_bytes = KVCache.num_bytes(config, self.num_blocks, self._sizes.block_size, self._cache_dtype)
        return self._device.share(num_bytes)

    def _kept_by_block(self) -> list[Tensor]:
        """What is kept under block ids and travels with them, each [parts, ...]."""
        return [self.cache.data.flatten(0, 1)]

    def step(self, batch: StepBatch) -> StepOutput:
        """Launches the batch and waits for it."""
        return self.launch(batch).wait()

    def is_broken_by(self, error: Exception) -> bool:
        """Returns whether this process can no longer compute: after any CUDA error except running out of memory."""
        return not isinstance(error, torch.OutOfMemoryError) and "CUDA" in str(error).upper()

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> PendingCudaStep:
        """Launches the batch; blocks only while MAX_IN_FLIGHT steps are in flight."""
        buffers = self._ring.take_entry()
        try:
            return self._launch(batch, buffers)
        except BaseException:
            self._ring.free_entry(buffers, self._behind_all())
            raise

    def _behind_all(self) -> Event:
        """Records an event after everything launched so far: a partly launched step may still use its buffers.

        If recording fails, the buffers are never freed: the device is broken, or may use them indefinitely.
        """
        with self._device.stream():
            return self._device.event()

    def _launch(self, batch: StepBatch, buffers: HostBuffers) -> PendingCudaStep:
        steps, device = self._steps, self._device
        step = PackedStep(steps.layout, buffers.words)
        rows, forward = self._pack(step, batch)
        changes = step.append(self._changes) if self._changes is not None else None
        self._changes = None
        records = PlacedRecords.of(step, self._pack_records(batch, rows))
        with device.stream() as stream:
            begin = device.event()
            self._copy(stream, buffers.input, steps.packed, step.used)
            if changes is not None:
                self._scatter(stream, self._slots.words, changes.tensor(steps.packed), int(changes.array[0]))
            self._prepare_drafts(stream, batch, rows, records)
            hidden = forward(stream)
            prompt_logprobs = self._prompt_logprobs(stream, hidden, batch, rows.offsets) if hidden is not None else []
            forwarded = device.event()
            logprobs = self._draw(stream, batch, rows, records, buffers)
            masked_rows = self._keep_masked_rows(batch, rows) if len(batch.awaits) else None
            end = device.event()
        last_end, self._last_end = self._last_end, end
        return self._pending(rows, batch)(
            len(batch.slots),
            rows.sample_rows,
            masked_rows,
            logprobs,
            prompt_logprobs,
            buffers,
            self._ring,
            last_end,
            begin,
            forwarded,
            end,
        )

    def _pack(self, step: PackedStep, batch: StepBatch) -> tuple[PackedRows, Forward]:
        """Packs the batch; returns its rows and what launches its forward pass."""
        bucket = None
        if (batch.counts == 1).all() and batch.sample.all():
            bucket = self._graphs.bucket(len(batch.slots))
        if bucket is not None:
            return self._steps.pack_decode(step, batch, bucket), partial(self._replay_decode, bucket)
        mixed_bucket = self._mixed_graphs.bucket(int(batch.counts.sum()))
        mixed = self._steps.pack_mixed(step, batch, mixed_bucket)
        replay = partial(self._mixed_graphs.replay, mixed_bucket) if mixed_bucket is not None else None
        return mixed.rows, partial(self._steps.run_mixed, step=mixed, replay=replay)

    def _prepare_drafts(self, stream: int, batch: StepBatch, rows: PackedRows, records: PlacedRecords) -> None:
        """Launches what a drafter needs before the forward pass; a backend without one needs nothing."""

    def _replay_decode(self, bucket: int, stream: int) -> None:
        self._graphs.replay(bucket)

    def _pack_records(self, batch: StepBatch, rows: PackedRows) -> SampleRows:
        return self._pack_rows(batch, rows.sample_rows)

    def _pending(self, rows: PackedRows, batch: StepBatch) -> Callable[..., PendingCudaStep]:
        return PendingCudaStep

    def _keep_masked_rows(self, batch: StepBatch, rows: PackedRows) -> CudaMaskedRows:
        """Copies the adjusted logits of the rows that wait for masks, because the next step overwrites them."""
        waiting = self._index(np.searchsorted(rows.sample_rows, batch.awaits))
        logits = self._steps.logits[waiting]
        return CudaMaskedRows(batch, logits, self._sampling, self._logprobs, self._device, self.num_slots)

    def _draw(
        self, stream: int, batch: StepBatch, rows: PackedRows, records: PlacedRecords, buffers: HostBuffers
    ) -> list[PendingLogprobs]:
        """Launches the sampler and the copy of its result; returns the log-probabilities of rows that requested them.

        Rows that wait for masks are sampled here too and again with their masks. Their logits are adjusted here. The
        first token is discarded; no plan reads its position before the second one is written.
        """
        if not len(rows.sample_rows):
            return []
        packed = self._steps.packed
        logits, tokens, finite = self._drawn(len(rows.sample_rows))
        self._sampling(
            stream,
            logits,
            records.records.tensor(packed),
            records.extra_ids.tensor(packed),
            records.extra_values.tensor(packed),
            tokens,
            finite,
            adjusted=records.adjusted,
        )
        self._copy(stream, self._result, buffers.result, len(self._result))
        return launch_row_logprobs(self._logprobs, stream, logits, tokens, batch, rows.sample_rows, records.asking)

    def _drawn(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, tokens and finiteness of the sampling rows; cached, as torch would create a dozen views per step."""
        views = self._drawn_views.get(num_rows)
        if views is None:
            finite = self._result[aligned(self.num_slots) :].view(torch.uint8)
            views = self._steps.logits[:num_rows], self._result[:num_rows], finite[:num_rows]
            self._drawn_views[num_rows] = views
        return views

    def _prompt_logprobs(
        self, stream: int, hidden: Hidden, batch: StepBatch, offsets: NDArray[np.int32]
    ) -> list[PendingLogprobs]:
        """Launches the requested log-probabilities of prompt tokens; logits exist for CHUNK positions at a time."""
        pending = []
        for row, state in enumerate(batch.states):
            num_scored = batch.num_scored(row) if state.prompt_logprobs is not None else 0
            if not num_scored:
                continue
            first, begin = int(batch.starts[row]) + 1, int(offsets[row])
            targets = self._index(state.tokens[first : first + num_scored])
            parts = []
            for done in range(0, num_scored, CHUNK):
                some = hidden.slice(begin + done, begin + min(num_scored, done + CHUNK))
                logits = torch.empty(len(some.residual), self._decoder.config.vocab_size, device=self._device.device)
                self._decoder.logits(stream, some, logits)
                parts.append(self._logprobs(stream, logits, targets[done : done + CHUNK], state.prompt_logprobs or 0))
            joined = (torch.cat(part) for part in zip(*parts, strict=True))
            pending.append(PendingLogprobs(row, first, state.prompt_logprobs or 0, *joined))
        return pending

    def _index(self, ids: NDArray[np.integer]) -> Tensor:
        """The ids as an int64 tensor on the device."""
        return torch.from_numpy(ids.astype(np.int64)).to(self._device.device)

    # ------------------------------------------------------------------ start-up

    def _captured_at_start(self, progress: Progress) -> tuple[StepGraphs, StepGraphs]:
        """Returns the graphs of decode and of mixed steps."""
        return self._captured(progress, self._timings)

    @cached_property
    def _timings(self) -> StartTimings:
        """Times of steps, of an earlier start or of this one."""
        return self.kept_timings.timings if self.kept_timings is not None else StartTimings()

    def _make_ring(self, check: Callable[[], None] | None = None) -> Ring[HostBuffers]:
        """`check` raises an exception if a step that has ended may have no right result."""
        arguments = (self._device, self._steps.layout.words, self._most_draws, self.num_slots, check)
        return Ring([HostBuffers(*arguments) for _ in range(MAX_IN_FLIGHT)])

    def _make_slots(self) -> DeviceSlots:
        sizes = self._sizes
        return DeviceSlots(sizes.num_slots, sizes.context_length, sizes.max_table, self._device.device)

    def _make_sampling(self) -> SamplingLauncher:
        return self._launchers.sampling(self._slots.tokens)

    @property
    def _most_draws(self) -> int:
        """Most tokens that a step draws."""
        return self.num_slots

    def _make_steps(self, cache: KVCache) -> CudaSteps:
        return CudaSteps(
            self._decoder,
            cache,
            self._slots,
            self._launchers,
            num_slots=self.num_slots,
            max_step_tokens=self.max_step_tokens,
            tail_words=TAIL_WORDS,
        )

    def _captured(
        self, progress: Progress, timings: StartTimings, *, measures: bool = True
    ) -> tuple[StepGraphs, StepGraphs]:
        """Returns the graphs of decode and of mixed steps: none of a model whose forward pass waits for the GPU."""
        steps, slots, device, sizes = self._steps, self._slots, self._device, self._sizes
        context, most = sizes.context_length, sizes.max_step_tokens
        try:
            return (
                capture_decode_steps(steps, slots, device, context, progress, timings, measures=measures),
                capture_mixed_steps(steps, slots, device, context, most, progress, timings, measures=measures),
            )
        except RuntimeError as error:
            if not self._decoder.may_not_be_captured or isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).strip().splitlines()[0]
            log.info("steps are launched one kernel after another: they can't be captured", reason=reason)
            device.synchronize()
            slots.words.zero_()
            steps.packed.zero_()
            return StepGraphs([]), StepGraphs([])

    def _kv_scales(self, progress: Progress) -> Tensor | None:
        """Returns the checkpoint's scales of an FP8 cache, or calibrated ones."""
        if isinstance(self._decoder, CudaDecoder) and (stated := self._decoder.kv_scales) is not None:
            return stated_scales(stated, self._decoder.config.num_kv_heads).to(self._device.device)
        progress("calibrating the FP8 cache", 0.0)
        max_tokens = min(self.max_step_tokens, self._sizes.context_length)
        assert isinstance(self._decoder, CudaDecoder), "FP8 caches are refused for others"
        scales = calibrated_scales(self._decoder, self._launchers, self._device, max_tokens)
        progress("calibrating the FP8 cache", 1.0)
        return scales

    def _fitting_blocks(self, progress: Progress) -> int:
        """Returns the number of blocks that fit next to the largest step, which runs with only the dummy block."""
        progress("profiling the largest step", 0.0)
        config, sizes = self._decoder.config, self._sizes
        cache = KVCache(config, 0, sizes.block_size, self._cache_dtype, self._device.device)
        profile = self._device.profile(partial(self._run_largest, self._make_steps(cache)))
        progress("profiling the largest step", 1.0)
        return profile.num_blocks(sizes.gpu_memory, self._block_bytes)

    @property
    def _block_bytes(self) -> int:
        """Bytes of a block of the pool."""
        return KVCache.block_bytes(self._decoder.config, self._sizes.block_size, self._cache_dtype)

    def _run_largest(self, steps: CudaSteps) -> None:
        sizes = self._sizes
        words = self._device.pinned(steps.layout.words)
        batch = largest_batch(sizes.num_slots, sizes.max_step_tokens, sizes.context_length)
        mixed = steps.pack_mixed(PackedStep(steps.layout, words.numpy()), batch)
        steps.packed.copy_(words)
        steps.run_mixed(self._device.current_stream(), mixed)

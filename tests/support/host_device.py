"""A device and launchers in plain torch on the CPU, for tests of the CUDA backend without a GPU.

Each launcher computes what the kernel of the same name does, slowly and plainly; a "captured" function is simply called
again. A step is complete when its launch returns, but `wait` is still needed for its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.cuda.products.by_class import LinearProducts
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.draft_launchers import DraftLaunchers
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.launchers import LogprobsLauncher
from runner_svc.interface.layer_launchers import DecoderLaunchers
from runner_svc.interface.pool_size import MemoryProfile
from runner_svc.interface.products.skinny_launchers import SkinnyLaunchers
from runner_svc.interface.step import allowed_ids
from runner_svc.model.config import ModelConfig
from runner_svc.sampling.device_logprobs import torch_logprobs
from runner_svc.sampling.gumbel import gumbel, key_words
from runner_svc.sampling.logit_adjustments import adjust_logits
from runner_svc.sampling.noise import draw_keys
from runner_svc.sampling.sample_records import SAMPLE_RECORD
from runner_svc.weights.fp8_matrix import Fp8Matrix
from runner_svc.weights.matrix import Matrix
from tests.support.host_attention import HostAttention
from tests.support.host_blocks import HostBlockCopies
from tests.support.host_drafts import host_drafts
from tests.support.host_experts import host_experts
from tests.support.host_layers import (
    HostActivation,
    HostFp8Linear,
    HostGated,
    HostNorm,
    HostProducts,
    HostRopeKv,
    HostRoundingNorm,
    host_embed,
    host_embed_part,
)
from tests.support.memory_file import MemoryFile


class HostEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Returns at once: no work is ever in flight."""

    def elapsed_time(self, end: HostEvent) -> float:
        return 0.5


class HostSideStream:
    handle = 0

    def record(self) -> HostEvent:
        return HostEvent()

    def wait(self, event: HostEvent) -> None:
        """Returns at once: no work is ever in flight."""


class HostDevice:
    """A device that counts graph replays."""

    device = torch.device("cpu")

    def __init__(self, profile: MemoryProfile | None = None, mixed_graphs: bool = False) -> None:
        self.replays = 0
        self.captured = 0
        """Captures since the graphs were last dropped."""
        self._mixed_graphs = mixed_graphs
        self._profile = profile

    @contextmanager
    def stream(self) -> Iterator[int]:
        yield 0

    def current_stream(self) -> int:
        return 0

    def synchronize(self) -> None:
        """Returns at once: no work is ever in flight."""

    def pinned(self, words: int) -> Tensor:
        return torch.full((words,), -1, dtype=torch.int32)

    def event(self) -> HostEvent:
        return HostEvent()

    def side_stream(self) -> HostSideStream:
        return HostSideStream()

    def share(self, num_bytes: int) -> MemoryFile:
        return MemoryFile(num_bytes)

    def lock(self, memory: Tensor) -> None:
        """Locks nothing."""

    def unlock(self, memory: Tensor) -> None:
        """Unlocks nothing."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def replay() -> None:
            self.replays += 1
            function()

        return replay

    def drop_graphs(self) -> None:
        self.captured = 0

    def seconds(self, replay: Callable[[], None]) -> float:
        return 0.0

    def has_room(self) -> bool:
        return True

    def is_late(self, launch: Callable[[], None], replay: Callable[[], None]) -> bool:
        return self._mixed_graphs

    def profile(self, largest_step: Callable[[], None]) -> MemoryProfile:
        largest_step()
        assert self._profile is not None
        return self._profile


class HostLaunchers:
    """Implements `runner_svc.interface.launchers.Launchers`."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def decoder(self, fp8_cache: bool) -> DecoderLaunchers:
        config = self._config
        return DecoderLaunchers(
            norm=HostNorm(config.norm_eps, config.norm, config.multiplier),
            activation=HostActivation(config.activation, config.layers[0].mlp.gated),
            linear=LinearProducts({Fp8Matrix: HostFp8Linear()}),
            gated=HostGated(config.activation) if config.experts is None else None,
            rotating=[self._rope(rope.rotary_dim) for rope in config.ropes],
            plain=self._rope(0),
            rounding_norm=HostRoundingNorm(HostNorm(config.norm_eps, config.norm, config.multiplier)),
            embed_part=host_embed_part,
            experts=host_experts(config.experts, HostActivation(config.activation)) if config.experts else None,
        )

    def _rope(self, rotary_dim: int) -> HostRopeKv:
        config = self._config
        return HostRopeKv(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=rotary_dim,
            eps=config.norm_eps,
            qk_norm=config.layers[0].qk_norm,
            norm=config.norm,
        )

    def skinny(self, matrices: Sequence[Matrix]) -> list[SkinnyLaunchers]:
        return [SkinnyLaunchers("host", embed=host_embed, products=HostProducts(self._config))]

    def attention(
        self, cache: KVCache, tables: Tensor, max_batch: int, layers: Sequence[AttentionLayer]
    ) -> HostAttention:
        return HostAttention(cache, tables, self._config, max_batch, layers)

    def gather(self, tokens: Tensor, tables: Tensor, block_size: int) -> HostGather:
        return HostGather(tokens, tables, block_size)

    def copy(self) -> Callable[[int, Tensor, Tensor, int], None]:
        return copy_words

    def scatter(self) -> Callable[[int, Tensor, Tensor, int], None]:
        return scatter_segments

    def blocks(self) -> HostBlockCopies:
        return HostBlockCopies()

    def sampling(self, tokens: Tensor, *, writes: bool = True) -> HostSampling:
        return HostSampling(tokens, writes=writes)

    def logprobs(self) -> LogprobsLauncher:
        return torch_logprobs

    def drafts(self, tokens: Tensor, counters: Tensor, tables: Tensor, block_size: int) -> DraftLaunchers:
        return host_drafts(tokens, counters, tables, block_size, self._config.vocab_size)


def copy_words(stream: int, source: Tensor, target: Tensor, num_words: int) -> None:
    assert num_words % 4 == 0
    target[:num_words] = source[:num_words]


def scatter_segments(stream: int, words: Tensor, changes: Tensor, num_segments: int) -> None:
    data_begin = 8 + 3 * num_segments
    targets, sources, lengths = changes[8:data_begin].view(3, num_segments).tolist()
    for target, source, length in zip(targets, sources, lengths, strict=True):
        words[target : target + length] = changes[data_begin + source : data_begin + source + length]


class HostGather:
    def __init__(self, tokens: Tensor, tables: Tensor, block_size: int) -> None:
        self._tokens, self._tables, self._block_size = tokens, tables, block_size

    def __call__(
        self,
        stream: int,
        slots: Tensor,
        starts: Tensor,
        offsets: Tensor,
        tokens: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        for inputs in (tokens, positions, slot_mapping):
            inputs.zero_()
        for row, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
            for index in range(int(offsets[row]), int(offsets[row + 1])):
                position = start + index - int(offsets[row])
                block = int(self._tables[slot, position // self._block_size])
                tokens[index] = self._tokens[slot, position]
                positions[index] = position
                slot_mapping[index] = block * self._block_size + position % self._block_size


class HostSampling:
    """Greedy sampling, or a draw with temperature alone; adjusts logits in place, from the token buffer."""

    def __init__(self, token_buffer: Tensor, *, writes: bool = True) -> None:
        self._token_buffer, self._writes = token_buffer, writes

    def __call__(
        self,
        stream: int,
        logits: Tensor,
        records: Tensor,
        extra_ids: Tensor,
        extra_values: Tensor,
        tokens: Tensor,
        finite: Tensor,
        *,
        adjusted: bool,
        masks: Tensor | None = None,
    ) -> None:
        if adjusted:
            self._adjust(logits, records.numpy().view(SAMPLE_RECORD), extra_ids.numpy(), extra_values)
        if masks is not None:
            allowed = allowed_ids(masks.numpy().view(np.uint32), logits.shape[1])
            logits.masked_fill_(torch.from_numpy(~allowed), torch.finfo(logits.dtype).min)
        ids = torch.arange(logits.shape[1], dtype=torch.int32)
        for index, record in enumerate(records.numpy().view(SAMPLE_RECORD)[: len(logits)]):
            allowed_any = logits[index].max() > torch.finfo(logits.dtype).min
            finite[index] = bool(logits[index].isfinite().all() and allowed_any)
            tokens[index] = -1
            if not finite[index]:
                continue
            scores = logits[index]
            if record["temperature"] > 0:
                key = draw_keys(record["seed"][None], record["sample_index"][None], record["position"][None])
                scores = scores / float(record["temperature"]) + gumbel(key_words(key, logits.device), ids)[0]
            tokens[index] = scores.argmax()
            if self._writes:
                self._token_buffer[int(record["slot"]), int(record["position"])] = tokens[index]

    def _adjust(
        self, logits: Tensor, records: NDArray[np.void], extra_ids: NDArray[np.int32], extra_values: Tensor
    ) -> None:
        values = extra_values.numpy().view(np.float32)
        for line, record in zip(logits, records[: len(logits)], strict=True):
            if not record["adjusted"]:
                continue
            position, bias_start, stop_start = (int(record[name]) for name in ("position", "bias_start", "stop_start"))
            bias = slice(bias_start, bias_start + int(record["bias_count"]))
            state = SimpleNamespace(
                tokens=self._token_buffer[int(record["slot"])].numpy(),
                prompt_len=int(record["prompt_len"]),
                bias_ids=extra_ids[bias],
                bias_values=values[bias],
                stop_ids=extra_ids[stop_start : stop_start + int(record["stop_count"])],
            )
            was_finite = line.isfinite()
            adjust_logits(line, record, state, position)  # type: ignore[arg-type]
            line[was_finite & line.isneginf()] = torch.finfo(line.dtype).min

"""A device and launchers in plain torch on the CPU, for tests of the CUDA backend where there is no GPU.

Each launcher does what the kernel of the same name does, slowly and obviously; a "captured" function is simply called
again. Steps are done when their launch returns, but nobody is told before `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.backend import allowed_ids
from runner_svc.gumbel import gumbel, key_words
from runner_svc.kv_cache import KVCache
from runner_svc.model.config import ModelConfig
from runner_svc.model.cuda_decoder import DecoderLaunchers
from runner_svc.model.decoder import ACTIVATION_FUNCTIONS
from runner_svc.model.skinny_decoder import ScaledRows, SkinnyLaunchers
from runner_svc.noise import draw_keys
from runner_svc.pool_size import MemoryProfile
from runner_svc.sample_records import SAMPLE_RECORD
from tests.support.host_attention import HostAttention


class HostEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def elapsed_time(self, end: HostEvent) -> float:
        return 0.5


class HostDevice:
    """Counts what a backend asks of it."""

    device = torch.device("cpu")

    def __init__(self, profile: MemoryProfile | None = None, mixed_graphs: bool = False) -> None:
        self.replays = 0
        self._mixed_graphs = mixed_graphs
        self._profile = profile

    @contextmanager
    def stream(self) -> Iterator[int]:
        yield 0

    def current_stream(self) -> int:
        return 0

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def pinned(self, words: int) -> Tensor:
        return torch.full((words,), -1, dtype=torch.int32)

    def event(self) -> HostEvent:
        return HostEvent()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.replays += 1
            function()

        return replay

    def seconds(self, replay: Callable[[], None]) -> float:
        return 0.0

    def is_late(self, launch: Callable[[], None], replay: Callable[[], None]) -> bool:
        return self._mixed_graphs

    def profile(self, largest_step: Callable[[], None]) -> MemoryProfile:
        largest_step()
        assert self._profile is not None
        return self._profile


class HostLaunchers:
    """Implements `runner_svc.launchers.Launchers`."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def decoder(self, fp8_cache: bool) -> DecoderLaunchers:
        config = self._config
        return DecoderLaunchers(
            norm=HostNorm(config.rms_norm_eps),
            activation=HostActivation(config.activation),
            gated=HostGated(config.activation),
            rotating=HostRopeKv(config, config.rope.rotary_dim),
            plain=HostRopeKv(config, 0),
        )

    def skinny(self, matrices: Sequence[Tensor]) -> list[SkinnyLaunchers]:
        return [SkinnyLaunchers("host", embed=host_embed, products=HostProducts(self._config))]

    def attention(self, cache: KVCache, tables: Tensor, max_batch: int) -> HostAttention:
        return HostAttention(cache, tables, self._config, max_batch)

    def gather(self, tokens: Tensor, tables: Tensor, block_size: int) -> HostGather:
        return HostGather(tokens, tables, block_size)

    def copy(self) -> Callable[[int, Tensor, Tensor, int], None]:
        return copy_words

    def scatter(self) -> Callable[[int, Tensor, Tensor, int], None]:
        return scatter_segments

    def sampling(self, tokens: Tensor) -> HostSampling:
        return HostSampling(tokens)


def copy_words(stream: int, source: Tensor, target: Tensor, num_words: int) -> None:
    assert num_words % 4 == 0
    target[:num_words] = source[:num_words]


def scatter_segments(stream: int, words: Tensor, changes: Tensor, num_segments: int) -> None:
    data_begin = 8 + 3 * num_segments
    targets, sources, lengths = changes[8:data_begin].view(3, num_segments).tolist()
    for target, source, length in zip(targets, sources, lengths, strict=True):
        words[target : target + length] = changes[data_begin + source : data_begin + source + length]


class HostNorm:
    def __init__(self, eps: float) -> None:
        self._eps = eps

    def add(self, stream: int, hidden: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> None:
        residual += hidden
        self.norm(stream, residual, weight, out)

    def norm(self, stream: int, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        out.copy_(functional.rms_norm(hidden, weight.shape, weight, self._eps))


def host_embed(
    stream: int,
    tokens: Tensor,
    embeddings: Tensor,
    norm_weight: Tensor,
    residual: Tensor,
    out: Tensor,
    squares: Tensor,
) -> ScaledRows:
    residual.copy_(embeddings[tokens.long()])
    return unscaled_norm(residual, norm_weight, out, squares)


def unscaled_norm(residual: Tensor, norm_weight: Tensor, out: Tensor, squares: Tensor) -> ScaledRows:
    """RMSNorm but for the factor 1 / rms."""
    out.copy_(residual * norm_weight)
    squares[0, : len(residual)] = residual.float().square().sum(dim=1)
    return ScaledRows(out, squares[:1])


class HostProducts:
    def __init__(self, config: ModelConfig) -> None:
        self._eps = config.rms_norm_eps
        self._activation = ACTIVATION_FUNCTIONS[config.activation]

    def store(self, stream: int, x: ScaledRows, weight: Tensor, out: Tensor) -> None:
        out.copy_(self._multiply(x, weight))

    def gated(self, stream: int, x: ScaledRows, weight: Tensor, out: Tensor) -> None:
        gate, up = self._multiply(x, weight).chunk(2, dim=-1)
        out.copy_(self._activation(gate) * up)

    def add(
        self,
        stream: int,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        squares: Tensor,
    ) -> ScaledRows:
        residual += self._multiply(ScaledRows(x, None), weight).to(residual.dtype)
        return unscaled_norm(residual, norm_weight, out, squares)

    def _multiply(self, x: ScaledRows, weight: Tensor) -> Tensor:
        product = x.rows.float() @ weight.float().t()
        if x.squares is None:
            return product
        squares = x.squares[:, : len(product)].sum(dim=0) / weight.shape[1]
        return product * torch.rsqrt(squares + self._eps).unsqueeze(1)


class HostActivation:
    def __init__(self, name: str) -> None:
        self._function = ACTIVATION_FUNCTIONS[name]

    def __call__(self, stream: int, gate_up: Tensor, out: Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        out.copy_(self._function(gate) * up)


class HostGated:
    def __init__(self, name: str) -> None:
        self._activation = HostActivation(name)
        self.prepared = 0  # for so many positions

    def fits(self, weight: Tensor) -> bool:
        return True

    def prepare(self, max_tokens: int, weight: Tensor) -> None:
        self.prepared = max_tokens

    def __call__(self, stream: int, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self._activation(stream, x @ weight.t(), out)


class HostRopeKv:
    def __init__(self, config: ModelConfig, rotary_dim: int) -> None:
        self._config = config
        self._rotary_dim = rotary_dim

    def __call__(
        self,
        stream: int,
        qkv: Tensor,
        queries: Tensor,
        cache: Tensor,
        rotations: Tensor,
        rotation_rows: Tensor,
        slot_mapping: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        cache_scales: Tensor | None = None,
    ) -> None:
        config = self._config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        split = qkv.clone().view(-1, heads + 2 * kv_heads, head_dim)
        for part, weight in ((split[:, :heads], q_norm), (split[:, heads : heads + kv_heads], k_norm)):
            if weight is not None:
                part.copy_(functional.rms_norm(part, (head_dim,), weight, config.rms_norm_eps))
        if self._rotary_dim:
            half = self._rotary_dim // 2
            cos, sin = rotations[rotation_rows.long()].unsqueeze(1).split(half, dim=-1)
            x, y = split[:, : heads + kv_heads, : 2 * half].clone().split(half, dim=-1)
            split[:, : heads + kv_heads, :half] = x * cos - y * sin
            split[:, : heads + kv_heads, half : 2 * half] = y * cos + x * sin
        queries.copy_(split[:, :heads].flatten(1))
        positions = cache.view(2, -1, kv_heads, head_dim)
        for half in range(2):
            written = split[:, heads + half * kv_heads :][:, :kv_heads]
            if cache_scales is not None:
                written = (written / cache_scales[half].unsqueeze(-1)).clamp(-448, 448).to(cache.dtype)
            positions[half].view(torch.uint8)[slot_mapping.long()] = written.contiguous().view(torch.uint8)


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
    """Greedy, or a draw with temperature alone; rows that adjust their logits are refused."""

    def __init__(self, token_buffer: Tensor) -> None:
        self._token_buffer = token_buffer

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
        assert not adjusted
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
            self._token_buffer[int(record["slot"]), int(record["position"])] = tokens[index]

"""Timed cases of the kernels other than attention. Bytes count each input and output once; for sampling, one pass over
the logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from bench.common.gpu_timing import Launch, graph_microseconds
from bench.kernels.measurement import Measurement
from bench.kernels.sampling_cases import BIASED_IDS, SAMPLING, sample_records
from runner_svc.cuda.activation import ActivationMul
from runner_svc.cuda.gather import GatherInputs
from runner_svc.cuda.norm import AddRmsNorm
from runner_svc.cuda.rope_kv import RopeKvWrite
from runner_svc.cuda.sampling import CudaSampler
from runner_svc.interface.kv_cache import FP8
from runner_svc.model.families.description import QkNorm

_ROTATED_BYTES = 200_000_000
_MAX_SETS = 24
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """Case to time. `make(stream)` allocates a set of tensors and returns the launch; a launch moves `bytes` bytes."""

    kernel: str
    name: str
    bytes: int
    make: Callable[[], Launch]


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32)).cuda()


def norm_cases() -> Iterator[Case]:
    for hidden_size, num_tokens, overlap in (
        (1024, 1, False), (1024, 1, True), (1024, 64, False), (4096, 1, False), (4096, 64, False), (4096, 64, True),
        (4096, 256, False), (4096, 8192, False),
    ):  # fmt: skip
        norm = AddRmsNorm(hidden_size, BF16, 1e-5, overlap=overlap)
        weight = normal(hidden_size)

        def make(norm: AddRmsNorm = norm, weight: torch.Tensor = weight, num_tokens: int = num_tokens) -> Launch:
            hidden, residual = normal(num_tokens, len(weight)), normal(num_tokens, len(weight))
            return lambda: norm.add(stream(), hidden, residual, weight, hidden)

        name = f"{num_tokens} x {hidden_size}{', overlapping launches' if overlap else ''}"
        yield Case("add_rms_norm", name, num_tokens * hidden_size * 8, make)


def activation_cases() -> Iterator[Case]:
    for name, size, num_tokens in (
        ("silu", 3072, 1), ("silu", 3072, 64), ("silu", 14336, 1), ("silu", 14336, 64), ("silu", 14336, 256),
        ("silu", 14336, 8192), ("gelu", 14336, 64), ("gelu", 14336, 8192), ("gelu_pytorch_tanh", 14336, 64),
        ("gelu_pytorch_tanh", 14336, 8192),
    ):  # fmt: skip
        activation = ActivationMul(size, BF16, name)

        def make(activation: ActivationMul = activation, size: int = size, num_tokens: int = num_tokens) -> Launch:
            gate_up = normal(num_tokens, 2 * size)
            out = normal(num_tokens, size)
            return lambda: activation(stream(), gate_up, out)

        yield Case(f"{name}_mul", f"{num_tokens} x {size}", num_tokens * size * 6, make)


def rope_cases() -> Iterator[Case]:
    table = normal(16384, 128, dtype=torch.float32)
    norm = normal(128)
    for heads, kv_heads, qk_norm, fp8_cache, num_tokens in (
        (16, 8, True, False, 1), (16, 8, True, False, 64), (32, 8, False, False, 1), (32, 8, False, False, 64),
        (32, 8, False, False, 256), (32, 8, False, False, 8192), (32, 8, False, True, 64), (32, 8, False, True, 8192),
    ):  # fmt: skip
        kernel = RopeKvWrite(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=128, rotary_dim=128, dtype=BF16, eps=1e-6,
            qk_norm=QkNorm.HEAD if qk_norm else QkNorm.NONE, fp8_cache=fp8_cache,
        )  # fmt: skip
        scales = torch.ones(2, kv_heads, device="cuda") if fp8_cache else None

        def make(
            kernel: RopeKvWrite = kernel,
            heads: int = heads,
            kv_heads: int = kv_heads,
            num_tokens: int = num_tokens,
            scales: torch.Tensor | None = scales,
        ) -> Launch:
            qkv = normal(num_tokens, (heads + 2 * kv_heads) * 128)
            blocks = num_tokens // 16 + 2
            cache = normal(2, blocks, 16, kv_heads, 128).to(BF16 if scales is None else FP8)
            positions = int32(np.random.randint(0, 16384, num_tokens))
            slots = int32(np.random.permutation(blocks * 16)[:num_tokens])
            return lambda: kernel(stream(), qkv, qkv, cache, table, positions, slots, norm, norm, scales)

        name = f"{num_tokens} x {heads}+{kv_heads}{', QK-norm' if qk_norm else ''}{', FP8' if fp8_cache else ''}"
        row_bytes = (4 * heads + (3 if fp8_cache else 4) * 2 * kv_heads) * 128
        yield Case("rope_kv_write", name, num_tokens * row_bytes, make)


def gather_cases() -> Iterator[Case]:
    buffer = torch.zeros(257, 40960, dtype=torch.int32, device="cuda")
    tables = torch.zeros(257, 2560, dtype=torch.int32, device="cuda")
    gather = GatherInputs(buffer, tables, 16)
    for num_rows, count in ((64, 1), (256, 1), (4, 2048)):

        def make(num_rows: int = num_rows, count: int = count) -> Launch:
            slots, starts = int32(np.random.permutation(256)[:num_rows]), int32(np.random.randint(0, 9000, num_rows))
            offsets = int32(np.arange(num_rows + 1) * count)
            outs = [torch.empty(num_rows * count, dtype=torch.int32, device="cuda") for _ in range(3)]
            return lambda: gather(stream(), slots, starts, offsets, *outs)

        yield Case("gather_inputs", f"{num_rows} rows of {count}", num_rows * count * 20, make)


def sample_cases(vocab_size: int = 151_936) -> Iterator[Case]:
    buffer = torch.randint(0, vocab_size, (257, 4096), device="cuda", dtype=torch.int32)
    sampler = CudaSampler(vocab_size, torch.float32, buffer)
    bias_ids = int32(np.random.permutation(vocab_size)[:BIASED_IDS])
    # Zeros cost as much as other values, which would add up from replay to replay: logits are changed in place.
    bias_values = torch.zeros(BIASED_IDS, device="cuda")
    for spread in (1, 4):
        for name, parameters in SAMPLING.items():
            for num_rows in (1, 64, 256) if spread == 1 else (64,):
                fields = sample_records(num_rows, parameters)
                records = torch.from_numpy(fields.view(np.uint8)).cuda()
                adjusted = bool(fields["adjusted"].any())

                def make(
                    num_rows: int = num_rows,
                    spread: int = spread,
                    records: torch.Tensor = records,
                    adjusted: bool = adjusted,
                ) -> Launch:
                    logits = normal(num_rows, vocab_size, dtype=torch.float32) * spread
                    tokens = torch.empty(num_rows, dtype=torch.int32, device="cuda")
                    finite = torch.empty(num_rows, dtype=torch.uint8, device="cuda")
                    return lambda: sampler(
                        stream(), logits, records, bias_ids, bias_values, tokens, finite, adjusted=adjusted
                    )

                title = f"{num_rows} x {vocab_size}, spread {spread}, {name}"
                yield Case("sample", title, num_rows * vocab_size * 4, make)


def eager_launch_microseconds() -> float:
    """Returns the host's time for a launch outside a graph."""
    norm, hidden, weight = AddRmsNorm(1024, BF16, 1e-5), normal(1, 1024), normal(1024)
    handle = stream()
    norm.add(handle, hidden, hidden, weight, hidden)  # loads the kernel
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(500):  # fewer than the launch queue holds
        norm.add(handle, hidden, hidden, weight, hidden)
    return (time.perf_counter() - started) / 500 * 1e6


def measurements() -> Iterator[Measurement]:
    """Measures each case as a median over replays that walk over more sets of tensors than L2 holds."""
    for cases in (norm_cases, activation_cases, rope_cases, gather_cases, sample_cases):
        for case in cases():
            sets = max(1, min(_MAX_SETS, _ROTATED_BYTES // case.bytes))
            microseconds = graph_microseconds([case.make() for _ in range(sets)])
            yield Measurement(case.kernel, case.name, microseconds, case.bytes / microseconds / 1e6, "TB/s", "copy")

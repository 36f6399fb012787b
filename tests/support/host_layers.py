"""The launchers of a decoder's layers in plain torch on the CPU, for `host_device`: norms, products, RoPE."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.decoder.cpu_decoder import ACTIVATION_FUNCTIONS
from runner_svc.interface.skinny_launchers import ScaledRows
from runner_svc.model.config import ModelConfig


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
    """Computes RMSNorm without the factor 1 / rms."""
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
        self.prepared = 0  # positions for which it was prepared

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

"""Swaps the rotation of queries and keys in the modules of transformers that a model's attention is written in.

The function is a global of each module, so that the swap holds for all models of that module in this process: a call
that the kernel does not support goes to the function that was there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_NAME = "apply_rotary_pos_emb"
_PARAMETERS = ("q", "k", "cos", "sin", "unsqueeze_dim")


class RotationLauncher(Protocol):
    """Implemented by `runner_svc.cuda.rotate_halves.RotateHalves`."""

    def __call__(
        self,
        stream: int,
        queries: Tensor,
        keys: Tensor,
        cosines: Tensor,
        sines: Tensor,
        out_queries: Tensor,
        out_keys: Tensor,
    ) -> None: ...


MakeLauncher = Callable[[int, int, int], RotationLauncher]
"""Takes query heads, key-value heads and head size; raises ValueError for a size that is not supported."""


class _Rotation:
    """Stands for `apply_rotary_pos_emb` of one module."""

    def __init__(
        self,
        original: Callable[..., Any],
        make: MakeLauncher,
        stream: Callable[[], int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.original = original
        self._dtype = dtype
        self._device = device
        self._make = make
        self._stream = stream
        self._launchers: dict[tuple[int, int, int], RotationLauncher | None] = {}

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """Takes q and k [1, heads, T, head_dim], cos and sin [1, T, head_dim]; returns q and k rotated."""
        launcher = self._launcher(q, k, cos, sin) if unsqueeze_dim == 1 else None
        if launcher is None:
            rotated: tuple[Tensor, Tensor] = self.original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
            return rotated
        queries, keys = q[0].transpose(0, 1), k[0].transpose(0, 1)
        out_queries, out_keys = (
            torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (queries, keys)
        )
        launcher(self._stream(), queries, keys, cos[0].contiguous(), sin[0].contiguous(), out_queries, out_keys)
        return out_queries.transpose(0, 1)[None], out_keys.transpose(0, 1)[None]

    def _launcher(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> RotationLauncher | None:
        shapes = q.dim() == k.dim() == 4 and len(q) == len(k) == len(cos) == len(sin) == 1
        if (
            not shapes
            or cos.shape[1:] != (q.shape[2], q.shape[3])
            or sin.shape != cos.shape
            or q.shape[3] != k.shape[3]
        ):
            return None
        # Other models of this process, a reference on the CPU for one, come here too.
        if any(each.dtype is not self._dtype or each.device != self._device for each in (q, k, cos, sin)):
            return None
        if q.stride(3) != 1 or k.stride(3) != 1:
            return None
        if any(each.data_ptr() % 16 or any(step % 8 for step in each.stride()[1:3]) for each in (q, k)):
            return None
        size = q.shape[1], k.shape[1], q.shape[3]
        if size not in self._launchers:
            try:
                self._launchers[size] = self._make(*size)
            except (ValueError, KeyError):
                self._launchers[size] = None
        return self._launchers[size]


def swap_rotation(model: nn.Module, make: MakeLauncher, stream: Callable[[], int], dtype: torch.dtype) -> int:
    """Swaps the function in each module of `model`'s code where it computes the same; returns the number of modules."""
    swapped = 0
    device = next(model.parameters()).device
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules.get(name)
        found = getattr(module, _NAME, None)
        original = found.original if isinstance(found, _Rotation) else found
        code = getattr(original, "__code__", None)
        if original is None or code is None or code.co_varnames[: code.co_argcount] != _PARAMETERS:
            continue
        rotation = _Rotation(original, make, stream, dtype, device)
        if _is_alike(rotation, dtype, device):
            setattr(module, _NAME, rotation)
            swapped += 1
    return swapped


@torch.inference_mode()
def _is_alike(rotation: _Rotation, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel computes what the function does, up to the rounding of 16 bits."""
    tokens, heads, kv_heads, head_dim = 5, 4, 2, 64
    q, k = (
        torch.randn(1, tokens, count, head_dim, dtype=dtype, device=device).transpose(1, 2)
        for count in (heads, kv_heads)
    )
    angles = torch.randn(1, tokens, head_dim // 2, device=device).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    try:
        expected = rotation.original(q, k, cos, sin)
        found = rotation(q, k, cos, sin)
    except Exception:
        return False
    return all(
        bool(((ours.float() - own.float()).abs() <= 0.03 * (1 + own.float().abs())).all())
        for ours, own in zip(found, expected, strict=True)
    )

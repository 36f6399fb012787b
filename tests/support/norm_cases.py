"""Norms of the residual stream in their kinds, against float32 torch, on a GPU or the emulator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner_svc.decoder.norm import Norm
from runner_svc.interface.layer_launchers import NormLauncher
from runner_svc.model.families.description import NormKind

EPS = 1e-5


@dataclass(frozen=True, slots=True)
class NormCase:
    """Sizes and kind of a norm; `post` norms what is added, too."""

    kind: NormKind
    num_tokens: int
    hidden_size: int
    dtype: torch.dtype
    multiplier: float = 1.0
    post: bool = False
    out: bool = True


def weights(case: NormCase, device: torch.device) -> Tensor:
    """Returns random weights as `NormKind` says."""
    shape = (2, case.hidden_size) if case.kind is NormKind.LAYER else (case.hidden_size,)
    return torch.rand(*shape, device=device, dtype=case.dtype) + 0.5


def check_add(launcher: NormLauncher, case: NormCase, device: torch.device, stream: int) -> None:
    """Checks an addition and the norm behind it; the output holds NaN before."""
    hidden = torch.randn(case.num_tokens, case.hidden_size, device=device, dtype=case.dtype) + 1
    residual = torch.randn_like(hidden) * 3
    post_weight, weight = weights(case, device), weights(case, device)
    added = normed(case, hidden, post_weight).to(case.dtype).float() if case.post else hidden.float()
    summed = (added * case.multiplier + residual.float()).to(case.dtype)
    out = torch.full_like(hidden, torch.nan)
    if case.post:
        launcher.add_normed(stream, hidden, residual, post_weight, weight if case.out else None, out)
    else:
        launcher.add(stream, hidden, residual, weight, out)
    # A norm that is rounded on the other side of a tie moves the sum by a unit in the last place.
    torch.testing.assert_close(residual, summed, rtol=2 * torch.finfo(case.dtype).eps, atol=0.02)
    if case.out:
        torch.testing.assert_close(out, normed(case, residual, weight).to(case.dtype))
    else:
        assert bool(out.isnan().all())


def check_norm(launcher: NormLauncher, case: NormCase, device: torch.device, stream: int) -> None:
    """Checks a norm alone, of rows that lie apart."""
    hidden = torch.randn(case.num_tokens, 3 * case.hidden_size, device=device, dtype=case.dtype)
    hidden = hidden[:, case.hidden_size : 2 * case.hidden_size]
    weight = weights(case, device)
    out = torch.full((case.num_tokens, case.hidden_size), torch.nan, device=device, dtype=case.dtype)
    launcher.norm(stream, hidden, weight, out)
    torch.testing.assert_close(out, normed(case, hidden, weight).to(case.dtype))


def normed(case: NormCase, x: Tensor, weight: Tensor) -> Tensor:
    """Returns the norm in float32."""
    return Norm(case.kind, weight.float(), EPS)(x.float())

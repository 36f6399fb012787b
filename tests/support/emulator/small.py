"""The launchers of a layer's norms, activation and KV write with their kernels on the emulator."""

from __future__ import annotations

from functools import partial

import pytest

from runner_svc.cuda import activation, norm, residual_norm, rope_kv
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule


def emulate_layers(monkeypatch: pytest.MonkeyPatch, arch: str = "sm_80") -> None:
    """Makes these launchers run `arch`'s kernels."""
    for module in (activation, norm, residual_norm, rope_kv):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
        monkeypatch.setattr(module, "load", partial(EmulatedModule, arch=arch))

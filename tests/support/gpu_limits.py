"""Shared memory of the GPUs that the kernels target."""

from __future__ import annotations

from runner_svc.attention.cuda_kernels import SharedMemory

A100 = SharedMemory(167936, 166912)
A10 = SharedMemory(102400, 101376)
H100 = SharedMemory(233472, 232448)
B200 = SharedMemory(233472, 232448)

SHARED_MEMORY = {"sm_80": A100, "sm_90a": H100, "sm_100": B200}
"""By supported architecture."""

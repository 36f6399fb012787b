"""From settings to a backend. torch is imported only for a real model: the test backends start without it."""

from __future__ import annotations

from collections.abc import Callable

from runner_svc.backend import Backend
from runner_svc.settings import RunnerSettings

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0 to 1."""

_TEST_CONTEXT_LENGTH = 8192


class UnusableSettings(ValueError):
    """The settings can't be served on this machine; the text says what to change."""


def build_backend(settings: RunnerSettings, progress: Progress) -> Backend:
    """The backend that `settings` ask for, ready to compute.

    Raises UnusableSettings, ModelNotFound or UnsupportedModel, each with one sentence for the operator.
    """
    num_blocks = settings.kv_tokens // settings.block_size
    if num_blocks < 1:
        raise UnusableSettings(f"kv_tokens is {settings.kv_tokens}, less than one block of {settings.block_size}")
    if settings.max_step_tokens < settings.slots:
        raise UnusableSettings(
            f"max_step_tokens is {settings.max_step_tokens}, less than one for each of the {settings.slots} slots"
        )
    if settings.device == "hash":
        from runner_svc.hash_model import HashBackend

        return HashBackend(
            num_slots=settings.slots,
            block_size=settings.block_size,
            num_blocks=num_blocks,
            max_step_tokens=settings.max_step_tokens,
            vocab_size=settings.vocab_size,
            context_length=settings.context_length or _TEST_CONTEXT_LENGTH,
            eos_probability=settings.eos_probability,
            step_ms=settings.step_ms,
        )
    if settings.device == "null":
        from runner_svc.null_model import NullBackend

        return NullBackend(
            num_slots=settings.slots,
            block_size=settings.block_size,
            num_blocks=num_blocks,
            max_step_tokens=settings.max_step_tokens,
            vocab_size=settings.vocab_size,
            context_length=settings.context_length or _TEST_CONTEXT_LENGTH,
            step_ms=settings.step_ms,
        )
    return _torch_backend(settings, num_blocks, progress)


def _torch_backend(settings: RunnerSettings, num_blocks: int, progress: Progress) -> Backend:
    try:
        import torch

        from runner_svc.torch_backend import TorchBackend
    except ImportError as error:
        raise UnusableSettings(
            f"a model needs the extra 'runner' (pip install 'roster-serve[runner]'): {error}"
        ) from error
    if settings.device == "cuda":
        if not torch.cuda.is_available():
            raise UnusableSettings("device is 'cuda', but torch finds no GPU here: set device to 'cpu'")
        raise UnusableSettings("device is 'cuda', but this version computes on the CPU only: set device to 'cpu'")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    backend = TorchBackend.load(
        settings.model,
        cache_folder=settings.cache_dir,
        progress=progress,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        num_slots=settings.slots,
        max_step_tokens=settings.max_step_tokens,
    )
    if settings.context_length is not None:
        backend.model.context_length = min(settings.context_length, backend.model.context_length)
    return backend

"""Builds the backend for the settings and a device. Imports torch only for a real model, not for test backends."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from roster_common.link_protocol import GRAPH_DRAFTS
from roster_common.setting_sources import UnusableSettings
from runner_svc.interface.backend import Backend
from runner_svc.interface.progress import Progress
from runner_svc.interface.ranks import Communicator
from runner_svc.settings.drafter_names import EAGLE, MEDUSA, MODEL, draft_parts
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.device_choice import BrokenGpu
from runner_svc.startup.drafters import cpu_drafter, gpu_drafter, hash_drafter
from runner_svc.startup.kernel_cache import choose_kernel_cache

if TYPE_CHECKING:
    from runner_svc.gpu.loading import GpuOptions, MakeBackend

_TEST_CONTEXT_LENGTH = 8192

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a backend whose defaults depend on the kind of device."""

    slots: int
    max_step_tokens: int
    kv_tokens: int | None  # None: as many as fit into the GPU

    @classmethod
    def of(cls, settings: RunnerSettings, on_gpu: bool) -> Sizes:
        """Returns the settings' sizes with defaults filled in. Raises UnusableSettings if they are inconsistent."""
        defaults = cls(256, 8192, None) if on_gpu else cls(8, 512, 16384)
        sizes = cls(
            settings.slots or defaults.slots,
            settings.max_step_tokens or defaults.max_step_tokens,
            settings.kv_tokens or defaults.kv_tokens,
        )
        if sizes.kv_tokens is not None and sizes.kv_tokens < settings.block_size:
            raise UnusableSettings(
                f"kv_tokens is {sizes.kv_tokens}, less than one block: set it to at least {settings.block_size}"
            )
        if sizes.max_step_tokens < sizes.slots:
            raise UnusableSettings(
                f"max_step_tokens is {sizes.max_step_tokens}: set it to at least the number of slots, {sizes.slots}"
            )
        return sizes

    def num_blocks(self, block_size: int) -> int | None:
        """Returns the number of KV blocks; None: as many as fit into the GPU."""
        return self.kv_tokens // block_size if self.kv_tokens is not None else None


def build_backend(
    settings: RunnerSettings, device: str, progress: Progress, ranks: Communicator | None = None
) -> Backend:
    """Builds the backend for `settings` on a device of `choose_device`, ready to compute.

    `ranks`: with which others this process computes the model; None: alone. The group has not formed yet. Once it has,
    the caller calls `regroup` of a `Regrouping` backend.

    Raises UnusableSettings, ModelNotFound, UnsupportedModel or BrokenGpu, each with one sentence for the operator.
    """
    _refuse_deterministic(settings, device)
    if device == "cuda":
        return _gpu_backend(settings, progress, ranks)
    _refuse_fp8_cache(settings, device)
    if device == "cpu":
        try:
            return _cpu_backend(settings, progress, ranks)
        except MemoryError as error:
            raise UnusableSettings(
                "the machine's memory is full: use a smaller model, or lower slots, kv_tokens, max_step_tokens or "
                "context_length"
            ) from error
    _refuse_quantization(settings, device)
    if settings.draft and device == "null":
        raise UnusableSettings(
            f"draft is {settings.draft!r}, but the test backend 'null' verifies nothing: set draft to ''"
        )
    return _test_backend(settings, device, ranks)


def _test_backend(settings: RunnerSettings, device: str, ranks: Communicator | None) -> Backend:
    sizes = Sizes.of(settings, on_gpu=False)
    num_blocks = sizes.num_blocks(settings.block_size) or 1
    context_length = settings.context_length or _TEST_CONTEXT_LENGTH
    given = settings.test_backend
    if device == "hash":
        from runner_svc.backends.hash_backend import HashBackend
        from runner_svc.backends.hash_drafter import OracleDrafter
        from runner_svc.backends.poison import Poison

        oracle = (
            OracleDrafter(random.Random(0 if ranks else None), given.draft_wrong)
            if given.draft_wrong is not None
            else None
        )
        backend = HashBackend(
            num_slots=sizes.slots,
            block_size=settings.block_size,
            num_blocks=num_blocks,
            max_step_tokens=sizes.max_step_tokens,
            vocab_size=given.vocab_size,
            context_length=context_length,
            eos_probability=given.eos_probability,
            step_ms=given.step_ms,
            poison=Poison(given.poison_token, given.poison) if given.poison_token is not None else None,
            drafter=oracle,
            max_drafts=settings.max_drafts,
            ranks=ranks,
        )
        if oracle is not None:
            oracle.backend = backend
        elif (drafter := hash_drafter(settings, backend)) is not None:
            backend.draft_with(drafter, settings.max_drafts)
        return backend
    from runner_svc.backends.null_backend import NullBackend

    return NullBackend(
        num_slots=sizes.slots,
        block_size=settings.block_size,
        num_blocks=num_blocks,
        max_step_tokens=sizes.max_step_tokens,
        vocab_size=given.vocab_size,
        context_length=context_length,
        step_ms=given.step_ms,
    )


def _refuse_deterministic(settings: RunnerSettings, device: str) -> None:
    if settings.deterministic and device not in ("cpu", "cuda"):
        raise UnusableSettings(
            f"deterministic is true, but {device!r} is a test backend: set device to 'cpu' or 'cuda', or deterministic "
            "to false"
        )


def _refuse_fp8_cache(settings: RunnerSettings, device: str) -> None:
    if settings.kv_cache_dtype != "auto":
        raise UnusableSettings(
            f"kv_cache_dtype is {settings.kv_cache_dtype!r}, which requires a GPU, but the device is {device!r}: "
            "set kv_cache_dtype to 'auto'"
        )


def _refuse_quantization(settings: RunnerSettings, device: str) -> None:
    for name, value, off in (
        ("quantization", settings.quantization, "none"),
        ("quantize_head", settings.quantize_head, False),
    ):
        if value != off:
            raise UnusableSettings(
                f"{name} is {value!r}, but the test backend {device!r} has no weights: set {name} to {off!r}"
            )


def _cpu_backend(settings: RunnerSettings, progress: Progress, ranks: Communicator | None) -> Backend:
    import torch

    from runner_svc.backends.torch_backend import TorchBackend
    from runner_svc.weights.on_load import OnLoad

    if settings.weights == "random":
        raise UnusableSettings("weights is 'random', which requires a GPU: set weights to 'checkpoint'")
    sizes = Sizes.of(settings, on_gpu=False)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    backend = TorchBackend.load(
        settings.model,
        cache_folder=settings.cache_dir,
        progress=progress,
        num_blocks=sizes.num_blocks(settings.block_size) or 1,
        block_size=settings.block_size,
        num_slots=sizes.slots,
        max_step_tokens=sizes.max_step_tokens,
        decoder=settings.decoder,
        on_load=OnLoad(settings.quantization, settings.quantize_head),
        make_drafter=cpu_drafter(settings, progress),
        max_drafts=settings.max_drafts,
        deterministic=settings.deterministic,
        ranks=ranks,
    )
    if settings.context_length is not None:
        backend.model.context_length = min(settings.context_length, backend.model.context_length)
    return backend


def _gpu_backend(settings: RunnerSettings, progress: Progress, ranks: Communicator | None) -> Backend:
    import torch

    from runner_svc.cuda.module import LOADS
    from runner_svc.gpu.loading import load_cuda_backend
    from runner_svc.interface.pool_size import OutOfMemory
    from runner_svc.startup.gpu_probe import failure

    choose_kernel_cache(settings.cache_dir)
    options, make = _gpu_options(settings), _gpu_backend_kind(settings, progress, ranks)
    try:
        backend = load_cuda_backend(settings.model, settings.cache_dir, options, progress, make, ranks)
    except OutOfMemory as error:
        raise UnusableSettings(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise UnusableSettings(
            "the GPU's memory is full: use a smaller model, lower slots, kv_tokens, max_step_tokens or context_length, "
            "or end other programs that use the GPU"
        ) from error
    except _compile_errors() as error:
        raise UnusableSettings(
            f"CuPy can't compile the kernels ({_complaint(str(error))}): if CUDA's headers are missing, "
            "pip install 'cupy-cuda13x[ctk]', which brings them, or set device to 'cpu'"
        ) from error
    except Exception as error:
        obstacle = failure(error)
        if obstacle is None:
            raise
        told = f"while the model loads, {obstacle}"
        raise (BrokenGpu if obstacle.may_pass else UnusableSettings)(told) from error
    log.info("loaded the kernels", modules=LOADS.count, seconds=round(LOADS.seconds, 2))
    return backend


def _gpu_backend_kind(settings: RunnerSettings, progress: Progress, ranks: Communicator | None) -> MakeBackend:
    """Returns what makes the backend. Raises UnusableSettings for what a GPU can't draft."""
    from runner_svc.gpu.backend import CudaBackend

    if ranks is not None:
        from runner_svc.gpu.ranked.backend import RankedCudaBackend

        return RankedCudaBackend  # drafts are refused when it is loaded
    if not settings.draft:
        return CudaBackend
    kind, _ = draft_parts(settings.draft)
    from runner_svc.gpu.drafts.draft_options import DraftOptions
    from runner_svc.gpu.drafts.drafting_backend import DraftingCudaBackend

    if settings.max_drafts > GRAPH_DRAFTS[-1]:
        raise UnusableSettings(
            f"max_drafts is {settings.max_drafts}, but a GPU verifies at most {GRAPH_DRAFTS[-1]} tokens of a sequence "
            f"in a step: set max_drafts to {GRAPH_DRAFTS[-1]} or less"
        )
    drafts = DraftOptions(settings.draft, settings.max_drafts)
    if kind in (MODEL, MEDUSA, EAGLE):
        return gpu_drafter(settings, progress, drafts)
    return partial(DraftingCudaBackend, drafts=drafts)


def _gpu_options(settings: RunnerSettings) -> GpuOptions:
    import torch

    from runner_svc.gpu.loading import GpuOptions
    from runner_svc.weights.on_load import OnLoad

    sizes = Sizes.of(settings, on_gpu=True)
    return GpuOptions(
        dtype=None if settings.dtype == "auto" else getattr(torch, settings.dtype),
        random_weights=settings.weights == "random",
        num_slots=sizes.slots,
        block_size=settings.block_size,
        max_step_tokens=sizes.max_step_tokens,
        context_length=settings.context_length,
        num_blocks=sizes.num_blocks(settings.block_size),
        gpu_memory=settings.gpu_memory,
        fp8_cache=settings.kv_cache_dtype == "fp8_e4m3",
        shares_cache=bool(settings.move_listen),
        decoder=settings.decoder,
        timings=settings.timings,
        on_load=OnLoad(settings.quantization, settings.quantize_head),
        draft=settings.draft,
        max_drafts=settings.max_drafts if settings.draft else 0,
        deterministic=settings.deterministic,
        one_shot=settings.all_reduce == "one-shot",
    )


def _compile_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that CuPy raises for kernels that don't compile; () if CuPy was never imported."""
    compiler = sys.modules.get("cupy.cuda.compiler")
    return (compiler.CompileException,) if compiler is not None else ()


def _complaint(log: str) -> str:
    """Returns the first error in a compiler's log, which may start with warnings."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["no reason is given"]
    return next((line for line in lines if "error" in line), lines[0])

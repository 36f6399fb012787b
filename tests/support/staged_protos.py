"""The .proto files staged as `roster_protos/x.proto`, the name that buf and protobuf's descriptor pool use.

Does in Python what `make stage-protos` does.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def staged(folder: Path) -> Path:
    """Copies the files and buf's settings to the folder and returns it."""
    shutil.copytree(ROOT / "protos", folder / "roster_protos", ignore=shutil.ignore_patterns("*.py", "*.binpb"))
    shutil.copy(ROOT / "buf.yaml", folder)
    return folder

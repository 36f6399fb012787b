"""Where the CUDA sources are. No CUDA is imported here."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
# Known to be there: a folder that only happens to be called "kernels" is not taken.
_PROBE = "vector.cuh"


@cache
def kernel_folder() -> Path:
    """The folder of the .cu and .cuh files: inside the package in a wheel, beside it in a checkout."""
    for parent in (PACKAGE, PACKAGE.parent):
        if (parent / "kernels" / _PROBE).is_file():
            return parent / "kernels"
    raise FileNotFoundError(f"no folder of CUDA sources in {PACKAGE} or beside it: is the package installed whole?")


@cache
def headers_hash() -> str:
    """A hash over all headers, for caches of compiled kernels that look at the .cu file alone."""
    digest = hashlib.sha256()
    for header in sorted(kernel_folder().glob("*.cuh")):
        digest.update(header.name.encode() + b"\0" + header.read_bytes())
    return digest.hexdigest()[:16]

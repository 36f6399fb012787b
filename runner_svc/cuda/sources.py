"""Locates the CUDA sources. No CUDA is imported here."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
# A file that the folder must contain, so that an unrelated folder named "kernels" is not used.
_PROBE = "vector.cuh"


@cache
def kernel_folder() -> Path:
    """Returns the folder of the .cu and .cuh files: inside the package in a wheel, beside it in a checkout."""
    for parent in (PACKAGE, PACKAGE.parent):
        if (parent / "kernels" / _PROBE).is_file():
            return parent / "kernels"
    raise FileNotFoundError(f"no folder of CUDA sources in {PACKAGE} or beside it: reinstall the package")


@cache
def headers_hash() -> str:
    """Returns a hash of all headers, for caches of compiled kernels whose keys cover only the .cu file."""
    digest = hashlib.sha256()
    for header in sorted(kernel_folder().glob("*.cuh")):
        digest.update(header.name.encode() + b"\0" + header.read_bytes())
    return digest.hexdigest()[:16]

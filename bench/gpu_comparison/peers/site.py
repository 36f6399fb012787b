"""The folder with vLLM that `--peer-site` names, unpacked where it is an archive, and the environment of its process.

Unpacked sites and model folders stay under `WORK`: vLLM's compilation cache depends on their paths, so a second start
from the same paths takes less time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

WORK = Path(tempfile.gettempdir()) / "roster-peer"
ARCHIVE = "vllm_site.tar.xz"
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    # vLLM imports flashinfer for its sampler unless told not to; a slim site has no flashinfer.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    # Some machines have no NVLink multicast; one GPU does not need it.
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


class Unusable(ValueError):
    """Raised if the comparison can't be made; the message says what to do."""


def found_site(given: Path | None) -> Path:
    """Returns the given folder, which has vLLM or an archive of it. Raises Unusable."""
    if given is None:
        raise Unusable(f"--peer vllm needs --peer-site DIR: a folder with vLLM, or with its archive {ARCHIVE}.*")
    if (given / "vllm" / "__init__.py").is_file() or _pieces(given):
        return given.resolve()
    raise Unusable(f"--peer-site {given} has neither a package vllm nor an archive {ARCHIVE}.*: name a folder that has")


def unpacked_site(site: Path) -> Path:
    """Returns the folder to import vLLM from, into which an archive is unpacked once. Raises Unusable if broken."""
    pieces = _pieces(site)
    if not pieces:
        return site
    digest = hashlib.sha256()
    for piece in pieces:  # not its time, which copying between machines may change
        digest.update(piece.read_bytes())
    target = WORK / f"site-{digest.hexdigest()[:16]}"
    if not target.is_dir():
        WORK.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=WORK, prefix="partial-"))
        try:
            _unpack(pieces, partial)
            partial.rename(target)
        except (OSError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
            raise Unusable(f"the archive {pieces[0]} can't be unpacked ({error}): prepare it again") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    if not (target / "vllm" / "__init__.py").is_file():
        raise Unusable(f"the archive {pieces[0]} has no package vllm: prepare it again")
    return target


def version(site: Path) -> str:
    """Returns the site's vLLM version without importing it."""
    for found in importlib.metadata.distributions(name="vllm", path=[str(site)]):
        return found.version
    return "unknown"


def environment(site: Path) -> list[str]:
    """Returns the `env` command and its arguments under which the site's Python programs run.

    Only the site is on PYTHONPATH, since its libraries have other versions than Roster's.
    """
    paths = [str(site)]
    if (site / "_fallback").is_dir() and not _imports("numba"):
        paths.insert(0, str(site / "_fallback"))
    variables = {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    return ["env", "-C", str(WORK), *(f"{name}={value}" for name, value in variables.items())]


def _imports(module: str) -> bool:
    """Returns whether this Python imports the module; another process tries it, as numba loads much."""
    return not subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False).returncode


def _pieces(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{ARCHIVE}.[0-9][0-9]")) or sorted(folder.glob(ARCHIVE))


def _unpack(pieces: Sequence[Path], target: Path) -> None:
    with _Joined(pieces) as joined, tarfile.open(fileobj=joined, mode="r|xz") as archive:
        archive.extractall(target, filter="data")


class _Joined(io.RawIOBase):
    """The pieces as one stream."""

    def __init__(self, pieces: Sequence[Path]) -> None:
        self._left = list(pieces)
        self._file: IO[bytes] | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._file or self._left:
            if self._file is None:
                self._file = self._left.pop(0).open("rb")
            if count := self._file.readinto(buffer):  # type: ignore[attr-defined]
                return int(count)
            self._file.close()
            self._file = None
        return 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

"""What a deterministic backend on the CPU consists of, and what it refuses: see docs/determinism.md."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from roster_common.setting_sources import UnusableSettings
from runner_svc.arithmetic.canonical import CanonicalArithmetic
from runner_svc.arithmetic.check import check_functions
from runner_svc.arithmetic.instruction_set import PINNED
from runner_svc.attention.canonical import CanonicalAttention
from runner_svc.attention.canonical_check import checked_units
from runner_svc.attention.canonical_plan import SEGMENT
from runner_svc.decoder.rope import RotaryEmbedding
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.kv_cache import KVCache
from runner_svc.model.config import ModelConfig
from runner_svc.model.folder.checkpoint_files import checkpoint_files
from runner_svc.model.rope_config import RopeType

ORDER_VERSION = "cpu-1"
"""Raised with every change of the bits that this code computes; tests/runner_svc/backends/test_determinism.py."""
_CHUNK = 2**24


@dataclass(frozen=True, slots=True)
class Determinism:
    """The canonical arithmetic of one model; `arithmetic` must have made the decoder before `numerics` is asked for."""

    folder: Path
    config: ModelConfig
    arithmetic: CanonicalArithmetic

    @classmethod
    def of(cls, folder: Path, config: ModelConfig | None, formats: str, block_size: int) -> Determinism:
        """Returns that of a model of `folder`. `config` None: transformers computes it. `formats`: of its matrices.

        Raises UnusableSettings for what the promise does not hold for.
        """
        if reason := _refusal(config, formats, block_size):
            raise UnusableSettings(f"deterministic is true, but {reason}, or set deterministic to false")
        assert config is not None, "it is refused otherwise"
        return cls(folder, config, CanonicalArithmetic())

    def attention(self, cache: KVCache, layers: Sequence[AttentionLayer]) -> CanonicalAttention:
        """Returns the attention over a cache; `layers` are the decoder's. Raises UnusableSettings if a check fails."""
        rows, keys, _ = self._checked(cache.block_size)
        return CanonicalAttention(cache, self.config.num_heads, self.config.num_kv_heads, layers, rows, keys)

    def numerics(self) -> str:
        """Returns 32 hex digits of all that the bits depend on: Hello.numerics. Raises UnusableSettings like `of`."""
        digest = hashlib.blake2b(digest_size=16)
        size = self.config.shard.size
        ranks = [f"{size} ranks"] if size > 1 else []  # all on machines that are alike: each looks at its own
        for part in (ORDER_VERSION, *_libraries(), self.config.rope_fingerprint, *ranks):
            digest.update(part.encode() + b"\0")
        for path in (self.folder / "config.json", *checkpoint_files(self.folder)):
            _add_file(digest, path)
        digest.update(self.arithmetic.digest)
        digest.update(check_functions(self._widths()))
        digest.update(self._checked(SEGMENT)[2])
        digest.update(self._rotations())
        return digest.hexdigest()

    def _checked(self, block_size: int) -> tuple[int, int, bytes]:
        config = self.config
        return checked_units(config.num_heads, config.num_kv_heads, config.head_dim, block_size)

    def _widths(self) -> set[int]:
        config = self.config
        widths = {config.hidden_size, config.head_dim, config.vocab_size}
        if config.experts is not None:
            widths |= {config.experts.num_experts, config.experts.top_k}
        return widths

    def _rotations(self) -> bytes:
        positions = torch.arange(0, self.config.context_length, 37)
        ropes = [RotaryEmbedding(rope, torch.device("cpu")) for rope in self.config.ropes]
        return b"".join(rope.rotation(positions, positions).cos.numpy().tobytes() for rope in ropes)


def _refusal(config: ModelConfig | None, formats: str, block_size: int) -> str:
    """Returns why not and what to change, "" if nothing is in the way."""
    if config is None:
        return "transformers computes this model, whose bits depend on the batch: serve a model of Roster's own decoder"
    if formats:
        return (
            f"the weights are quantized ({formats}), which is not shown to be invariant yet: serve a plain checkpoint"
        )
    if any(rope.type is RopeType.DYNAMIC for rope in config.ropes):
        return "the model has dynamic RoPE, whose powers depend on the batch: serve another model"
    if SEGMENT % block_size:
        return f"block_size is {block_size}, which does not divide {SEGMENT}: set block_size to 16"
    if torch.get_float32_matmul_precision() != "highest":
        return "torch multiplies float32 in fewer bits: set its float32 matmul precision to 'highest'"
    if not instruction_set():
        return "the CPU has neither AVX2 nor AVX-512: use another machine"
    return ""


def instruction_set() -> str:
    """Returns the instruction set that torch uses, "AVX2" or "AVX512"; "" for another."""
    capability = torch.backends.cpu.get_cpu_capability()
    return capability if capability in ("AVX2", "AVX512") else ""


def _libraries() -> list[str]:
    """Returns the versions of torch, oneDNN and MKL, the instruction set in use, and what pins it."""
    built = re.findall(r"(?:MKL-DNN|Math Kernel Library)[^\n]*", torch.__config__.show())
    return [torch.__version__, instruction_set(), *built, *(f"{name}={os.environ.get(name, '')}" for name in PINNED)]


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            digest.update(data)

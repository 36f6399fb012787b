"""Parts of the comparison with a peer: a system under one load, with an estimate of its seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

ROSTER, TUNED, VLLM, VLLM_SMALL, TRANSFORMERS = "roster", "roster-tuned", "vllm", "vllm-1024", "transformers"
SAME_BITS, VLLM_SAME_BITS = "roster-deterministic", "vllm-invariant"
PEERS = (VLLM, VLLM_SMALL, VLLM_SAME_BITS)
DECODE, DECODE_WIDE, AT_ONCE, PADDED = "decode", "decode-wide", "at-once", "padded"
ONLINE = "online"
PADDED_REQUESTS = 96
"""Requests of `padded` without figures, three batches of 32."""
DECODE_ROWS = {DECODE: (1, 8, 64, 256), DECODE_WIDE: (512, 1024)}
"""Rows of each decode load."""
LOADS = {
    ROSTER: (DECODE, DECODE_WIDE, AT_ONCE, ONLINE),
    TUNED: (AT_ONCE, ONLINE),
    SAME_BITS: (AT_ONCE, ONLINE),
    VLLM: (DECODE, DECODE_WIDE, AT_ONCE, ONLINE),
    VLLM_SMALL: (AT_ONCE, ONLINE),
    VLLM_SAME_BITS: (DECODE, DECODE_WIDE, AT_ONCE, ONLINE),
    TRANSFORMERS: (PADDED,),
}
"""Loads of each system. Steps of 1,024 tokens admit prompts too slowly for the decode loads."""
SHAPE_LOADS = {
    "llama-3.1-8b": (
        "roster=decode,at-once,8:160,14:280,18:360",
        "vllm=decode,at-once,8:160,14:280,18:360",
        "vllm-1024=8:160,14:280,18:360",
    ),
    "qwen3-0.6b": (
        "roster=decode,at-once,30:600,55:1100",
        "vllm=decode,at-once,30:600,55:1100",
        "vllm-1024=at-once,30:600,55:1100",
    ),
    "qwen3-30b-a3b": ("roster=decode,at-once", "vllm=decode,at-once"),
    "llama-3.1-70b": ("roster=at-once", "vllm=decode,at-once"),
}
"""Default loads: 20 s of arrivals at each rate."""
_START_S = {
    "llama-3.1-8b": {ROSTER: 58.0, TUNED: 58.0, VLLM: 105.0, VLLM_SMALL: 90.0, TRANSFORMERS: 30.0},
    "qwen3-0.6b": {ROSTER: 42.0, TUNED: 42.0, VLLM: 105.0, VLLM_SMALL: 90.0, TRANSFORMERS: 25.0},
    "qwen3-30b-a3b": {ROSTER: 90.0, TUNED: 90.0, VLLM: 135.0, VLLM_SMALL: 120.0, TRANSFORMERS: 60.0},
    "llama-3.1-70b": {ROSTER: 150.0, TUNED: 150.0, VLLM: 200.0, VLLM_SMALL: 190.0, TRANSFORMERS: 200.0},
}
"""Seconds on an H200 until a system is warm; a second vLLM finds the compilation cache of the first. Those of 70B are
guesses."""
_LOAD_S = {
    "llama-3.1-8b": {DECODE: 22.0, DECODE_WIDE: 90.0, AT_ONCE: 31.0, ONLINE: 12.0, PADDED: 120.0},
    "qwen3-0.6b": {DECODE: 14.0, DECODE_WIDE: 35.0, AT_ONCE: 11.0, ONLINE: 9.0, PADDED: 80.0},
    "qwen3-30b-a3b": {DECODE: 22.0, DECODE_WIDE: 70.0, AT_ONCE: 29.0, ONLINE: 12.0, PADDED: 400.0},
    "llama-3.1-70b": {DECODE: 60.0, DECODE_WIDE: 200.0, AT_ONCE: 80.0, ONLINE: 12.0, PADDED: 900.0},
}
"""Seconds of a load on an H200; of an online load, those besides its arrivals; of `padded`, for `PADDED_REQUESTS`."""


@dataclass(frozen=True, slots=True)
class Part:
    """One system under one load."""

    system: str
    load: str
    """`decode`, `decode-wide`, `at-once`, RATE:COUNT (requests per second, requests) or padded:ROWS:COUNT."""

    @property
    def kind(self) -> str:
        """The load's name in `LOADS`."""
        name = self.load.split(":")[0]
        return name if name in (*DECODE_ROWS, AT_ONCE, PADDED) else ONLINE

    @property
    def rate(self) -> float:
        """Requests per second of an online load."""
        return float(self.load.split(":")[0])

    @property
    def count(self) -> int:
        """Requests of an online or padded load."""
        return int(self.load.split(":")[-1])

    @property
    def rows(self) -> int:
        """Rows of a padded batch."""
        return int(self.load.split(":")[1])

    @property
    def served(self) -> bool:
        """Whether a server answers the load. The others are measured by a process of their own."""
        return self.system != TRANSFORMERS and not (self.system == ROSTER and self.kind in DECODE_ROWS)

    @property
    def title(self) -> str:
        return f"{self.system}, {self.load}"


@dataclass(frozen=True, slots=True)
class Stage:
    """Parts that one start of a system serves."""

    system: str
    parts: tuple[Part, ...]


def parse_parts(text: str) -> list[Part]:
    """Parses `SYSTEM=LOAD,LOAD,...`. Raises ValueError for an unknown system or load."""
    system, _, loads = text.partition("=")
    if system not in LOADS or not loads:
        raise ValueError(
            f"{text!r} is no list of loads: write {ROSTER}={AT_ONCE},8:160; the systems are {', '.join(LOADS)}"
        )
    return [_part(system, load) for load in loads.split(",")]


def _part(system: str, load: str) -> Part:
    part = Part(system, f"{PADDED}:32:{PADDED_REQUESTS}" if load == PADDED else load)
    try:
        wrong = (part.kind == ONLINE and not part.rate > 0) or (":" in part.load and part.count < 1)
        wrong |= part.load.count(":") != {ONLINE: 1, PADDED: 2}.get(part.kind, 0)
        wrong |= part.kind == PADDED and part.rows < 1
    except ValueError:
        wrong = True
    if wrong:
        raise ValueError(
            f"{load!r} is no load: write {DECODE}, {DECODE_WIDE}, {AT_ONCE}, RATE:COUNT or {PADDED}:ROWS:COUNT"
        )
    if part.kind not in LOADS[system]:
        raise ValueError(f"{system} has no load {part.kind}: it has {', '.join(LOADS[system])}")
    return part


def stages(parts: Sequence[Part]) -> Iterator[Stage]:
    """Yields the parts by starts, in order; neighbours of one system share its server."""
    for (system, served), group in groupby(parts, key=lambda part: (part.system, part.served)):
        some = tuple(group)
        yield from [Stage(system, some)] if served else [Stage(system, (part,)) for part in some]


def start_s(shape: str, stage: Stage) -> float:
    """Returns the estimated seconds of a stage before its first load."""
    like = {SAME_BITS: ROSTER, VLLM_SAME_BITS: VLLM}.get(stage.system, stage.system)
    return _START_S[shape][like]


def load_s(shape: str, part: Part) -> float:
    """Returns the estimated seconds of a part on a system that is ready."""
    seconds = _LOAD_S[shape][part.kind]
    if part.kind == PADDED:
        return seconds * part.count / PADDED_REQUESTS
    return seconds + part.count / part.rate if part.kind == ONLINE else seconds

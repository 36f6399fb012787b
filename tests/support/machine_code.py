"""Machine code of a compiled kernel, and properties of it that otherwise only timing would show.

Needs the wheel nvidia-cuda-nvdisasm (in the `dev` extra). An instruction's control bits (high word, from bit 41): 4 of
stall, 1 of yield, 3 for the scoreboard that its result sets, 3 for its operands' scoreboard, 6 for the scoreboards that
it waits for (the layout of Volta and later: Jia et al., Dissecting the NVIDIA Volta GPU Architecture via
Microbenchmarking, 2018).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.nvrtc import toolkit_folder

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;.*/\* 0x[0-9a-f]{16} \*/")
_WORD = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
_NO_SCOREBOARD = 7


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; scoreboards are numbers from 0 to 5."""

    address: str
    text: str
    waits: frozenset[int]
    sets: int | None


def instructions(code: bytes) -> Iterator[Instruction]:
    """Yields a cubin's instructions, in order of address. Raises FileNotFoundError without nvdisasm."""
    folder = toolkit_folder()
    program = folder / "bin" / "nvdisasm" if folder is not None else Path("nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        run = subprocess.run([program, "-hex", "-c", file.name], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    for number, line in enumerate(lines):
        if match := _LINE.match(line):
            upper = _WORD.search(lines[number + 1])
            assert upper is not None, lines[number + 1]
            bits = int(upper[1], 16)
            waits = frozenset(board for board in range(6) if bits >> 52 >> board & 1)
            sets = bits >> 46 & 7
            yield Instruction(match[1], match[2], waits, None if sets == _NO_SCOREBOARD else sets)


def arrivals_before_loads_are_done(code: bytes) -> list[str]:
    """Returns the arrivals at barriers issued while loads from shared memory may be in flight, in order of address.

    A thread that waits for such a barrier may start an asynchronous copy that overwrites data still to be read.
    """
    under_way: dict[int, list[str]] = {}
    early = []
    for one in instructions(code):
        for board in one.waits:
            under_way.pop(board, None)
        if "MEMBAR" in one.text:
            under_way.clear()
        elif "SYNCS.ARRIVE" in one.text:
            early += [f"{one.address}: {one.text}, with {load}" for loads in under_way.values() for load in loads]
        elif re.match(r"(@!?U?P\d )?LDSM?\b", one.text) and one.sets is not None:
            under_way.setdefault(one.sets, []).append(f"{one.address}: {one.text}")
    return early

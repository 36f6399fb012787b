"""compute-sanitizer over the kernels' GPU tests: memcheck and racecheck, each group of kernels with its own tests.

    python -m bench.sanitizer [--tool racecheck] [--group products] [--jobs 8] [--budget 100] [--limit 200]
        [--output FILE.json]

The tool looks at the kernels of the group alone (`--kernel-name kne=NAME`; torch's would take hours). First a kernel
that is wrong on purpose must be reported, under a filter of the same form: a filter that fits nothing ends without an
error too. A group is clean if its tests pass, each run was summed up, and no sum has an error or a hazard. Ends with 1
otherwise, and shows what the tool has reported.

With `--budget` a run skips the tests that have not begun by then, and the verdict counts them; their order is random,
and the same each time. With `--limit` a run is ended, and proves nothing.

Several runs go on at once, each one process of pytest with ports of its own: under pytest-xdist (8 workers) the tool
let no test begin, on an H200 with 2025.3.1.

What is no proof: racecheck of that version is not known to follow tensor copies (TMA) and wgmma, and memcheck looks at
tensor copies from 2026.2 on; what those read and write is checked by the tests' poisoned memory alone. And timing
differs, so that the tests must also pass without the tool.

Torch's cache of memory is off, so that a tensor is an allocation and memcheck sees where it ends. In groups that
capture graphs it stays on, as plain cudaMalloc fails during a capture: there memcheck sees the ends of torch's blocks,
not of tensors. What such a group launches stands in a group without the cache too.

Run the tests once before, as kernels that are not compiled yet take longer under the tool.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

from bench.provenance import provenance, write_results

TOOLS = ("memcheck", "racecheck")
FAULT = "wrong_on_purpose"
"""The kernel of `bench.sanitizer_fault`."""
_NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_TESTS = Path("tests/gpu")
_TENSOR_COPIES = "--check-tensor-ops"
"""Tensor copies (TMA) are looked at by memcheck of 2026.2 and later, if it is asked to."""
_FIRST_PORT, _PORTS = 49152, 200
_SUM = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_PASSED = re.compile(r"(\d+) passed")
_SKIPPED = re.compile(r"(\d+) skipped")
_POLL_S = 0.2
_SHOWN = 4000
"""Characters of a run that is not clean."""


@dataclass(frozen=True, slots=True)
class Group:
    """Kernels by the names behind `__global__`, and the files of tests/gpu that launch them."""

    kernels: tuple[str, ...]
    files: tuple[str, ...]
    shards: int = 1
    """Runs that share the tests, of which there are more."""
    but_not: str = ""
    """Tests that are left out (pytest's -k): shapes that take minutes under the tools."""
    not_raced: str = ""
    """More that racecheck leaves out."""
    captures: bool = False
    """Tests allocate while they capture a graph: torch's cache of memory stays on."""

    def commands(self, tool: str, budget: float | None = None) -> list[list[str]]:
        """pytest, for each shard, with so many seconds."""
        files = [str(_TESTS / f"{file}.py") for file in self.files]
        names = [self.but_not, self.not_raced if tool == "racecheck" else ""]
        expression = " or ".join(name for name in names if name)
        left_out = ["-k", f"not ({expression})"] if expression else []
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "bench.sanitizer_shard", "-o", "timeout=0"]
        pytest += [] if budget is None else ["--budget", str(budget)]
        return [[*pytest, "--shard", f"{index}/{self.shards}", *files, *left_out] for index in range(self.shards)]


GROUPS = {
    "norm": Group(("add_rms_norm",), ("test_norm",)),
    "rope": Group(("rope_kv_write",), ("test_rope_kv",)),
    "gather": Group(("gather_inputs",), ("test_gather",)),
    "activation": Group(("activation_mul",), ("test_activation",)),
    "roster": Group(("copy_words", "scatter_segments"), ("test_roster_copies",)),
    "sampling": Group(("sample", "adjust_logits"), ("test_sampling", "test_masked_sampling"), shards=3),
    "gated": Group(("gated_product",), ("test_gated_product",), shards=2, but_not="14336"),
    "products": Group(
        ("skinny_product", "embed"),
        ("test_skinny_product",),
        shards=6,
        but_not="14336 or 28672",
        not_raced="a_chain_that_overlaps",  # some 550 launches: did not end in 150 s
    ),
    "backend": Group(
        ("sample", "adjust_logits", "gather_inputs", "copy_words", "scatter_segments"),
        ("test_held_rows", "test_cuda_backend"),
        shards=2,
        captures=True,
    ),
    "steps": Group(
        ("paged_decode", "paged_prefill_hopper", "skinny_product", "gated_product", "add_rms_norm", "rope_kv_write"),
        ("test_mixed_steps", "test_large_decode_ways"),
        shards=2,
        captures=True,
    ),
    "attention": Group(
        ("paged_decode", "paged_prefill_hopper", "paged_prefill"),
        ("test_attention",),
        shards=12,
        but_not="20000 or x4000",
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One command under a tool."""

    status: int
    """-9 where the limit of time ended it."""
    output: str
    """Of the command and the tool."""

    @property
    def sums(self) -> list[int]:
        """Errors of memcheck or hazards of racecheck, of each process that was summed up."""
        return [int(errors or hazards) for errors, hazards in _SUM.findall(self.output)]

    @property
    def tests_passed(self) -> int:
        return sum(int(count) for count in _PASSED.findall(self.output))

    @property
    def tests_skipped(self) -> int:
        return sum(int(count) for count in _SKIPPED.findall(self.output))

    @property
    def clean(self) -> bool:
        """Tests have run and passed under the tool, and it found nothing."""
        return not self.status and bool(self.sums) and not sum(self.sums) and self.tests_passed > 0

    def show(self) -> None:
        """What to look at where something is wrong: the first reports, and how the tests ended."""
        print(self.output[:_SHOWN], *(["...", self.output[-_SHOWN:]] if len(self.output) > _SHOWN else []), sep="\n")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tool said of a group."""

    tool: str
    group: str
    runs: int
    tests_passed: int
    tests_skipped: int
    """For want of time, most likely."""
    findings: int
    """Errors of memcheck, hazards of racecheck."""
    exit_statuses: list[int]
    clean: bool
    seconds: float
    """Until the last of its runs ended, from when the first group began."""


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """compute-sanitizer, and how it is started."""

    path: str
    limit_s: float | None = None
    """Of one run; what still goes on then is ended."""
    stopped: Event = field(default_factory=Event)
    """Set, it ends all that goes on."""

    @property
    def version(self) -> str:
        """As it says itself."""
        said = _said(self.path, "--version")
        return next((line for line in said.splitlines() if line.startswith("Version")), said.strip())

    def options(self, tool: str, kernels: Sequence[str], place: int) -> list[str]:
        """What stands before the command; `place` is another one for each run that goes on."""
        options = ["--tool", tool, "--target-processes", "all", "--port", str(_FIRST_PORT + _PORTS * place)]
        if tool == "memcheck" and _TENSOR_COPIES in _said(self.path, "--help"):
            options += [_TENSOR_COPIES, "yes"]
        return options + [word for name in kernels for word in ("--kernel-name", f"kne={name}")]

    def run(
        self, tool: str, kernels: Sequence[str], command: Sequence[str], place: int = 0, cached_memory: bool = False
    ) -> Run:
        """`command` under the tool."""
        environment = {name: value for name, value in os.environ.items() if name != _NO_CACHE}
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [self.path, *self.options(tool, kernels, place), *command],
                env=environment if cached_memory else environment | {_NO_CACHE: "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            deadline = time.monotonic() + (math.inf if self.limit_s is None else self.limit_s)
            while process.poll() is None:
                if self.stopped.wait(_POLL_S) or time.monotonic() > deadline:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            return Run(process.returncode, output.read().decode("utf-8", "replace"))

    def sees_faults(self, tool: str) -> bool:
        """Is a kernel that is wrong on purpose reported under a filter by name?"""
        run = self.run(tool, [FAULT], [sys.executable, "-m", "bench.sanitizer_fault", tool])
        if not sum(run.sums):
            run.show()
        return sum(run.sums) > 0


@cache
def _said(path: str, option: str) -> str:
    """What the tool says of itself: the same for every run."""
    return subprocess.run([path, option], capture_output=True, text=True, check=False).stdout


def find_sanitizer() -> str:
    """Path of compute-sanitizer. Raises FileNotFoundError with what to do."""
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/compute-sanitizer", "/usr/local/cuda/bin"]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if found is None:
        raise FileNotFoundError("compute-sanitizer isn't on the PATH: it comes with the CUDA toolkit")
    return found


def check(
    sanitizer: Sanitizer, tools: Sequence[str], groups: Sequence[str], jobs: int, budget: float | None = None
) -> Iterator[Verdict]:
    """Each group under each tool, so many runs at once. What is not good is printed as well."""
    places: SimpleQueue[int] = SimpleQueue()
    for place in range(jobs):
        places.put(place)

    def run(tool: str, group: Group, command: list[str]) -> Run:
        place = places.get()
        try:
            return sanitizer.run(tool, group.kernels, command, place, group.captures)
        finally:
            places.put(place)

    began, pool = time.monotonic(), ThreadPoolExecutor(jobs)
    pending: list[tuple[str, str, list[Future[Run]]]] = [
        (tool, name, [pool.submit(run, tool, GROUPS[name], command) for command in GROUPS[name].commands(tool, budget)])
        for tool in tools
        for name in groups
    ]
    try:
        for tool, name, futures in pending:
            yield verdict_of(tool, name, [future.result() for future in futures], began)
    except BaseException:  # Ctrl-C for one
        sanitizer.stopped.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def verdict_of(tool: str, group: str, runs: Sequence[Run], began: float) -> Verdict:
    """Of a group's runs; prints those that are not clean."""
    for run in runs:
        if not run.clean:
            run.show()
    return Verdict(
        tool,
        group,
        len(runs),
        sum(run.tests_passed for run in runs),
        sum(run.tests_skipped for run in runs),
        sum(sum(run.sums) for run in runs),
        [run.status for run in runs],
        all(run.clean for run in runs),
        round(time.monotonic() - began, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one")
    parser.add_argument("--group", choices=GROUPS, action="append", help="only these kernels; may be given again")
    parser.add_argument("--jobs", type=int, default=8, help="runs at once")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of one run; tests not begun then are skipped")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of one run, then it is ended")
    parser.add_argument("--output", type=Path, help="also write the verdicts there, as JSON")
    options = parser.parse_args()
    try:
        sanitizer = Sanitizer(find_sanitizer(), options.limit)
    except FileNotFoundError as error:
        sys.exit(str(error))
    print(sanitizer.version, flush=True)
    source = origin() if options.output is not None else None
    tools = options.tool or TOOLS
    seeing = [tool for tool in tools if sanitizer.sees_faults(tool)]
    for tool in set(tools) - set(seeing):
        print(f"{tool} does not report a kernel that is wrong on purpose: what it says of others means nothing")
    verdicts: list[Verdict] = []
    for verdict in check(sanitizer, seeing, options.group or list(GROUPS), options.jobs, options.budget):
        verdicts.append(verdict)
        print("clean" if verdict.clean else "NOT CLEAN", verdict, flush=True)
        if source is not None:  # each time, as the next group may be cut short
            known = {"sanitizer": sanitizer.version, "seeing": seeing, "verdicts": [asdict(each) for each in verdicts]}
            write_results(options.output, source, known)
    sys.exit(0 if verdicts and seeing == list(tools) and all(verdict.clean for verdict in verdicts) else 1)


def origin() -> dict[str, Any]:
    """What stands with the verdicts."""
    from bench.gpu_timing import card  # imports CuPy

    return provenance("bench.sanitizer", ["torch", "cupy"], card())


if __name__ == "__main__":
    main()

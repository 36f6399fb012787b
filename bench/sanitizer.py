"""compute-sanitizer over the kernels' GPU tests: memcheck and racecheck, each group of kernels with its own tests.

    python -m bench.sanitizer [--tool racecheck] [--group products] [--jobs 8] [--limit 120] [--output FILE.json]

The tool looks at the kernels of the group alone (`--kernel-name kne=NAME`; torch's would take hours), in every process
of pytest-xdist. First a kernel that is wrong on purpose must be reported, under a filter of the same form: a filter
that fits nothing ends without an error too. A group is clean if its tests pass, processes were summed up, and no sum
has an error or a hazard. Ends with 1 otherwise, and shows what the tool has reported.

What is no proof: neither tool is known to follow bulk copies (TMA) and wgmma, so what those read and write is checked
by the tests' poisoned memory alone; and timing differs, so that the tests must also pass without the tool.

Torch's cache of memory is off, so that a tensor is an allocation and memcheck sees where it ends. In groups that
capture graphs it stays on, as plain cudaMalloc fails during a capture: there memcheck sees the ends of torch's blocks,
not of tensors. What such a group launches stands in a group without the cache too.

Run the tests once before, as kernels that are not compiled yet take longer under the tool.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.provenance import provenance, write_results

TOOLS = ("memcheck", "racecheck")
FAULT = "wrong_on_purpose"
"""The kernel of `bench.sanitizer_fault`."""
_NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_TESTS = Path("tests/gpu")
_TENSOR_COPIES = "--check-tensor-ops"
"""Tensor copies (TMA) are looked at by memcheck of 2026.2 and later, if it is asked to."""
_SUM = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_PASSED = re.compile(r"(\d+) passed")
_SHOWN = 4000
"""Characters of a run that is not clean."""


@dataclass(frozen=True, slots=True)
class Group:
    """Kernels by the names behind `__global__`, and the files of tests/gpu that launch them."""

    kernels: tuple[str, ...]
    files: tuple[str, ...]
    but_not: str = ""
    """Tests that are left out (pytest's -k): shapes that take minutes under the tool."""
    captures: bool = False
    """Tests allocate while they capture a graph: torch's cache of memory stays on."""


GROUPS = {
    "norm": Group(("add_rms_norm",), ("test_norm",)),
    "rope": Group(("rope_kv_write",), ("test_rope_kv",)),
    "gather": Group(("gather_inputs",), ("test_gather",)),
    "activation": Group(("activation_mul",), ("test_activation",)),
    "sampling": Group(("sample", "adjust_logits"), ("test_sampling", "test_masked_sampling")),
    "roster": Group(("copy_words", "scatter_segments"), ("test_roster_copies",)),
    "backend": Group(
        ("sample", "adjust_logits", "gather_inputs", "copy_words", "scatter_segments"),
        ("test_held_rows", "test_cuda_backend"),
        captures=True,
    ),
    "gated": Group(("gated_product",), ("test_gated_product",), but_not="14336"),
    "products": Group(("skinny_product", "embed"), ("test_skinny_product",), but_not="14336 or 28672"),
    "attention": Group(("paged_decode", "paged_prefill_hopper", "paged_prefill"), ("test_attention",)),
}


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """compute-sanitizer, and how it is started."""

    path: str
    jobs: int = 8
    """Processes of pytest-xdist."""
    limit_s: float | None = None
    """Of one run; what still goes on then is ended."""

    @property
    def version(self) -> str:
        """As it says itself."""
        said = subprocess.run([self.path, "--version"], capture_output=True, text=True, check=False).stdout
        return next((line for line in said.splitlines() if line.startswith("Version")), said.strip())

    def options(self, tool: str, kernels: Sequence[str]) -> list[str]:
        """What stands before the command."""
        # Its ports are for 10 processes unless it is told: an eleventh would wait forever.
        options = ["--tool", tool, "--target-processes", "all", "--max-connections", str(2 * self.jobs + 8)]
        if tool == "memcheck":
            helped = subprocess.run([self.path, "--help"], capture_output=True, text=True, check=False).stdout
            options += [_TENSOR_COPIES, "yes"] if _TENSOR_COPIES in helped else []
        return options + [word for name in kernels for word in ("--kernel-name", f"kne={name}")]

    def run(self, tool: str, kernels: Sequence[str], command: Sequence[str], *, cached_memory: bool = False) -> Run:
        """`command` under the tool."""
        environment = {name: value for name, value in os.environ.items() if name != _NO_CACHE}
        with tempfile.TemporaryDirectory() as folder, open(f"{folder}/output", "w+b") as output:
            process = subprocess.Popen(
                [self.path, *self.options(tool, kernels), "--log-file", f"{folder}/%p.log", *command],
                env=environment if cached_memory else environment | {_NO_CACHE: "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                pass
            finally:  # after Ctrl-C too
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            said = output.read().decode("utf-8", "replace")
            reports = "".join(path.read_text("utf-8", "replace") for path in Path(folder).glob("*.log"))
        return Run(process.returncode, said, reports)


@dataclass(frozen=True, slots=True)
class Run:
    """One command under a tool."""

    status: int
    output: str
    """Of the command."""
    reports: str
    """Of the tool."""

    @property
    def sums(self) -> list[int]:
        """Errors of memcheck or hazards of racecheck, of each process that was summed up."""
        return [int(errors or hazards) for errors, hazards in _SUM.findall(self.reports)]

    @property
    def tests_passed(self) -> int:
        return sum(int(count) for count in _PASSED.findall(self.output))

    def show(self) -> None:
        """What to look at where something is wrong."""
        print(self.output[-_SHOWN:], self.reports[:_SHOWN], sep="\n", flush=True)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tool said of one run."""

    tool: str
    group: str
    tests_passed: int
    processes: int
    """Processes that the tool has summed up."""
    findings: int
    """Errors of memcheck, hazards of racecheck."""
    exit_status: int
    """-9 where the limit of time ended it."""
    seconds: float

    @property
    def clean(self) -> bool:
        """Tests have run and passed under the tool, and it found nothing."""
        return not self.exit_status and not self.findings and self.tests_passed > 0 and self.processes > 0


def find_sanitizer() -> str:
    """Path of compute-sanitizer. Raises FileNotFoundError with what to do."""
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/compute-sanitizer", "/usr/local/cuda/bin"]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if found is None:
        raise FileNotFoundError("compute-sanitizer isn't on the PATH: it comes with the CUDA toolkit")
    return found


def check_group(sanitizer: Sanitizer, tool: str, name: str) -> Verdict:
    """The group's tests under the tool; what it and pytest said is printed where that is not good."""
    group, began = GROUPS[name], time.monotonic()
    files = [str(_TESTS / f"{file}.py") for file in group.files]
    left_out = ["-k", f"not ({group.but_not})"] if group.but_not else []
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(sanitizer.jobs), *files, *left_out]
    run = sanitizer.run(tool, group.kernels, command, cached_memory=group.captures)
    seconds = round(time.monotonic() - began, 1)
    verdict = Verdict(tool, name, run.tests_passed, len(run.sums), sum(run.sums), run.status, seconds)
    if not verdict.clean:
        run.show()
    return verdict


def sees_faults(sanitizer: Sanitizer, tool: str) -> bool:
    """Is a kernel that is wrong on purpose reported under a filter by name?"""
    run = sanitizer.run(tool, [FAULT], [sys.executable, "-m", "bench.sanitizer_fault", tool])
    if not sum(run.sums):
        run.show()
    return sum(run.sums) > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one")
    parser.add_argument("--group", choices=GROUPS, action="append", help="only these kernels; may be given again")
    parser.add_argument("--jobs", type=int, default=8, help="processes of pytest-xdist")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of one group under one tool, then it is ended")
    parser.add_argument("--output", type=Path, help="also write the verdicts there, as JSON")
    options = parser.parse_args()
    try:
        sanitizer = Sanitizer(find_sanitizer(), options.jobs, options.limit)
    except FileNotFoundError as error:
        sys.exit(str(error))
    print(sanitizer.version, flush=True)
    source = origin() if options.output is not None else None
    verdicts: list[Verdict] = []
    blind: list[str] = []
    for tool in options.tool or TOOLS:
        if not sees_faults(sanitizer, tool):
            blind.append(tool)
            print(f"{tool} does not report a kernel that is wrong on purpose: what it says of others means nothing")
            continue
        for name in options.group or GROUPS:
            verdict = check_group(sanitizer, tool, name)
            verdicts.append(verdict)
            print("clean" if verdict.clean else "NOT CLEAN", verdict, flush=True)
            if source is not None:  # each time, as the next group may be cut short
                numbers = {
                    "sanitizer": sanitizer.version,
                    "blind": blind,
                    "verdicts": [asdict(one) for one in verdicts],
                }
                write_results(options.output, source, numbers)
    sys.exit(1 if blind or not verdicts or not all(verdict.clean for verdict in verdicts) else 0)


def origin() -> dict[str, Any]:
    """What stands with the verdicts."""
    from bench.gpu_timing import card  # imports CuPy

    return provenance("bench.sanitizer", ["torch", "cupy"], card())


if __name__ == "__main__":
    main()

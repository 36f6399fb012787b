"""compute-sanitizer over the kernels' GPU tests: memcheck and racecheck, each group of kernels with its own tests.

    python -m bench.sanitizer [--tool racecheck] [--group products] [--jobs 8] [--output FILE.json]

The tool looks at the kernels of the group alone (`--kernel-name kne=NAME`; torch's would take hours), in every process
of pytest-xdist. First a kernel that is wrong on purpose must be reported, under a filter of the same form: a filter
that fits nothing ends without an error too. A group is clean if its tests pass, processes were summed up, and no sum
has an error or a hazard. Ends with 1 otherwise.

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.provenance import provenance, write_results

TOOLS = ("memcheck", "racecheck")
FAULT = "wrong_on_purpose"
"""The kernel of `bench.sanitizer_fault`."""
_NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_TESTS = Path("tests/gpu")
_SUM = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_PASSED = re.compile(r"(\d+) passed")


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
    "attention": Group(("paged_decode", "paged_prefill_hopper", "paged_prefill"), ("test_attention",)),
    "products": Group(("skinny_product", "embed"), ("test_skinny_product",), but_not="14336 or 28672"),
    "gated": Group(("gated_product",), ("test_gated_product",), but_not="14336"),
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
}


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


def sanitize(
    sanitizer: str, tool: str, kernels: Sequence[str], command: Sequence[str], *, cached_memory: bool = False
) -> tuple[int, str, list[int]]:
    """Runs `command` under the tool: its exit status, its output, and the findings of each process."""
    environment = {name: value for name, value in os.environ.items() if name != _NO_CACHE}
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [
                *(sanitizer, "--tool", tool, "--target-processes", "all"),
                *(word for name in kernels for word in ("--kernel-name", f"kne={name}")),
                *("--log-file", f"{folder}/%p.log", *command),
            ],
            env=environment if cached_memory else environment | {_NO_CACHE: "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        logs = "".join(path.read_text("utf-8", "replace") for path in Path(folder).iterdir())
    return run.returncode, run.stdout, [int(errors or hazards) for errors, hazards in _SUM.findall(logs)]


def check_group(sanitizer: str, tool: str, name: str, jobs: int) -> Verdict:
    """The group's tests under the tool; what pytest said is printed where they failed."""
    group, began = GROUPS[name], time.monotonic()
    files = [str(_TESTS / f"{file}.py") for file in group.files]
    left_out = ["-k", f"not ({group.but_not})"] if group.but_not else []
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), *files, *left_out]
    status, output, sums = sanitize(sanitizer, tool, group.kernels, command, cached_memory=group.captures)
    passed = sum(int(count) for count in _PASSED.findall(output))
    if status or not passed:
        print(output[-4000:])
    return Verdict(tool, name, passed, len(sums), sum(sums), status, round(time.monotonic() - began, 1))


def sees_faults(sanitizer: str, tool: str) -> bool:
    """Is a kernel that is wrong on purpose reported under a filter by name?"""
    _, output, sums = sanitize(sanitizer, tool, [FAULT], [sys.executable, "-m", "bench.sanitizer_fault", tool])
    if not sum(sums):
        print(output[-4000:])
    return sum(sums) > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one")
    parser.add_argument("--group", choices=GROUPS, action="append", help="only these kernels; may be given again")
    parser.add_argument("--jobs", type=int, default=8, help="processes of pytest-xdist")
    parser.add_argument("--output", type=Path, help="also write the verdicts there, as JSON")
    options = parser.parse_args()
    try:
        sanitizer = find_sanitizer()
    except FileNotFoundError as error:
        sys.exit(str(error))
    verdicts, blind = [], []
    for tool in options.tool or TOOLS:
        if not sees_faults(sanitizer, tool):
            blind.append(tool)
            print(f"{tool} does not report a kernel that is wrong on purpose: what it says of others means nothing")
            continue
        for name in options.group or GROUPS:
            verdict = check_group(sanitizer, tool, name, options.jobs)
            verdicts.append(verdict)
            print("clean" if verdict.clean else "NOT CLEAN", verdict, flush=True)
    if options.output is not None:
        from bench.gpu_timing import card  # imports CuPy

        source = provenance("bench.sanitizer", ["torch", "cupy"], card())
        write_results(options.output, source, {"blind": blind, "verdicts": [asdict(one) for one in verdicts]})
    sys.exit(1 if blind or not verdicts or not all(verdict.clean for verdict in verdicts) else 0)


if __name__ == "__main__":
    main()

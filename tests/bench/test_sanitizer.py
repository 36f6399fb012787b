"""`python -m bench.sanitizer` with an imitation of compute-sanitizer: its filters, and which runs count as clean."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.sanitizer import __main__ as program
from bench.sanitizer.groups import GROUPS
from bench.sanitizer.tool import FAULT, Sanitizer, find_sanitizer
from bench.sanitizer.verdict import Verdict, check
from tests.support.documented_commands import ROOT

IMITATION = """#!{python}
import json, os, pathlib, sys, time
arguments = sys.argv[1:]
plan = json.loads(pathlib.Path({plan!r}).read_text())
if arguments[0] in ("--version", "--help"):
    print("NVIDIA (R) Compute Sanitizer\\nVersion 2026.4.0.0" if arguments[0] == "--version" else plan["help"])
    sys.exit()
uncached = "uncached " + os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "")
is_fault = "bench.sanitizer.fault" in arguments
with pathlib.Path({calls!r}).open("a") as calls:
    calls.write(json.dumps(arguments + [uncached]) + "\\n")
print("========= COMPUTE-SANITIZER", plan["output"], sep="\\n", flush=True)
time.sleep(plan["seconds"])
for line in plan["fault" if is_fault else "tests"]:
    print("=========", line)
sys.exit(plan["status"])
"""
CLEAN = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
HAZARDS = "RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warnings)"
ERRORS = "ERROR SUMMARY: 64 errors"


class Imitation:
    """Imitation of the tool: prints a given output and records its calls."""

    def __init__(self, folder: Path) -> None:
        self.path, self._plan, self._calls = (folder / name for name in ("compute-sanitizer", "plan", "calls"))
        names = {"python": sys.executable, "plan": str(self._plan), "calls": str(self._calls)}
        self.path.write_text(IMITATION.format(**names))
        self.path.chmod(0o755)

    def says(self, tests: list[str], fault: list[str] | None = None, **others: object) -> Sanitizer:
        """Sets the outputs of the tests' runs and of the fault's; runs are limited to 5 seconds."""
        usual = {"output": "7 passed in 1s", "status": 0, "seconds": 0, "help": ""}
        fault = [HAZARDS] if fault is None else fault
        self._plan.write_text(json.dumps(usual | {"tests": tests, "fault": fault, **others}))
        return Sanitizer(str(self.path), limit_s=5.0)

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()]


@pytest.fixture
def imitation(tmp_path: Path) -> Imitation:
    return Imitation(tmp_path)


def checked(sanitizer: Sanitizer, tool: str, group: str, jobs: int = 2) -> Verdict:
    (verdict,) = check(sanitizer, [tool], [group], jobs)
    return verdict


def test_every_kernel_is_looked_at() -> None:
    """A filter that matches no kernel checks nothing and succeeds, so the names must be those of the kernels."""
    sources = [path.read_text("utf-8") for path in (ROOT / "kernels").glob("*.cu")]
    kernels = [re.findall(r'extern "C" __global__[^;{]*?(\w+)\(\n', source) for source in sources]
    assert all(kernels)
    named = [name for group in GROUPS.values() for name in group.kernels]
    assert set(named) == {name for found in kernels for name in found}
    uncached = {name for group in GROUPS.values() if not group.captures for name in group.kernels}
    assert uncached == set(named)  # each is also launched where memcheck sees the ends of tensors
    files = [file for group in GROUPS.values() for file in group.files]
    assert len(set(files)) == len(files)
    assert sorted(files) == sorted(path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    assert FAULT in (ROOT / "bench" / "sanitizer" / "fault.py").read_text("utf-8")


def test_a_group_runs_its_tests_and_looks_at_its_kernels(imitation: Imitation) -> None:
    verdict = checked(imitation.says([CLEAN]), "racecheck", "gated")
    assert verdict.clean and (verdict.runs, verdict.tests_passed) == (2, 14)
    commands = sorted((" ".join(words) for words in imitation.calls), key=lambda command: "0/2" not in command)
    for index, command in enumerate(commands):
        assert "--tool racecheck --target-processes all" in command and "--check-tensor-ops" not in command
        assert "--kernel-name kne=gated_product" in command
        rest = f"-o timeout=0 --shard {index}/2 tests/gpu/test_gated_product.py -k not (14336)"
        assert f"-m pytest -q -p bench.sanitizer.shard {rest}" in command
    for tool, left_out in (("memcheck", "14336 or 28672"), ("racecheck", "14336 or 28672 or a_chain_that_overlaps")):
        checked(imitation.says([CLEAN]), tool, "products")
        assert f"-k not ({left_out})" in " ".join(imitation.calls[-1])
    checked(imitation.says([CLEAN]), "racecheck", "roster")
    assert "--kernel-name kne=copy_words --kernel-name kne=scatter_segments" in " ".join(imitation.calls[-1])


def test_runs_at_once_have_ports_of_their_own(imitation: Imitation) -> None:
    """There are at most `jobs` of them, and each test is in exactly one."""
    checked(imitation.says([CLEAN], seconds=0.3), "racecheck", "attention", jobs=3)
    ports = [int(words[words.index("--port") + 1]) for words in imitation.calls]
    assert len(ports) == GROUPS["attention"].shards and len(set(ports)) == 3
    for other in set(ports) - {min(ports)}:
        assert other - min(ports) >= 100


def test_shards_share_the_tests() -> None:
    def collected(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "bench.sanitizer.shard", *arguments]
        run = subprocess.run([*command, __file__], capture_output=True, text=True, check=True, cwd=ROOT)
        return [line for line in run.stdout.splitlines() if "::" in line]

    shards = [collected("--shard", f"{index}/3") for index in range(3)]
    assert sorted(test for shard in shards for test in shard) == sorted(collected())
    assert len({len(shard) for shard in shards}) <= 2


def test_tests_that_have_not_begun_in_time_are_skipped(imitation: Imitation) -> None:
    """They are also counted; those that have begun continue."""
    command = next(command for command in GROUPS["norm"].commands("memcheck", 0.0))
    command = [word for word in command if not word.startswith("tests/")]
    run = subprocess.run([*command, __file__], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "skipped" in run.stdout and "passed" not in run.stdout
    command[command.index("--budget") + 1] = "60"
    one = f"{__file__}::{test_without_the_tool_it_says_where_it_comes_from.__name__}"
    assert "1 passed" in subprocess.run([*command, one], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    verdict = checked(imitation.says([CLEAN], output="3 passed, 4 skipped in 1s"), "racecheck", "norm")
    assert verdict.clean and (verdict.tests_passed, verdict.tests_skipped) == (3, 4)


def test_memcheck_looks_at_tensor_copies_where_it_can(imitation: Imitation) -> None:
    sanitizer = imitation.says([CLEAN], help="  --check-tensor-ops arg (=no)   Enables checks")
    assert sanitizer.version == "Version 2026.4.0.0"
    for tool in ("memcheck", "racecheck"):
        checked(sanitizer, tool, "norm")
    assert ["--check-tensor-ops yes" in " ".join(words) for words in imitation.calls] == [True, False]


def test_what_goes_on_for_too_long_is_ended(imitation: Imitation, capfd: pytest.CaptureFixture[str]) -> None:
    """The output until then is printed."""
    slow = replace(imitation.says([CLEAN], output="..... half of it", seconds=60), limit_s=2.0)
    verdict = checked(slow, "racecheck", "norm")
    assert not verdict.clean and verdict.exit_statuses == [-9] and 2 <= verdict.seconds < 30
    assert "half of it" in capfd.readouterr().out


def test_an_interrupt_leaves_nothing_running(imitation: Imitation) -> None:
    sanitizer = replace(imitation.says([CLEAN], seconds=60), limit_s=None)
    sanitizer.stopped.set()
    assert checked(sanitizer, "racecheck", "norm").exit_statuses == [-9]


def test_what_the_tool_found_is_shown(imitation: Imitation, capfd: pytest.CaptureFixture[str]) -> None:
    assert not checked(imitation.says([HAZARDS]), "racecheck", "norm").clean
    assert HAZARDS in capfd.readouterr().out


def test_memory_is_cached_where_a_capture_allocates(imitation: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of backends and whole steps capture graphs, and plain cudaMalloc fails in a capture."""
    folder = ROOT / "tests" / "gpu"
    for group in GROUPS.values():
        for file in group.files:
            source = (folder / f"{file}.py").read_text("utf-8")
            captures = any(name in source for name in ("gpu_backends", "import CudaSteps", "load_cuda_backend("))
            assert captures == group.captures, file
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # as a manual command may have left it
    for name in ("backend", "roster"):
        checked(imitation.says([CLEAN]), "memcheck", name)
    cached = {next(word for word in words if word.startswith("tests/")): words[-1] for words in imitation.calls}
    assert cached == {"tests/gpu/test_masked_rows.py": "uncached ", "tests/gpu/test_slot_copies.py": "uncached 1"}


@pytest.mark.parametrize(
    ("tests", "output", "status"),
    [
        ([CLEAN, HAZARDS], "7 passed", 0),
        ([ERRORS], "7 passed", 0),
        ([], "7 passed", 0),  # the tool has not checked any process
        ([CLEAN], "7 skipped", 0),
        ([CLEAN], "1 failed, 6 passed", 1),
    ],
)
def test_what_is_not_clean(imitation: Imitation, tests: list[str], output: str, status: int) -> None:
    assert not checked(imitation.says(tests, output=output, status=status), "racecheck", "norm").clean


def test_a_tool_that_sees_nothing_is_not_believed(imitation: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert imitation.says([CLEAN], [ERRORS]).sees_faults("memcheck")
    assert f"kne={FAULT}" in imitation.calls[-1] and "uncached 1" in imitation.calls[-1]
    assert not imitation.says([CLEAN], [CLEAN]).sees_faults("racecheck")
    assert ended(monkeypatch, imitation.says([CLEAN], [CLEAN])) == 1
    assert ended(monkeypatch, imitation.says([CLEAN])) == 0
    assert ended(monkeypatch, imitation.says([HAZARDS])) == 1


def ended(monkeypatch: pytest.MonkeyPatch, imitation: Sanitizer) -> object:
    """Returns the exit status of `main`."""
    monkeypatch.setattr(program, "find_sanitizer", lambda: imitation.path)
    monkeypatch.setattr(sys, "argv", ["sanitizer", "--tool", "racecheck", "--group", "norm"])
    with pytest.raises(SystemExit) as end:
        program.main()
    return end.value.code


def test_without_the_tool_it_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    with pytest.raises(FileNotFoundError, match="CUDA toolkit"):
        find_sanitizer()

"""`python -m bench.sanitizer` with an imitation of compute-sanitizer: its filters, and what it calls clean."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import sanitizer
from bench.sanitizer import FAULT, GROUPS, Sanitizer, check_group, find_sanitizer, sees_faults
from tests.support.documented_commands import ROOT

IMITATION = """#!{python}
import json, os, pathlib, sys, time
arguments = sys.argv[1:]
plan = json.loads(pathlib.Path({plan!r}).read_text())
if arguments[0] in ("--version", "--help"):
    print("NVIDIA (R) Compute Sanitizer\\nVersion 2026.4.0.0" if arguments[0] == "--version" else plan["help"])
    sys.exit()
uncached = "uncached " + os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "")
kind = "fault" if "bench.sanitizer_fault" in arguments else "tests"
pathlib.Path({calls!r}).open("a").write(json.dumps(arguments + [uncached]) + "\\n")
log = arguments[arguments.index("--log-file") + 1]
for number, line in enumerate(plan[kind]):
    pathlib.Path(log.replace("%p", str(number))).write_text("========= COMPUTE-SANITIZER\\n========= " + line + "\\n")
print(plan["output"], flush=True)
time.sleep(plan["seconds"])
sys.exit(plan["status"])
"""
CLEAN = "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
HAZARDS = "RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warnings)"
ERRORS = "ERROR SUMMARY: 64 errors"


class Imitation:
    """Says what it is told to say, and writes down how it was called."""

    def __init__(self, folder: Path) -> None:
        self.path, self._plan, self._calls = (folder / name for name in ("compute-sanitizer", "plan", "calls"))
        names = {"python": sys.executable, "plan": str(self._plan), "calls": str(self._calls)}
        self.path.write_text(IMITATION.format(**names))
        self.path.chmod(0o755)

    def says(self, tests: list[str], fault: list[str] | None = None, **others: object) -> Sanitizer:
        """For 2 processes; it has 2 seconds."""
        usual = {"output": "7 passed in 1s", "status": 0, "seconds": 0, "help": ""}
        fault = [HAZARDS] if fault is None else fault
        self._plan.write_text(json.dumps(usual | {"tests": tests, "fault": fault, **others}))
        return Sanitizer(str(self.path), jobs=2, limit_s=2.0)

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self._calls.read_text().splitlines()]


@pytest.fixture
def imitation(tmp_path: Path) -> Imitation:
    return Imitation(tmp_path)


def test_every_kernel_is_looked_at() -> None:
    """A filter that fits no kernel looks at nothing and ends well, so the names must be the kernels' own."""
    sources = [path.read_text("utf-8") for path in (ROOT / "kernels").glob("*.cu")]
    kernels = [re.search(r'extern "C" __global__[^;{]*?(\w+)\(\n', source) for source in sources]
    named = [name for group in GROUPS.values() for name in group.kernels]
    assert set(named) == {kernel[1] for kernel in kernels if kernel}
    assert len(set(named)) == len(sources)
    uncached = {name for group in GROUPS.values() if not group.captures for name in group.kernels}
    assert uncached == set(named)  # each is launched where memcheck sees the ends of tensors
    files = [file for group in GROUPS.values() for file in group.files]
    assert len(set(files)) == len(files)
    assert [file for file in files if not (ROOT / "tests" / "gpu" / f"{file}.py").exists()] == []
    assert FAULT in (ROOT / "bench" / "sanitizer_fault.py").read_text("utf-8")


def test_a_group_runs_its_tests_and_looks_at_its_kernels(imitation: Imitation) -> None:
    verdict = check_group(imitation.says([CLEAN, CLEAN]), "racecheck", "products")
    assert verdict.clean and (verdict.processes, verdict.tests_passed) == (2, 7)
    (words,) = imitation.calls
    command = " ".join(words)
    assert "--tool racecheck --target-processes all" in command and "--check-tensor-ops" not in command
    assert "--kernel-name kne=skinny_product --kernel-name kne=embed" in command
    assert "-m pytest -q -n 2 tests/gpu/test_skinny_product.py -k not (14336 or 28672)" in command


def test_each_process_can_reach_the_tool(imitation: Imitation) -> None:
    """It has ports for 10 unless it is told, and the others would wait for one forever."""
    check_group(replace(imitation.says([CLEAN]), jobs=14), "racecheck", "norm")
    (words,) = imitation.calls
    assert int(words[words.index("--max-connections") + 1]) > 14


def test_memcheck_looks_at_tensor_copies_where_it_can(imitation: Imitation) -> None:
    sanitizer = imitation.says([CLEAN], help="  --check-tensor-ops arg (=no)   Enables checks")
    assert sanitizer.version == "Version 2026.4.0.0"
    for tool in ("memcheck", "racecheck"):
        check_group(sanitizer, tool, "attention")
    assert ["--check-tensor-ops yes" in " ".join(words) for words in imitation.calls] == [True, False]


def test_what_goes_on_for_too_long_is_ended(imitation: Imitation, capfd: pytest.CaptureFixture[str]) -> None:
    """With what had been said by then."""
    verdict = check_group(imitation.says([CLEAN], output="..... half of it", seconds=60), "racecheck", "norm")
    assert not verdict.clean and verdict.exit_status == -9 and 2 <= verdict.seconds < 30
    assert "half of it" in capfd.readouterr().out


def test_what_the_tool_found_is_shown(imitation: Imitation, capfd: pytest.CaptureFixture[str]) -> None:
    assert not check_group(imitation.says([HAZARDS]), "racecheck", "norm").clean
    assert HAZARDS in capfd.readouterr().out


def test_memory_is_cached_where_a_capture_allocates(imitation: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend captures its decode when it is made, and plain cudaMalloc fails in a capture."""
    folder = ROOT / "tests" / "gpu"
    for group in GROUPS.values():
        for file in group.files:
            makes_a_backend = "gpu_backends import" in (folder / f"{file}.py").read_text("utf-8")
            assert makes_a_backend == group.captures, file
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # as a command by hand may have left it
    for name in ("backend", "roster"):
        check_group(imitation.says([CLEAN]), "memcheck", name)
    assert [words[-1] for words in imitation.calls] == ["uncached ", "uncached 1"]


@pytest.mark.parametrize(
    ("tests", "output", "status"),
    [
        ([CLEAN, HAZARDS], "7 passed", 0),
        ([ERRORS], "7 passed", 0),
        ([], "7 passed", 0),  # the tool has not looked at any process
        ([CLEAN], "7 skipped", 0),
        ([CLEAN], "1 failed, 6 passed", 1),
    ],
)
def test_what_is_not_clean(imitation: Imitation, tests: list[str], output: str, status: int) -> None:
    assert not check_group(imitation.says(tests, output=output, status=status), "racecheck", "norm").clean


def test_a_tool_that_sees_nothing_is_not_believed(imitation: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sees_faults(imitation.says([CLEAN], [ERRORS]), "memcheck")
    assert f"kne={FAULT}" in imitation.calls[-1] and "uncached 1" in imitation.calls[-1]
    assert not sees_faults(imitation.says([CLEAN], [CLEAN]), "racecheck")
    assert ended(monkeypatch, imitation.says([CLEAN], [CLEAN])) == 1
    assert ended(monkeypatch, imitation.says([CLEAN])) == 0
    assert ended(monkeypatch, imitation.says([HAZARDS])) == 1


def ended(monkeypatch: pytest.MonkeyPatch, imitation: Sanitizer) -> object:
    """What `main` exits with."""
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: imitation.path)
    monkeypatch.setattr(sys, "argv", ["sanitizer", "--tool", "racecheck", "--group", "norm"])
    with pytest.raises(SystemExit) as end:
        sanitizer.main()
    return end.value.code


def test_without_the_tool_it_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    with pytest.raises(FileNotFoundError, match="CUDA toolkit"):
        find_sanitizer()

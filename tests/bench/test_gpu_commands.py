"""Benchmarks without a GPU and CuPy: all print their help, and one that needs a GPU exits with a message."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from roster_client.bench.runs.provenance import commit
from tests.support.fake_gpu import NO_DRIVER, FakeGpu, gpu
from tests.support.thoroughness import in_turn

__all__ = ["gpu"]
ROOT = Path(__file__).parents[2]
ON_THE_GPU = ("torch.cuda", 'device="cuda"', 'torch.device("cuda")', "runner_svc.cuda.", "runner_svc.gpu.backend")
NOT_ASKED = {
    "bench.common.provenance",  # prints a commit
    "bench.fuzz_plan",  # needs atheris, which instruments what it imports
    "bench.gpu_comparison.transformers_side",  # a child of bench.gpu_comparison, which has checked
    "bench.sanitizer.fault",  # a child of bench.sanitizer
    "bench.tensor_parallel.processes",  # a child of the others there, which have checked
}
ASKS_ITSELF = {
    "bench.gpu_serving.recording_runner",  # checks like a runner
    "bench.sanitizer.__main__",  # checks for its tool, and that a fault is reported
}


def sources() -> dict[str, str]:
    """Returns the sources of all modules of bench by name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text("utf-8")
        for path in sorted((ROOT / "bench").rglob("*.py"))
    }


SOURCES = sources()
COMMANDS = sorted(name for name, text in SOURCES.items() if 'if __name__ == "__main__"' in text)


def imported(name: str) -> set[str]:
    """Returns a module of bench and the modules of bench that it imports, at the top or in functions."""
    found = {name}
    for node in ast.walk(ast.parse(SOURCES[name])):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & SOURCES.keys()
    return found


def closure(name: str) -> set[str]:
    found, todo = {name}, [name]
    while todo:
        for other in imported(todo.pop()) - found:
            found.add(other)
            todo.append(other)
    return found


NEED_A_GPU = [
    name
    for name in COMMANDS
    if name not in NOT_ASKED
    and any(word in SOURCES[part] for part in closure(name) - {"bench.common.on_gpu"} for word in ON_THE_GPU)
]


def started(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str | int | None:
    """Runs the command in this process, without CuPy. Returns its exit code or message."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main()
    return end.value.code


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in NOT_ASKED])
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert started(name, monkeypatch, "--help") == 0
    assert "usage:" in capsys.readouterr().out


def test_the_search_finds_them() -> None:
    assert {"bench.kernels.__main__", "bench.steps.__main__", "bench.steps.profile"} <= set(NEED_A_GPU)
    assert len(NEED_A_GPU) < len(COMMANDS) - 10


@pytest.mark.parametrize("name", NEED_A_GPU)
def test_a_module_that_uses_a_gpu_checks_for_it(name: str) -> None:
    assert "    require_gpu(" in SOURCES[name] or "except NoService" in SOURCES[name] or name in ASKS_ITSELF


ARGUMENTS = {
    "bench.steps.profile": ["qwen3-0.6b", "8"],
    "bench.steps.mixed": ["qwen3-0.6b"],
    "bench.speculation.peer": ["--site=s"],
    "bench.speculation.train_medusa": ["--out=o", "--device=cuda"],
    "bench.baselines.__main__": ["padded", "--workload=w", "--out=o", "--device=cuda"],
}
ASKS_WHEN_TOLD = "bench.gpu_comparison.transformers_side"


ASKING = [name for name in COMMANDS if "    require_gpu(" in SOURCES[name] and name != ASKS_WHEN_TOLD]


@pytest.mark.parametrize("name", ASKING)
def test_the_run_ends_with_a_sentence(gpu: FakeGpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.unavailable(NO_DRIVER, here=False)
    assert started(name, monkeypatch, *ARGUMENTS.get(name, ())) == (
        "this runs on a GPU, but torch finds no usable GPU (Found no NVIDIA driver on your system): "
        "start it on a machine with a GPU"
    )


@pytest.mark.parametrize("told", ["", "10\n"])
def test_the_other_side_touches_the_card_only_when_told(
    gpu: FakeGpu, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    side = importlib.import_module(ASKS_WHEN_TOLD)
    asked = list[str]()

    def stop(device: str, **_: bool) -> None:
        asked.append(device)
        sys.exit("asked")

    def listen() -> str:
        assert not asked and not torch.cuda.is_initialized()
        assert capsys.readouterr().out == f"{side.PREPARED}\n"
        return told

    monkeypatch.setattr(side, "require_gpu", stop)
    monkeypatch.setattr(side, "model_folder", lambda name, *_: name)
    monkeypatch.setattr(side.AutoConfig, "from_pretrained", lambda _: SimpleNamespace(vocab_size=1000))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(readline=listen))
    arguments = ["m", "--model=m", "--out=o", "--device=cuda", "--loads", "transformers=giant"]
    monkeypatch.setattr(sys, "argv", ["side", *arguments])
    with pytest.raises(SystemExit) if told else nullcontext():
        side.main()
    assert asked == (["cuda"] if told else [])


def test_kernels_need_cupy_too(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert started("bench.steps.__main__", monkeypatch) == (
        "this runs on a GPU, but CuPy is not installed: pip install 'roster-serve[cuda]'"
    )


IN_PROCESSES = [
    (["bench.kernels"], "this runs on a GPU, but "),
    (["bench.gpu_serving", "--decode", "4"], "the runner ended: roster-runner: device is 'cuda', but "),
    (["bench.serving", "--device=cuda", "--requests=1"], "the runner ended with exit status 2: roster-runner: dev"),
    (["bench.answers.greedy_parity", "--device=cuda"], "the runner ended: roster-runner: device is 'cuda', but "),
]


@pytest.mark.parametrize(("command", "sentence"), in_turn(IN_PROCESSES, in_ci=1))
def test_the_process_says_it(tmp_path: Path, command: list[str], sentence: str) -> None:
    told = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "ROSTER_COMMIT": commit() or "unknown"}
    ended = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if not key.startswith("ROSTER_")} | told,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith(sentence) and len(ended.stderr.splitlines()) == 1, ended.stderr

"""`LLM` in a script of its own: answers within a running event loop, and services that end with the script."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from roster_client import LLM
from roster_client.offline.own_services import Settings
from roster_common import extras
from tests.support.process_state import command_line
from tests.support.roster_command import assert_gone
from tests.support.thoroughness import choice

NOTEBOOK = """
import asyncio, sys
from roster_client import LLM, FinishReason, InvalidRequestError, Message, ServicesFailedError

llm = LLM("tiny", device="hash", slots=4, log="services.log", test_backend={"eos_probability": 0})

async def cell():
    two = [{"role": "system", "content": "Be short."}, Message("user", "two")]
    prompts = ["one", [5, 6, 7], [Message("user", "one")], two] * 3
    answers = llm.generate(prompts, max_tokens=6, seed=1, n=2, logprobs=1, progress=True)
    assert [len(answer.choices) for answer in answers] == [2] * 12
    assert all(len(choice.token_ids) == len(choice.logprobs) == 6 for a in answers for choice in a.choices)
    assert {answer.finish_reason for answer in answers} == {FinishReason.LENGTH}
    outputs = [answer.token_ids for answer in answers]
    assert outputs == outputs[:4] * 3 and outputs[0] == outputs[2] != outputs[1] != outputs[3]
    each = [{"max_tokens": 1 + place} for place in range(3)]
    assert [len(answer.token_ids) for answer in llm.generate(["a", "b", "c"], each=each)] == [1, 2, 3]
    (raw,) = llm.generate("one", raw=True, max_tokens=2, prompt_token_ids=True)
    assert len(raw.started.prompt_token_ids) == 3 and len(raw.token_ids) == 2
    assert [len(a.token_ids) for a in llm.generate([5, 6, 7], max_tokens=3)] == [3] and llm.generate([]) == []
    assert [len(a.token_ids) for a in llm.generate((text for text in "ab"), max_tokens=2)] == [2, 2]
    try:
        llm.generate(["good", "bad"], each=[{}, {"temperature": -1}], max_tokens=4000)
    except InvalidRequestError as error:
        assert str(error).startswith("prompt 1: ")
    else:
        raise AssertionError

asyncio.run(cell())
print("ready", flush=True)
if "exits" in sys.argv:
    sys.exit()
sys.stdin.readline()
try:
    llm.generate("one")
except ServicesFailedError as error:
    print(error, flush=True)
llm.close()
try:
    llm.generate("one")
except RuntimeError as error:
    print(error, flush=True)
"""


@contextmanager
def script(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Runs the script until it has printed "ready"; yields it and the processes that it started."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ROSTER_")}
    process = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK, *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path), "ROSTER_TOKENS": "/nonexistent"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process, psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("end", choice(["killed", "exits", "loses a service"], in_ci=["killed"]))
def test_it_answers_and_leaves_nothing_running(tmp_path: Path, end: str) -> None:
    with script(tmp_path, end) as (process, started):
        assert len(started) >= 2
        if end == "killed":
            process.kill()
        elif end == "loses a service":
            (runner,) = [child for child in started if "runner_svc.main" in command_line(child)]
            runner.kill()
            output, _ = process.communicate("\n", timeout=60)
            assert output.startswith("the runner ended with signal 9") and "(log: services.log)" in output
            assert output.endswith("\nthe services are closed: make another LLM\n")
        process.wait(60)
        assert_gone(started, 30)
    assert "a runner joined" in (tmp_path / "services.log").read_text()


def test_wrong_settings_are_named_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="unknown setting polcy"):
        LLM("tiny", polcy="fair")
    with pytest.raises(TypeError, match="listen can't be set: the services listen on free loopback ports"):
        LLM("tiny", listen="127.0.0.1:1")
    settings = Settings({"policy": "fair", "model": "m", "log_level": "error", "tenant_limits": {"*": {"running": 1}}})
    assert settings.scheduler == {
        "policy": "fair", "log_level": "error", "tenant_limits": '{"*": {"running": 1}}'
    }  # fmt: skip
    assert settings.runner == {"model": "m", "log_level": "error"}
    with pytest.raises(ValueError, match="setting slots"):
        Settings({"model": "m", "slots": 0})


def test_extras_are_checked_for_the_device_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "missing", lambda modules: ["torch"] if "torch" in modules else [])
    monkeypatch.setenv("ROSTER_RUNNER_KEY", "of other services")
    with pytest.raises(ValueError, match=r"missing torch.*roster-serve\[runner\]"):
        Settings({"model": "m"})
    monkeypatch.setenv("ROSTER_DEVICE", "hash")
    assert Settings({"model": "m"}).runner == {"model": "m"}

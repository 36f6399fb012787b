"""`roster batch` against the hash backend: answers as of OpenAI's API, errors per line, and continued runs."""

from __future__ import annotations

import errno
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from roster_client.batch.output_file import OutputFile
from roster_client.cli import app
from roster_client.client.sync_client import SyncRosterClient
from roster_client.terminal.exit_codes import ExitCode
from tests.support.processes import RosterProcesses
from tests.support.roster_command import RosterCommand, assert_gone, roster_command
from tests.support.thoroughness import FULL, choice

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    processes = RosterProcesses(
        tmp_path_factory.mktemp("roster"),
        scheduler={"max_waiting_requests": 3},
        runner={"device": "hash", "slots": 4, "test_backend": {"eos_probability": 0}},
    )
    with processes:
        yield processes.address


def batch(*arguments: object) -> Result:
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "ROSTER_SERVER": "127.0.0.1:1"}
    return CliRunner().invoke(app, ["batch", *map(str, arguments)], env=environment)


def request(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": custom_id}]} if url == CHAT else {"prompt": custom_id}
    return {
        "custom_id": custom_id, "method": "POST", "url": url,
        "body": {"model": "hash", "max_tokens": 8, "seed": 1, **prompt, **body},
    }  # fmt: skip


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def records(path: Path) -> dict[str | None, dict[str, Any]]:
    read = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["id"] for record in read}) == len(read)
    return {record["custom_id"]: record for record in read}


def answer(record: dict[str, Any]) -> dict[str, Any]:
    assert record["error"] is None and record["response"]["status_code"] == 200, record
    body: dict[str, Any] = record["response"]["body"]
    return body


def test_answers_are_those_of_the_api(server: str, tmp_path: Path) -> None:
    asked = [
        request(f"chat {i}", n=1 + i % 2, logprobs=i < 2, top_logprobs=i % 3 if i < 2 else None) for i in range(30)
    ]
    asked += [
        request("two", COMPLETIONS, prompt=["a", "bc"], n=2, logprobs=2),
        request("ids", COMPLETIONS, prompt=[97, 98]),
        request("json", max_tokens=50, response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    ]
    out = tmp_path / "out"
    result = batch("-s", server, write(tmp_path / "in", *asked), out)
    assert result.exit_code == ExitCode.OK and "33 of 33 requests" in result.stderr, result.output
    answers = {custom_id: answer(record) for custom_id, record in records(out).items()}
    assert len(answers) == 33
    for kind, name in (("chat.ChatCompletion", "chat.completion"), ("Completion", "text_completion")):
        types = pytest.importorskip("openai.types." + kind.rpartition(".")[0] if "." in kind else "openai.types")
        of_kind = [body for body in answers.values() if body["object"] == name]
        assert of_kind and all(
            getattr(types, kind.rpartition(".")[2]).model_validate(body, strict=True) for body in of_kind
        )
    with SyncRosterClient(server) as client:
        expected = client.generate([97, 98], max_tokens=8, seed=1).completion()
    assert answers["ids"]["choices"][0]["text"] == expected.text
    assert answers["ids"]["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}
    }  # fmt: skip
    assert [choice["index"] for choice in answers["two"]["choices"]] == [0, 1, 2, 3]
    json_choice = answers["json"]["choices"][0]
    assert json.loads(json_choice["message"]["content"])["a"] in ("x", "y") and json_choice["finish_reason"] == "stop"
    for scores in [one["logprobs"] for one in answers["two"]["choices"]]:
        tokens, offsets = scores["tokens"], scores["text_offset"]
        assert len(tokens) == len(scores["token_logprobs"]) == len(scores["top_logprobs"]) == 8
        assert offsets == [len("".join(tokens[:place])) for place in range(8)]
    scored = answers["chat 1"]["choices"][1]["logprobs"]["content"]
    assert len(scored) == 8 and all(len(entry["top_logprobs"]) == 1 and entry["logprob"] <= 0 for entry in scored)
    assert any(entry["bytes"] == [ord(entry["token"])] for entry in scored)
    assert answers["chat 2"]["choices"][0]["logprobs"] is None


def test_errors_are_records_and_a_run_is_continued(server: str, tmp_path: Path) -> None:
    lines = [
        request("good"), "{broken", request("parameter", temperature=-1), request("tools", tools=[{}]),
        request("model", model="gpt-4o"), {**request("url"), "url": "/v1/embeddings"},
        request("length", COMPLETIONS, max_tokens=0),
    ]  # fmt: skip
    requests, out = write(tmp_path / "in", *lines), tmp_path / "out"
    result = batch("-s", server, requests, out)
    assert result.exit_code == ExitCode.INCOMPLETE
    assert "6 have an error instead of an answer; the first: " in result.stderr
    found = records(out)
    answer(found["good"])
    assert found[None]["error"]["line"] == 2 and found["url"]["error"]["code"] == "invalid_url"
    for custom_id, status, param in (
        ("parameter", 400, "temperature"),
        ("tools", 400, "tools"),
        ("model", 404, "model"),
        ("length", 400, "max_tokens"),
    ):
        response = found[custom_id]["response"]
        assert (response["status_code"], response["body"]["error"]["param"]) == (status, param), response
    before = out.read_text()
    write(requests, *lines, request("new"))
    out.write_text(before + '{"id": "batch_req_12')  # as a crash may leave it
    again = batch("-s", server, requests, out)
    assert "has 7 of 8 already" in again.stderr and "1 of 1 requests" in again.stderr
    assert out.read_text().startswith(before) and out.read_text().count("\n") == 8
    answer(records(out)["new"])
    done = batch("-s", "127.0.0.1:1", requests, out)  # nothing is left that needs a server
    assert done.exit_code == ExitCode.INCOMPLETE and "has all 8 already, 6 of them with an error." in done.stderr
    with pytest.MonkeyPatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(OutputFile, "write", lambda *_: (_ for _ in ()).throw(full))
        failed = batch("-s", server, requests, tmp_path / "out3")
    assert failed.exit_code == ExitCode.FAILED and "No space left on device" in failed.stderr
    other = batch("-s", server, "--any-model", write(tmp_path / "in2", lines[4]), tmp_path / "out2")
    assert other.exit_code == ExitCode.OK and answer(records(tmp_path / "out2")["model"])["model"] == "hash"


def test_what_can_not_run_is_a_sentence(tmp_path: Path) -> None:
    requests, out = write(tmp_path / "in", request("a"), request("b"), request("a")), tmp_path / "out"
    for arguments, sentence in (
        ((requests, out), "lines 1 and 3 have the same custom_id 'a'"),
        ((requests, requests), "is the file of the requests"),
        (("/dev/null", out), "which could be read twice"),
        ((write(tmp_path / "one", request("a")), "/dev/null"), "from which a run could be continued"),
        (("-s", "127.0.0.1:1", "--model", "m", requests, out), "give one of them"),
        (("--device", "cpu", requests, out), "add --model"),
    ):
        result = batch(*arguments)
        assert result.exit_code == ExitCode.USAGE and sentence in result.stderr, result.output
    assert not out.exists()
    result = batch(write(tmp_path / "in", request("a")), out)
    assert result.exit_code == ExitCode.UNAVAILABLE and "127.0.0.1:1" in result.stderr


@pytest.mark.skipif(not FULL, reason="tests/roster_client/offline/test_bulk_client.py has a session that breaks")
def test_it_outlives_the_scheduler(tmp_path: Path) -> None:
    requests = write(tmp_path / "in", *[request(str(number), max_tokens=100) for number in range(400)])
    out = tmp_path / "out"
    settings = {"device": "hash", "slots": 16, "test_backend": {"eos_probability": 0, "step_ms": 5}}
    with (
        RosterProcesses(tmp_path, runner=settings) as roster,
        roster_command("batch", "-s", roster.address, str(requests), str(out)) as run,
    ):
        wait_for_output(run, out)
        roster.end("scheduler", signal.SIGKILL)
        roster.start_one("scheduler")
        assert run.exit_status() == ExitCode.OK, run.output
    assert len(out.read_text().splitlines()) == len(records(out)) == 400


def wait_for_output(run: RosterCommand, out: Path) -> None:
    deadline = time.monotonic() + 60
    while not (out.exists() and out.stat().st_size):
        assert time.monotonic() < deadline and run.process.poll() is None, run.output
        time.sleep(0.01)


@pytest.mark.parametrize("end", choice(["signal", "killed", "whole"], in_ci=[]))
def test_it_starts_both_services_and_ends_them(tmp_path: Path, end: str) -> None:
    requests = write(tmp_path / "in", *[request(str(number), max_tokens=600) for number in range(300)])
    out, log = tmp_path / "out", tmp_path / "log"
    with roster_command(
        "batch", "--model", "hash", "--device", "hash", "--log", str(log), str(requests), str(out)
    ) as run:
        wait_for_output(run, out)
        started = run.descendants()
        if end == "signal":
            run.process.send_signal(signal.SIGINT)
            assert run.exit_status() == ExitCode.INTERRUPTED and "The same command continues." in run.output
        elif end == "killed":
            run.process.kill()
            run.process.wait()
        else:
            assert run.exit_status() == ExitCode.OK, run.output
        assert_gone(started, 30)
    assert "a runner joined" in log.read_text()
    assert (len(records(out)) == 300) == (end == "whole")

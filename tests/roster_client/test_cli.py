"""The `roster` command through typer's runner, against a scripted server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from roster_client.cli import app
from roster_client.terminal.exit_codes import ExitCode
from roster_protos import inference_pb2 as pb
from tests.support.scripted_server import ScriptedServer, prompt_text, refuse

NOBODY = "127.0.0.1:1"


def roster(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_generate_prints_the_answer_and_statistics(server: ScriptedServer) -> None:
    result = roster(
        "generate", "-s", server.target, "--tenant", "acme", "-m", "9", "-t", "0", "--no-speculate", "hello big world"
    )
    assert result.exit_code == ExitCode.OK, result.output
    assert result.stdout == "hello big world \n"
    assert "3 + 3 tokens" in result.stderr and "first token after" in result.stderr
    (request,) = server.requests
    assert request.prompt == pb.Prompt(user_message="hello big world")
    assert request.stop.max_tokens == 9 and request.sampling.HasField("temperature")
    assert "1 of 2 drafts accepted" in " ".join(result.stderr.split()), "on a second line of a terminal"
    assert request.HasField("speculate") and not request.speculate
    assert server.metadata[0]["roster-tenant"] == "acme"


def test_raw_and_system_messages(server: ScriptedServer) -> None:
    assert roster("generate", "-s", server.target, "--raw", "-q", "one two").stdout == "one two \n"
    assert roster("generate", "-s", server.target, "-q", "-", stdin="from a pipe").stdout == "from a pipe \n"
    assert roster("generate", "-s", server.target, "-q", "--system", "be brief", "hi").stdout == "hi \n"
    assert [request.prompt.WhichOneof("kind") for request in server.requests] == ["text", "user_message", "chat"]
    assert [message.role for message in server.requests[-1].prompt.chat.messages] == ["system", "user"]
    server.chat_template = ""
    for wrong in ((), ("--raw",)):
        refused = roster("generate", "-s", server.target, "--system", "be brief", *wrong, "hi")
        assert refused.exit_code == ExitCode.USAGE and "chat template" in refused.stderr


def test_several_answers(server: ScriptedServer) -> None:
    result = roster("generate", "-s", server.target, "-n", "2", "-q", "a b")
    assert result.stdout == "── answer 0 ──\na b \n── answer 1 ──\na b \n"


def test_constraints(server: ScriptedServer, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "boolean"}')
    assert roster("generate", "-s", server.target, "-q", "--schema", str(schema), "hi").exit_code == ExitCode.OK
    assert roster("generate", "-s", server.target, "-q", "--regex", "[ab]+", "hi").exit_code == ExitCode.OK
    assert [request.constraint.json_schema for request in server.requests] == ['{"type": "boolean"}', ""]
    assert server.requests[1].constraint.regex == "[ab]+"
    both = roster("generate", "-s", server.target, "--schema", str(schema), "--regex", "a", "hi")
    assert both.exit_code != ExitCode.OK and "one of" in both.stderr
    assert roster("generate", "--schema", str(tmp_path / "none"), "hi").exit_code == ExitCode.USAGE


def test_json(server: ScriptedServer) -> None:
    result = roster("generate", "-s", server.target, "--json", "--stop", "x", "--stop", "yy", "a bb 🙂")
    answer = json.loads(result.stdout)
    assert answer["choices"][0] == {
        "index": 0, "text": "a bb 🙂 ", "token_ids": [1, 2, 1], "finish_reason": "length", "stop_string": None,
        "stop_token_id": None,
    }  # fmt: skip
    assert answer["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 1, "drafted_tokens": 2, "accepted_tokens": 1,
        "numerics": "",
    }  # fmt: skip
    assert list(server.requests[0].stop.strings) == ["x", "yy"] and result.stderr == ""


def test_refusal_is_one_sentence(server: ScriptedServer) -> None:
    server.script = refuse(3, "the request is not valid", {"stop.strings[0]": "must not be empty"})
    result = roster("generate", "-s", server.target, "--stop", "", "hi")
    assert result.exit_code == ExitCode.REFUSED
    assert result.stderr == "the request is not valid; stop.strings[0]: must not be empty\n" and result.stdout == ""


def test_answers_cut_short_have_their_own_exit_status(server: ScriptedServer) -> None:
    def failing(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(deltas=[pb.Delta(token_ids=[1], text="so far")])
        finish = pb.Finish(reason=pb.FINISH_REASON_ERROR, message="logits were not finite", num_tokens=1)
        yield pb.GenerateResponse(finishes=[finish], usage=pb.Usage(prompt_tokens=1, completion_tokens=1))

    server.script = failing
    result = roster("generate", "-s", server.target, "-q", "hi")
    assert result.exit_code == ExitCode.INCOMPLETE and result.stdout == "so far\n"
    assert "error): logits were not finite" in result.stderr


@pytest.mark.parametrize("command", [("generate", "-s", NOBODY, "hi"), ("chat", "-s", NOBODY), ("health", "-s", NOBODY),
                                     ("status", "--admin", NOBODY), ("policy", "list", "--admin", NOBODY),
                                     ("policy", "set", "fcfs", "--admin", NOBODY)])  # fmt: skip
def test_an_unavailable_server(command: tuple[str, ...]) -> None:
    result = roster(*command)
    assert result.exit_code == ExitCode.UNAVAILABLE
    assert result.stderr.startswith("The server is not available") and result.stderr.count("\n") == 1


def test_a_server_without_a_model_has_its_own_words(server: ScriptedServer) -> None:
    server.script = refuse(14, "no model is being served yet; try again", retry_s=1)
    result = roster("generate", "-s", server.target, "hi")
    assert result.exit_code == ExitCode.UNAVAILABLE
    assert result.stderr == "no model is being served yet (try again in 1 s)\n"


@pytest.mark.parametrize(
    "arguments",
    [("generate",), ("generate", "--max-tokens", "0", "hi"), ("generate", "--tenant", "müller", "hi"), ("nonsense",)],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    result = roster(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert "Traceback" not in result.output


def test_health(server: ScriptedServer) -> None:
    result = roster("health", "-s", server.target)
    assert (result.exit_code, result.stdout) == (ExitCode.OK, "SERVING\n")
    unknown = roster("health", "-s", server.target, "--service", "nope")
    assert (unknown.exit_code, unknown.stderr) == (ExitCode.REFUSED, "the server has no health service 'nope'\n")


def test_chat_keeps_the_history(server: ScriptedServer) -> None:
    result = roster("chat", "-s", server.target, "--system", "be brief", stdin="hello you\nand again\n")
    assert result.exit_code == ExitCode.OK
    assert "hello you \n" in result.stdout and "and again \n" in result.stdout
    told = [[(m.role, m.parts[0].text) for m in request.prompt.chat.messages] for request in server.requests]
    first = [("system", "be brief"), ("user", "hello you")]
    assert told == [first, [*first, ("assistant", "hello you "), ("user", "and again")]]


def test_chat_commands(server: ScriptedServer) -> None:
    script = "hello\n/clear\nonce more\n/system be long\n/what\nlast\n/exit\nnever\n"
    result = roster("chat", "-s", server.target, stdin=script)
    assert result.exit_code == ExitCode.OK and "/clear starts" in result.stdout
    assert [len(request.prompt.chat.messages) for request in server.requests] == [1, 1, 2]
    assert server.requests[2].prompt.chat.messages[0].parts[0].text == "be long"


def test_chat_survives_a_refused_message(server: ScriptedServer) -> None:
    accept = server.script

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        wanted = refuse(3, "the prompt is too long") if "long" in prompt_text(request.prompt) else accept
        yield from wanted(request, context)

    server.script = script
    result = roster("chat", "-s", server.target, stdin="a long one\nshort\n")
    assert result.exit_code == ExitCode.OK
    assert "the prompt is too long" in result.stdout and "short \n" in result.stdout
    assert len(server.requests[-1].prompt.chat.messages) == 1


def test_chat_needs_a_template(server: ScriptedServer) -> None:
    server.chat_template = ""
    result = roster("chat", "-s", server.target)
    assert result.exit_code == ExitCode.USAGE and "no chat template" in result.stderr


def test_help_names_units_and_exit_status() -> None:
    assert "Exit status: 0 success" in " ".join(roster("--help").stdout.split())
    for command in ("generate", "chat", "status", "health", "policy list", "policy show", "policy set"):
        assert roster(*command.split(), "--help").exit_code == ExitCode.OK
    assert "step_tokens=512" in roster("policy", "set", "--help").stdout


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("roster pol", "policy"),
        ("roster policy set ad", "adaptive"),
        ("roster policy show fc", "fcfs"),
        ("roster serve --policy dead", "deadline"),
        ("roster simulate --policy pre", "prefix"),
        ("roster timeline --across st", "steps"),
    ],
)
def test_the_shell_completes(line: str, offered: str) -> None:
    asked = {"_ROSTER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    assert offered in CliRunner().invoke(app, [], env=asked, prog_name="roster").stdout.split()


@pytest.mark.parametrize(("shell", "part"), [("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete --")])
def test_completion_is_there_for_the_shells(shell: str, part: str) -> None:
    asked = {"_ROSTER_COMPLETE": f"source_{shell}"}
    assert part in CliRunner().invoke(app, [], env=asked, prog_name="roster").stdout

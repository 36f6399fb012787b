"""Every field of OpenAI's bodies is used, without effect, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from roster_client.batch.bodies import CHAT_FIELDS, COMPLETION_FIELDS, asked
from roster_client.batch.fields import ONLY, WITHOUT_EFFECT, BadField
from roster_client.batch.input_file import CHAT, COMPLETIONS
from roster_protos import inference_pb2 as pb
from tests.support.thoroughness import FULL

HI = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> pb.GenerateRequest:
    (request,) = asked(CHAT, {"model": "m", "messages": HI, **fields}).requests
    return request


def completion(**fields: Any) -> pb.GenerateRequest:
    (request,) = asked(COMPLETIONS, {"model": "m", "prompt": "Hi", **fields}).requests
    return request


def refusal(url: str = CHAT, **fields: Any) -> BadField:
    prompt = {"messages": HI} if url == CHAT else {"prompt": "Hi"}
    with pytest.raises(BadField) as refused:
        asked(url, {**prompt, **fields})
    return refused.value


@pytest.mark.skipif(not FULL, reason="importing the package takes seconds, and its version is pinned")
def test_all_fields_of_the_openai_package_are_known() -> None:
    chats = pytest.importorskip("openai.types.chat.completion_create_params").CompletionCreateParamsNonStreaming
    completions = pytest.importorskip("openai.types.completion_create_params").CompletionCreateParamsNonStreaming
    for params, used in ((chats, CHAT_FIELDS), (completions, COMPLETION_FIELDS)):
        assert (params.__required_keys__ | params.__optional_keys__) - used - set(WITHOUT_EFFECT) - set(ONLY) == set()


def test_sampling_fields_arrive() -> None:
    values: dict[str, Any] = {
        "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.25, "repetition_penalty": 2, "presence_penalty": 1,
        "frequency_penalty": -1, "seed": -1, "logit_bias": {"5": -100, "6": 1.5}, "n": 3, "min_tokens": 2,
        "stop": "end", "stop_token_ids": [9], "priority": -5, "cache_salt": "s", "ignore_eos": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "max_tokens": 7, "speculate": False,
    }  # fmt: skip
    for request in (chat(**values), completion(**values)):
        sampling, stop = request.sampling, request.stop
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0.25)
        assert sampling.HasField("temperature") and sampling.seed == 2**64 - 1
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (2, 1, -1)
        assert dict(sampling.logit_bias) == {5: -100, 6: 1.5} and request.n == 3
        assert (stop.max_tokens, stop.min_tokens, list(stop.strings), list(stop.token_ids)) == (7, 2, ["end"], [9])
        assert (request.priority, request.cache_salt, stop.ignore_eos) == (-5, "s", True)
        assert request.HasField("speculate") and not request.speculate
        assert stop.include_stop_string and not request.output.skip_special_tokens
    assert list(chat(stop=["a", "b"]).stop.strings) == ["a", "b"]


def test_absent_and_null_fields_leave_the_defaults_to_the_server() -> None:
    plain = chat()
    assert plain == chat(temperature=None, stop=None, tools=None, unheard_of=None, logprobs=None)
    assert not plain.HasField("sampling") and not plain.HasField("stop") and not plain.HasField("output")
    assert completion().stop.max_tokens == 16  # OpenAI's default
    assert chat(max_completion_tokens=5, max_tokens=9).stop.max_tokens == 5


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": parts}, {"role": "assistant", "content": None, "tool_calls": []}]
    request = chat(messages=messages)
    assert [(message.role, [part.text for part in message.parts]) for message in request.prompt.chat.messages] == [
        ("system", ["a", "b"]), ("assistant", [""])
    ]  # fmt: skip
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    for wrong, param in (
        ([], "messages"),
        ("Hi", "messages"),
        (["Hi"], "messages[0]"),
        ([*HI, {"content": "x"}], "messages[1]"),
        ([{**HI[0], "name": "Ann"}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": [image]}], "messages[0].content[0]"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ):
        assert refusal(messages=wrong).param == param


def test_prompts_of_completions() -> None:
    def kinds(prompt: object) -> list[object]:
        requests = asked(COMPLETIONS, {"prompt": prompt}).requests
        return [request.prompt.text or list(request.prompt.token_ids.ids) for request in requests]

    assert kinds("a") == ["a"] and kinds(["a", "b"]) == ["a", "b"]
    assert kinds([1, 2]) == [[1, 2]] and kinds([[1, 2], [3]]) == [[1, 2], [3]]
    for wrong in ("", [], [""], [[]], [True], [-1], 5, None, ["a", 1]):
        assert refusal(COMPLETIONS, prompt=wrong).param == "prompt"


def test_log_probabilities() -> None:
    assert chat(logprobs=True, top_logprobs=3).output.logprobs == 3
    assert chat(logprobs=True).output.HasField("logprobs") and not chat(logprobs=False).HasField("output")
    assert completion(logprobs=2).output.logprobs == 2
    assert refusal(top_logprobs=2).param == "top_logprobs" and refusal(logprobs=1).param == "logprobs"
    assert refusal(COMPLETIONS, logprobs=True).param == "logprobs"


def test_constraints() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}, "strict": True}}
    assert chat(response_format=form).constraint.json_schema == '{"type": "boolean"}'
    assert chat(response_format={"type": "json_object"}).constraint.json_schema == '{"type": "object"}'
    assert not chat(response_format={"type": "text"}).HasField("constraint")
    assert (chat(regex="a+").constraint.regex, chat(ebnf="root ::= x").constraint.grammar) == ("a+", "root ::= x")
    for wrong in ("json_object", {"type": "json_schema"}, {"type": "structural_tag"}, 5):
        assert refusal(response_format=wrong).param == "response_format"
    assert "at most one of" in str(refusal(response_format=form, regex="a"))


def test_what_changes_nothing_is_taken_and_everything_else_is_refused_by_name() -> None:
    taken = dict.fromkeys(WITHOUT_EFFECT, "anything") | {name: values[0] for name, values in ONLY.items() if values}
    assert chat(**taken) == chat()
    for name in ONLY:
        refused = refusal(**{name: "something"})
        assert refused.param == name and f"{name} is not supported other than" in str(refused)
    assert str(refusal(guided_json={})) == "the field 'guided_json' is not supported: remove it"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"), ("temperature", True), ("n", 1.5), ("n", -1), ("max_tokens", 2**32), ("seed", 0.5),
        ("seed", 2**64), ("stop", 5), ("stop", [5]), ("logit_bias", {"x": 1}), ("logit_bias", [1]), ("priority", 101),
        ("ignore_eos", 1), ("speculate", "no"), ("regex", {}), ("cache_salt", "\ud800"),
        ("stop_token_ids", 5), ("model", 5),
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_are_refused_by_name(name: str, value: object) -> None:
    assert refusal(**{name: value}).param == name
    assert name in str(refusal(COMPLETIONS, **{name: value}))


def test_the_page_lists_every_field() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "offline.md").read_text("utf-8")
    table = page.split("### Fields of a body")[1].split("\n\n")[1]
    rows = {row.split("|")[1].strip(): set(re.findall(r"`(\w+)`", row)) for row in table.splitlines()[2:]}
    assert rows["used"] | rows["used, not OpenAI's"] == (CHAT_FIELDS | COMPLETION_FIELDS) - {"model"}
    assert rows["without effect on the answer"] == set(WITHOUT_EFFECT) and rows["only their default"] == set(ONLY)

from __future__ import annotations

import random

import pytest

from roster_client.client.requests import (
    AnyMessage,
    Message,
    OnDisconnect,
    Options,
    build_prompt,
    build_request,
    call_metadata,
)
from roster_protos import inference_pb2 as pb


def test_nothing_given_leaves_everything_unset() -> None:
    request = build_request("hello", {})
    assert request == pb.GenerateRequest(prompt=pb.Prompt(user_message="hello"))
    for name in ("n", "priority", "timeout_ms", "keep_ms"):
        assert not request.HasField(name)
    for name in ("temperature", "top_k", "top_p", "seed"):
        assert not request.sampling.HasField(name)


def test_zero_differs_from_unset() -> None:
    request = build_request("hello", {"temperature": 0.0, "seed": 0, "logprobs": 0, "skip_special_tokens": False})
    assert request.sampling.HasField("temperature") and request.sampling.temperature == 0
    assert request.sampling.HasField("seed") and request.output.HasField("logprobs")
    assert request.output.HasField("skip_special_tokens") and not request.output.skip_special_tokens


def test_every_option_reaches_its_field() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    n, k, tokens = rng.randrange(1, 64), rng.randrange(20), rng.sample(range(1000), 3)
    options: Options = {
        "request_id": "r", "temperature": 0.5, "top_k": k, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": -1.0, "frequency_penalty": 2.0, "logit_bias": {tokens[0]: -4.0}, "seed": (1 << 64) - 1,
        "max_tokens": 7, "min_tokens": 2, "stop": ["a", "b"], "stop_token_ids": tokens, "ignore_eos": True,
        "include_stop_string": True, "n": n, "logprobs": 3, "prompt_logprobs": 4, "skip_special_tokens": True,
        "prompt_token_ids": True, "priority": -5, "ttft_target_ms": 100, "itl_target_ms": 20, "timeout_ms": 3000,
        "on_disconnect": OnDisconnect.KEEP, "keep_ms": 9, "received_token_ids": tokens, "adapter": "x",
        "cache_salt": "s", "speculate": False, "conversation_id": "c", "kv_retain_s": 60.5, "next_turn_s": 2.5,
    }  # fmt: skip
    assert set(options) == set(Options.__annotations__) - {"json_schema", "regex", "grammar"}
    assert build_request("p", options, raw=True) == pb.GenerateRequest(
        request_id="r",
        prompt=pb.Prompt(text="p"),
        sampling=pb.SamplingParameters(
            temperature=0.5, top_k=k, top_p=0.25, min_p=0.125, repetition_penalty=1.5, presence_penalty=-1,
            frequency_penalty=2, logit_bias={tokens[0]: -4}, seed=(1 << 64) - 1,
        ),
        stop=pb.StopConditions(
            max_tokens=7, min_tokens=2, strings=["a", "b"], token_ids=tokens, ignore_eos=True, include_stop_string=True
        ),
        n=n,
        output=pb.OutputOptions(logprobs=3, prompt_logprobs=4, skip_special_tokens=True, prompt_token_ids=True),
        priority=-5, ttft_target_ms=100, itl_target_ms=20, timeout_ms=3000,
        on_disconnect=pb.ON_DISCONNECT_KEEP, keep_ms=9, received_token_ids=tokens, adapter="x", cache_salt="s",
        conversation_id="c", kv_retain_s=60.5, next_turn_s=2.5,
        speculate=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error"),
    [({"temprature": 1}, TypeError), ({"max_tokens": -1}, ValueError), ({"max_tokens": "many"}, TypeError)],
)
def test_wrong_options_are_refused_here(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        build_request("hello", options)  # type: ignore[arg-type]


def test_prompts() -> None:
    assert build_prompt([3, 1]).token_ids.ids == [3, 1]
    assert build_prompt([]).WhichOneof("kind") == "token_ids"
    chat = build_prompt([Message("system", "be brief"), Message("user", "hi 🙂")]).chat
    assert [(m.role, m.parts[0].text) for m in chat.messages] == [("system", "be brief"), ("user", "hi 🙂")]
    assert build_prompt("hi") == pb.Prompt(user_message="hi")
    assert build_prompt("hi", raw=True) == pb.Prompt(text="hi")
    parts = [{"type": "text", "text": "a"}, "b"]
    dicts = [{"role": "user", "content": "hi", "name": None}, {"role": "tool", "content": None}]
    mixed: list[AnyMessage] = [*dicts, {"role": "user", "content": parts}, Message("assistant", "c")]
    chat = build_prompt(mixed).chat
    told = [(m.role, [part.text for part in m.parts]) for m in chat.messages]
    assert told == [("user", ["hi"]), ("tool", []), ("user", ["a", "b"]), ("assistant", ["c"])]


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        ([1, Message("user", "hi")], "not both"),
        (["words"], "type str"),
        (b"words", "got a bytes"),
        ({"role": "user", "content": "hi"}, "got a dict"),
        (3.5, "got a float"),
        ([{"role": "user"}], "'role'"),
        ([{"content": "hi"}], '"role" and "content"; got \'content\''),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "'tool_calls'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ([{"role": "user", "content": 3}], "int"),
    ],
)
def test_wrong_prompts_are_refused_here(prompt: object, names: str) -> None:
    with pytest.raises(TypeError, match=names):
        build_prompt(prompt)  # type: ignore[arg-type]


def test_tenant_metadata() -> None:
    assert call_metadata("") == ()
    assert call_metadata("acme") == (("roster-tenant", "acme"),)
    for bad in ("müller", "a\nb"):
        with pytest.raises(ValueError):
            call_metadata(bad)


def test_constraints() -> None:
    assert build_request("a", {"regex": "b+"}).constraint == pb.Constraint(regex="b+")
    assert build_request("a", {"grammar": "start: A"}).constraint == pb.Constraint(grammar="start: A")
    for schema in ('{"type": "null"}', {"type": "null"}):
        assert build_request("a", {"json_schema": schema}).constraint == pb.Constraint(json_schema='{"type": "null"}')
    with pytest.raises(TypeError, match="at most one of"):
        build_request("a", {"regex": "b", "grammar": "start: A"})

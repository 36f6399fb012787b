"""Every refusal by field, on both sides of every limit, and the resolution of valid requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError

from roster_protos import inference_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID, byte_model
from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.request.prompt_tokens import prompt_tokens
from scheduler_svc.front.request.validation import ValidRequest, digest, validate
from scheduler_svc.front.text.tokenizer import ModelText

VOCAB = 300
CONTEXT = 100
POOL = 80
PROMPT = "hello"

Request = inference_pb2.GenerateRequest
Change = Callable[[Request], object]


@cache
def text() -> ModelText:
    return ModelText(byte_model("byte", "Byte", VOCAB, CONTEXT))


def request(*changes: Change) -> Request:
    made = Request(prompt=inference_pb2.Prompt(text=PROMPT))
    for change in changes:
        change(made)
    return made


def accept(*changes: Change, pool_tokens: int = POOL, remaining_ms: int | None = None) -> ValidRequest:
    return validate(request(*changes), text(), pool_tokens, remaining_ms)


def refuse(*changes: Change, pool_tokens: int = POOL) -> Refusal:
    with pytest.raises(Refusal) as caught:
        validate(request(*changes), text(), pool_tokens)
    refusal = caught.value
    assert refusal.message.startswith(refusal.field + ": ")
    return refusal


def put(path: str, value: object) -> Change:
    """Returns a change that sets a field by its path; it extends lists and updates maps."""

    def change(made: Request) -> None:
        *parents, name = path.split(".")
        message = made
        for parent in parents:
            message = getattr(message, parent)
        if isinstance(value, list):
            getattr(message, name).extend(value)
        elif isinstance(value, dict):
            getattr(message, name).update(value)
        else:
            setattr(message, name, value)

    return change


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<i4").tolist()


OUT_OF_RANGE = [
    ("sampling.temperature", [-0.001, 100.5, math.nan, math.inf, -math.inf]),
    ("sampling.top_p", [0.0, -0.5, 1.001, math.nan, math.inf]),
    ("sampling.min_p", [-0.001, 1.001, math.nan, math.inf]),
    ("sampling.repetition_penalty", [0.0, -1.0, 10.01, math.nan, math.inf]),
    ("sampling.presence_penalty", [-10.01, 10.01, math.nan, -math.inf]),
    ("sampling.frequency_penalty", [-10.01, 10.01, math.nan, math.inf]),
    ("stop.max_tokens", [0, 2**31, 2**32 - 1]),
    ("stop.min_tokens", [96, 2**32 - 1]),
    ("n", [0, 65, 2**32 - 1]),
    ("output.logprobs", [21, 2**32 - 1]),
    ("output.prompt_logprobs", [21]),
    ("priority", [-101, 101, -(2**31)]),
    ("ttft_target_ms", [0, 2**31, 2**32 - 1]),
    ("itl_target_ms", [0, 2**31, 2**32 - 1]),
    ("timeout_ms", [0, 2**31, 2**32 - 1]),
    ("keep_ms", [0, 2**32 - 1, 3_600_001]),
    ("on_disconnect", [3, -1]),
    ("request_id", ["x" * 129, "é" * 65]),
    ("conversation_id", ["x" * 129, "é" * 65]),
    ("kv_retain_s", [-1.0, 86_400.5, math.nan, math.inf]),
    ("next_turn_s", [-0.001, 1e9, math.nan, math.inf]),
]
IN_RANGE = [
    ("sampling.temperature", [0.0, 0.01, 100.0]),
    ("sampling.top_p", [0.001, 1.0]),
    ("sampling.min_p", [0.0, 1.0]),
    ("sampling.repetition_penalty", [0.01, 10.0]),
    ("sampling.presence_penalty", [-10.0, 10.0]),
    ("sampling.frequency_penalty", [-10.0, 10.0]),
    ("sampling.top_k", [0, 1, VOCAB, 2**32 - 1]),
    ("sampling.seed", [0, 2**64 - 1]),
    ("stop.max_tokens", [1, POOL - len(PROMPT)]),
    ("n", [1, 64]),
    ("output.logprobs", [0, 20]),
    ("output.prompt_logprobs", [0, 20]),
    ("priority", [-100, 0, 100]),
    ("ttft_target_ms", [1, 2**31 - 1]),
    ("itl_target_ms", [1, 2**31 - 1]),
    ("timeout_ms", [1, 2**31 - 1]),
    ("keep_ms", [1, 3_600_000]),
    ("on_disconnect", [0, 1, 2]),
    ("request_id", ["x", "x" * 128, "é" * 64]),
    ("conversation_id", ["", "x" * 128, "é" * 64]),
    ("kv_retain_s", [0.0, 86_400.0]),
    ("next_turn_s", [0.0, 86_400.0]),
]


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in OUT_OF_RANGE for value in values])
def test_a_value_out_of_range_is_refused_by_its_field(path: str, value: object) -> None:
    refusal = refuse(put(path, value))
    assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, path)


@pytest.mark.parametrize(
    "path", ["stop.max_tokens", "stop.min_tokens", "timeout_ms", "ttft_target_ms", "itl_target_ms"]
)
def test_a_wrapped_minus_one_is_named_in_the_refusal(path: str) -> None:
    message = refuse(put(path, 2**32 - 1), pool_tokens=2**40).message
    assert "4294967295 exceeds the int32 maximum" in message and "omit the field" in message


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert accept(put("sampling.top_k", 2**32 - 1)).sampling.top_k == 0


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in IN_RANGE for value in values])
def test_a_value_at_the_limit_is_accepted(path: str, value: object) -> None:
    accept(put(path, value)).to_submit(1, "")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (put("stop.strings", ["a", ""]), "stop.strings[1]"),
        (put("stop.strings", ["x" * 257]), "stop.strings[0]"),
        (put("stop.strings", ["é" * 129]), "stop.strings[0]"),
        (put("stop.strings", [str(number) for number in range(65)]), "stop.strings"),
        (put("stop.token_ids", [1, VOCAB]), "stop.token_ids[1]"),
        (put("stop.token_ids", [1] * 65), "stop.token_ids"),
        (put("sampling.logit_bias", {7: 1.0, VOCAB: 1.0}), f"sampling.logit_bias[{VOCAB}]"),
        (put("sampling.logit_bias", {7: math.nan}), "sampling.logit_bias[7]"),
        (put("sampling.logit_bias", {7: math.inf}), "sampling.logit_bias[7]"),
        (put("sampling.logit_bias", {7: -100.5}), "sampling.logit_bias[7]"),
        (put("sampling.logit_bias", dict.fromkeys(range(1025), 0.0)), "sampling.logit_bias"),
        (put("received_token_ids", [1, 2, VOCAB + 5]), "received_token_ids[2]"),
        (put("received_token_ids", [1] * 76), "received_token_ids"),
        (put("received_token_ids", [1, IM_END_ID, 2]), "received_token_ids[1]"),
        (put("prompt.token_ids.ids", [1, 2, VOCAB]), "prompt.token_ids.ids[2]"),
        (put("prompt.token_ids.ids", [2**32 - 1]), "prompt.token_ids.ids[0]"),
        (put("prompt.token_ids.ids", [1] * CONTEXT), "prompt.token_ids.ids"),
        (put("prompt.text", ""), "prompt.text"),
        (put("prompt.text", "x" * CONTEXT), "prompt.text"),
        (put("prompt.user_message", ""), "prompt.user_message"),
        (put("prompt.user_message", "x" * CONTEXT), "prompt.user_message"),
        (put("prompt.text", "é" * (CONTEXT // 2)), "prompt.text"),
        (lambda made: made.ClearField("prompt"), "prompt"),
        (lambda made: made.prompt.token_ids.SetInParent(), "prompt.token_ids.ids"),
        (lambda made: made.prompt.chat.SetInParent(), "prompt.chat.messages"),
        (lambda made: made.prompt.chat.messages.add(), "prompt.chat.messages[0].role"),
        (lambda made: made.prompt.chat.messages.add(role="user").parts.add(), "prompt.chat.messages[0].parts[0]"),
        (lambda made: made.prompt.chat.messages.add(role="r").parts.add(text="x" * 99), "prompt.chat.messages"),
    ],
)
def test_a_bad_value_is_refused_by_its_field(change: Change, field: str) -> None:
    refusal = refuse(change)
    assert (refusal.code, refusal.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (put("adapter", "mine"), "adapter"),
    ],
)
def test_what_the_server_does_not_do_is_unimplemented(change: Change, field: str) -> None:
    refusal = refuse(change)
    assert (refusal.code, refusal.field) == (grpc.StatusCode.UNIMPLEMENTED, field)


def test_a_continuation_has_one_choice() -> None:
    assert refuse(put("received_token_ids", [1]), put("n", 2)).field == "n"


def test_min_tokens_can_not_exceed_max_tokens() -> None:
    assert refuse(put("stop.max_tokens", 3), put("stop.min_tokens", 4)).field == "stop.min_tokens"
    assert accept(put("stop.max_tokens", 3), put("stop.min_tokens", 3)).sampling.min_tokens == 3


def test_a_request_that_can_never_fit_the_pool_is_refused() -> None:
    room = POOL - len(PROMPT)
    assert refuse(put("stop.max_tokens", room + 1)).field == "stop.max_tokens"
    assert refuse(put("prompt.text", "x" * POOL)).field == "prompt"
    assert accept(put("prompt.text", "x" * (POOL - 1))).max_tokens == 1


def test_a_request_that_was_begun_is_cut_to_the_context_and_left_to_the_engine() -> None:
    begun = put("received_token_ids", [1])
    assert accept(begun, put("stop.max_tokens", POOL)).max_tokens == POOL
    assert accept(begun, put("stop.max_tokens", CONTEXT)).max_tokens == CONTEXT - len(PROMPT)
    assert accept(begun, put("prompt.text", "x" * POOL), put("stop.max_tokens", 5)).max_tokens == 5
    assert refuse(begun, put("prompt.text", "x" * POOL)).field == "prompt"


def test_max_tokens_defaults_to_what_context_and_pool_leave() -> None:
    assert accept().max_tokens == POOL - len(PROMPT)
    assert accept(pool_tokens=10_000).max_tokens == CONTEXT - len(PROMPT)
    assert accept(put("stop.max_tokens", 10**6), pool_tokens=10_000).max_tokens == CONTEXT - len(PROMPT)


def test_max_tokens_defaults_to_what_nearly_equal_runners_hold() -> None:
    made = validate(request(), text(), POOL, usual_tokens=POOL - 3)
    assert made.max_tokens == POOL - 3 - len(PROMPT) and made.to_submit(1, "").open_ended
    assert validate(request(put("prompt.text", "x" * (POOL - 2))), text(), POOL, usual_tokens=POOL - 3).max_tokens == 2
    asked = validate(request(put("stop.max_tokens", POOL - len(PROMPT))), text(), POOL, usual_tokens=POOL - 3)
    assert asked.max_tokens == POOL - len(PROMPT) and not asked.to_submit(1, "").open_ended


def test_the_longest_prompt_leaves_one_token() -> None:
    assert accept(put("prompt.text", "x" * (CONTEXT - 1)), pool_tokens=10_000).max_tokens == 1


def test_defaults_are_resolved() -> None:
    sampling = accept().sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    assert penalties == (1.0, 0.0, 0.0)
    assert (sampling.bias_ids, sampling.bias_values, sampling.min_tokens) == (b"", b"", 0)
    assert not sampling.HasField("logprobs") and not sampling.HasField("prompt_logprobs")


def test_zeros_are_not_defaults() -> None:
    sampling = accept(put("sampling.temperature", 0.0), put("output.logprobs", 0)).sampling
    assert sampling.temperature == 0.0
    assert sampling.HasField("logprobs") and sampling.logprobs == 0


def test_stop_ids_hold_the_end_of_sequence_unless_it_is_ignored() -> None:
    assert ids(accept(put("stop.token_ids", [5, 3, 5])).sampling.stop_ids) == [3, 5, IM_END_ID]
    assert ids(accept(put("stop.token_ids", [5]), put("stop.ignore_eos", True)).sampling.stop_ids) == [5]
    assert ids(accept(put("stop.ignore_eos", True)).sampling.stop_ids) == []


def test_bias_columns_are_sorted_and_paired() -> None:
    sampling = accept(put("sampling.logit_bias", {9: 1.5, 2: -100.0})).sampling
    assert ids(sampling.bias_ids) == [2, 9]
    assert np.frombuffer(sampling.bias_values, dtype="<f4").tolist() == [-100.0, 1.5]


def test_a_complete_continuation_is_left_to_the_engine() -> None:
    assert accept(put("received_token_ids", [1, IM_END_ID])).received == [1, IM_END_ID]
    assert accept(put("received_token_ids", [1, 2]), put("stop.max_tokens", 2)).received == [1, 2]
    early = accept(put("received_token_ids", [IM_END_ID, 1]), put("stop.ignore_eos", True))
    assert early.received == [IM_END_ID, 1]


@pytest.mark.parametrize(
    ("changes", "remaining_ms", "expected"),
    [
        ([], None, None),
        ([], 50, 50),
        ([], -3, 1),
        ([], 2**40, 2**32 - 1),
        ([put("timeout_ms", 70)], None, 70),
        ([put("timeout_ms", 70)], 50, 50),
        ([put("timeout_ms", 70)], 90, 70),
    ],
)
def test_the_earlier_of_timeout_and_deadline_counts(
    changes: list[Change], remaining_ms: int | None, expected: int | None
) -> None:
    valid = accept(*changes, remaining_ms=remaining_ms)
    assert valid.timeout_ms == expected
    assert valid.to_submit(1, "").HasField("timeout_ms") == (expected is not None)


def test_keep_ms_counts_only_with_keep() -> None:
    keep = put("on_disconnect", inference_pb2.ON_DISCONNECT_KEEP)
    assert accept(put("keep_ms", 5)).keep_ms == 0
    assert accept(keep).keep_ms == 60_000
    assert accept(keep, put("keep_ms", 5)).keep_ms == 5


def test_the_submit_carries_everything() -> None:
    valid = accept(
        put("request_id", "r1"),
        put("n", 1),
        put("priority", -5),
        put("received_token_ids", [104, 105]),
        put("stop.max_tokens", 9),
        put("sampling.seed", 0),
        put("ttft_target_ms", 100),
        put("itl_target_ms", 10),
        put("timeout_ms", 1000),
        put("speculate", False),
        put("conversation_id", "c"),
        put("kv_retain_s", 0.0),
        put("next_turn_s", 2.5),
    )
    submit = valid.to_submit(77, "tenant")
    assert (submit.handle, submit.tenant, submit.request_id) == (77, "tenant", "r1")
    assert Request.FromString(submit.body) == valid.body
    assert (ids(submit.prompt), ids(submit.received)) == (list(PROMPT.encode()), [104, 105])
    assert submit.sampling == valid.sampling
    assert (submit.n, submit.max_tokens, submit.priority, submit.keep_ms) == (1, 9, -5, 0)
    assert submit.HasField("seed") and submit.seed == 0
    assert (submit.ttft_target_ms, submit.itl_target_ms, submit.timeout_ms) == (100, 10, 1000)
    assert (submit.conversation_id, submit.kv_retain_s, submit.next_turn_s) == ("c", 0, 2.5)
    assert submit.HasField("kv_retain_s")
    assert submit.no_speculation and not accept(put("speculate", True)).to_submit(1, "").no_speculation
    bare = accept().to_submit(1, "")
    assert not bare.no_speculation
    assert not any(bare.HasField(name) for name in ("seed", "ttft_target_ms", "itl_target_ms", "timeout_ms"))
    assert not any(bare.HasField(name) for name in ("kv_retain_s", "next_turn_s"))


def test_an_id_is_drawn_when_there_is_none() -> None:
    drawn = {accept().request_id for _ in range(20)}
    assert len(drawn) == 20 and "" not in drawn


def test_the_digest_ignores_the_id_and_nothing_else() -> None:
    base = digest(request())
    assert digest(request(put("request_id", "a"))) == base == digest(request(put("request_id", "b")))
    bias = {number: float(number) for number in range(50)}
    forward, backward = put("sampling.logit_bias", bias), put("sampling.logit_bias", dict(reversed(bias.items())))
    assert digest(request(forward)) == digest(request(backward))
    changes = [
        put("prompt.text", "other"),
        put("n", 1),
        put("priority", 0),
        put("sampling.seed", 1),
        put("stop.strings", ["a"]),
        put("received_token_ids", [1]),
        put("output.logprobs", 0),
        put("timeout_ms", 5),
        put("speculate", False),
        put("speculate", True),
        forward,
    ]
    assert len({base, *(digest(request(change)) for change in changes)}) == len(changes) + 1


def test_validation_leaves_the_request_as_it_was() -> None:
    made = request(put("received_token_ids", [1]))
    before = Request.FromString(made.SerializeToString())
    validate(made, text(), POOL).to_submit(1, "")
    assert made == before


def test_text_that_is_no_utf8_never_gets_here() -> None:
    wire = request(put("prompt.text", "??")).SerializeToString().replace(b"??", b"\xff\xfe")
    with pytest.raises(DecodeError):
        Request.FromString(wire)


def test_a_huge_prompt_is_refused_without_being_tokenized() -> None:
    """16 MB would take seconds to tokenize."""
    huge = inference_pb2.Prompt(text="x" * (16 << 20))
    begin = time.process_time()
    with pytest.raises(Refusal, match="cannot fit"):
        prompt_tokens(huge, text())
    chat = inference_pb2.Prompt()
    chat.chat.messages.add(role="user").parts.add(text=huge.text)
    with pytest.raises(Refusal, match="cannot fit"):
        prompt_tokens(chat, text())
    assert time.process_time() - begin < 0.5


def test_a_tokenizer_beyond_the_vocabulary_is_caught() -> None:
    """A token of the tokenizer that is outside the model's vocabulary never reaches the runner."""
    small = byte_model("byte", "Byte", VOCAB, CONTEXT)
    small.vocab_size = 200
    with pytest.raises(Refusal) as caught:
        prompt_tokens(inference_pb2.Prompt(text="a😀"), ModelText(small))
    assert caught.value.field == "prompt.text"

"""Generated requests against validation: each is accepted, or refused with a sentence and a field.

CI runs 10,000; a million: `ROSTER_FUZZ_REQUESTS=1000000 pytest tests/fuzz/test_requests.py`.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message

from roster_protos import engine_pb2, inference_pb2
from runner_svc.backends.byte_tokenizer import byte_model
from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.request.validation import ValidRequest, validate
from scheduler_svc.front.text.tokenizer import ModelText
from tests.support.front_stack import front_stack
from tests.support.random_messages import flipped, random_message, spoilt
from tests.support.thoroughness import count

REQUESTS = int(os.environ.get("ROSTER_FUZZ_REQUESTS", count(20000, in_ci=10000)))
SEED = int(os.environ.get("ROSTER_FUZZ_SEED", random.randrange(1 << 32)))
VOCAB, CONTEXT, POOL = 300, 128, 100
CLEAN = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)

Request = inference_pb2.GenerateRequest


def plausible(rng: random.Random) -> Request:
    """Returns a request that a client might send."""
    request = Request(request_id=rng.choice(("", "mine")))
    kind = rng.randrange(3)
    if kind == 0:
        request.prompt.text = "hello " * rng.randrange(1, 20)
    elif kind == 1:
        request.prompt.token_ids.ids.extend(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 120)))
    else:
        message = request.prompt.chat.messages.add(role="user")
        message.parts.add(text="hi 🙂 <|im_end|>")
    request.stop.max_tokens = rng.randrange(1, 200)
    request.sampling.temperature = rng.random()
    request.sampling.logit_bias[rng.randrange(VOCAB)] = rng.uniform(-1, 1)
    request.stop.strings.append("stop")
    request.output.logprobs = rng.randrange(5)
    request.n = rng.randrange(1, 4)
    return request


def generated(rng: random.Random) -> Request:
    """Returns a hostile request. Raises DecodeError if protobuf cannot parse it."""
    way = rng.random()
    if way < 0.35:
        return random_message(rng, Request, density=rng.choice((0.05, 0.15, 0.4)))
    request = plausible(rng)
    if way < 0.75:
        return spoilt(rng, request, rng.randrange(0, 3))
    return Request.FromString(flipped(rng, request.SerializeToString()))


def check_valid(valid: ValidRequest) -> None:
    """Checks the properties on which the engine and the runner rely."""
    submit = engine_pb2.Submit.FromString(valid.to_submit(1, "tenant").SerializeToString())
    prompt, received = np.frombuffer(submit.prompt, "<i4"), np.frombuffer(submit.received, "<i4")
    assert len(prompt) >= 1 and prompt.min() >= 0 and prompt.max() < VOCAB
    assert not len(received) or (received.min() >= 0 and received.max() < VOCAB and submit.n == 1)
    assert len(received) <= submit.max_tokens and submit.max_tokens >= 1
    # A request with received tokens may wait for a runner that can hold it, if its client has set its length.
    assert len(prompt) + submit.max_tokens <= (CONTEXT if len(received) else min(CONTEXT, POOL))
    assert 1 <= submit.n <= 64 and -100 <= submit.priority <= 100 and 1 <= len(submit.request_id.encode()) <= 128
    sampling = submit.sampling
    numbers = [sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty]
    numbers += [sampling.presence_penalty, sampling.frequency_penalty, *np.frombuffer(sampling.bias_values, "<f4")]
    assert np.isfinite(numbers).all() and sampling.temperature >= 0 and sampling.repetition_penalty > 0
    for column in (sampling.bias_ids, sampling.stop_ids):
        ids = np.frombuffer(column, "<i4")
        assert not len(ids) or (ids.min() >= 0 and ids.max() < VOCAB)


def test_generated_requests_are_served_or_refused_cleanly() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    text = ModelText(byte_model("byte", "Byte", VOCAB, CONTEXT))
    counts: Counter[str] = Counter()
    for number in range(REQUESTS):
        try:
            request = generated(rng)
        except DecodeError:
            counts["undecodable"] += 1
            continue
        try:
            valid = validate(request, text, POOL, rng.choice((None, 0, 1, 10**9)))
        except Refusal as refusal:
            assert refusal.code in CLEAN, (number, refusal.code, refusal.message)
            assert refusal.field and refusal.message.startswith(f"{refusal.field}: "), (number, refusal.message)
            assert len(refusal.message) < 2000 and refusal.trailing_metadata() and refusal.session_status()
            counts["refused"] += 1
        except Exception as error:
            raise AssertionError(f"request {number} of seed {SEED}: {error!r}\n{str(request)[:2000]}") from error
        else:
            check_valid(valid)
            counts["served"] += 1
    text.close()
    print(dict(counts))
    assert counts["served"] > REQUESTS / 40 and counts["refused"] > REQUESTS / 5


async def test_bytes_on_every_method_get_a_clean_status() -> None:
    """Over gRPC, arbitrary bytes get a client error, and the next request is served."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    kinds: dict[str, type[Message]] = {
        "Generate": Request, "Attach": inference_pb2.AttachRequest, "Cancel": inference_pb2.CancelRequest,
        "GetModel": inference_pb2.GetModelRequest, "Tokenize": inference_pb2.TokenizeRequest,
        "Detokenize": inference_pb2.DetokenizeRequest,
    }  # fmt: skip
    allowed = {*CLEAN, grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS}
    allowed |= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED}
    statuses: Counter[grpc.StatusCode] = Counter()
    async with front_stack(step_s=0.0005) as stack:
        for number in range(400):
            name = rng.choice(list(kinds))
            data = random_message(rng, kinds[name]).SerializeToString()
            if rng.random() < 0.6:
                data = rng.choice((flipped(rng, data), rng.randbytes(rng.randrange(1, 200))))
            streams = name in ("Generate", "Attach")
            factory: Any = stack.channel.unary_stream if streams else stack.channel.unary_unary
            call = factory(f"/roster.v1.InferenceService/{name}")(data, timeout=5)
            try:
                if streams:
                    async for _ in call:
                        break
                    call.cancel()
                    continue
                await call
            except grpc.aio.AioRpcError as error:
                assert error.code() in allowed, (number, SEED, name, error.code(), error.details())
                statuses[error.code()] += 1
        session = stack.channel.stream_stream("/roster.v1.InferenceService/Session")()
        await session.write(b"\x0a\xff\xff")
        assert await session.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert [message async for message in stack.stub.Generate(plausible_text())]
    assert statuses[grpc.StatusCode.INVALID_ARGUMENT] > 50


def plausible_text() -> Request:
    return Request(prompt=inference_pb2.Prompt(text="still there"), stop=inference_pb2.StopConditions(max_tokens=3))

"""The gateway's service over real gRPC with a fake engine: the answers to a gateway and the engine's commands."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc
from tokenizers import Tokenizer

from roster_protos import engine_pb2, inference_pb2, inference_pb2_grpc
from tests.support.front_stack import CONTEXT_LENGTH, VOCAB_SIZE, FrontStack, front_stack
from tests.support.pieces import in_pieces_async

PROMPT = list(b"The prompt, over and over. ")


@pytest.fixture
async def stack() -> AsyncIterator[FrontStack]:
    async with front_stack() as opened:
        yield opened


@pytest.fixture
def stub(stack: FrontStack) -> vllm_grpc.VllmEngineStub:
    return vllm_grpc.VllmEngineStub(stack.channel)


def asked(stream: bool = True, request_id: str = "r", **params: object) -> vllm.GenerateRequest:
    params = {"max_tokens": 30, "temperature": 0.0, **params}
    return vllm.GenerateRequest(
        request_id=request_id,
        tokenized=vllm.TokenizedInput(input_ids=PROMPT),
        sampling_params=vllm.SamplingParams(**params),
        stream=stream,
    )


def echo(count: int) -> list[int]:
    return [PROMPT[index % len(PROMPT)] for index in range(count)]


async def gathered(
    stub: vllm_grpc.VllmEngineStub, request: vllm.GenerateRequest
) -> tuple[list[vllm.GenerateStreamChunk], list[vllm.GenerateComplete]]:
    answers = [answer async for answer in stub.Generate(request)]
    kinds = [answer.WhichOneof("response") for answer in answers]
    assert kinds == sorted(kinds), "a chunk follows a complete"
    chunks = [answer.chunk for answer in answers if answer.HasField("chunk")]
    return chunks, [answer.complete for answer in answers if answer.HasField("complete")]


async def refusal(stub: vllm_grpc.VllmEngineStub, request: vllm.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await gathered(stub, request)
    return refused.value.code(), refused.value.details() or ""


async def test_streams_deltas_and_one_complete_a_choice(stack: FrontStack, stub: vllm_grpc.VllmEngineStub) -> None:
    async def more_slowly() -> tuple[list[vllm.GenerateStreamChunk], list[vllm.GenerateComplete]]:
        stack.engine.step_s = min(0.1, 2 * stack.engine.step_s)
        return await gathered(stub, asked(n=3, logprobs=2))

    chunks, completes = await in_pieces_async(more_slowly, lambda answer: answer[0], least=4)
    for index in range(3):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert [token for chunk in own for token in chunk.token_ids] == echo(30)
        assert own[-1].completion_tokens == 30
        assert {chunk.prompt_tokens for chunk in own} == {len(PROMPT)}
        for chunk in own:
            assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)
            assert list(chunk.output_logprobs.token_logprobs) == pytest.approx([-t / 256 for t in chunk.token_ids])
            assert [list(top.token_ids) for top in chunk.output_logprobs.top_logprobs] == [
                [(token + 1) % 256, (token + 2) % 256] for token in chunk.token_ids
            ]
    assert [complete.index for complete in completes] == [0, 1, 2]
    for complete in completes:
        assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 27, 30)
        assert complete.cached_tokens == 3
        drafts = (complete.spec_draft_tokens, complete.spec_accepted_tokens)
        assert drafts == ((4 * len(completes), 2 * len(completes)) if complete.index == 0 else (0, 0))
        assert not complete.output_ids and not complete.HasField("output_logprobs")


async def test_unary_answers_hold_everything(stub: vllm_grpc.VllmEngineStub) -> None:
    chunks, completes = await gathered(stub, asked(stream=False, n=2, logprobs=1, prompt_logprobs=1))
    assert chunks == []
    for complete in completes:
        assert list(complete.output_ids) == list(complete.output_logprobs.token_ids) == echo(30)
        assert len(complete.output_logprobs.top_logprobs) == 30
        first, *others = complete.input_logprobs.token_logprobs
        assert not first.HasField("value")
        assert [item.value for item in others] == pytest.approx([-token / 256 for token in PROMPT[1:]])
        assert list(complete.input_logprobs.token_ids) == PROMPT


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_strings_are_found_here(stack: FrontStack, stub: vllm_grpc.VllmEngineStub, stream: bool) -> None:
    chunks, (complete,) = await gathered(stub, asked(stream, max_tokens=1000, stop=["over"]))
    tokens = [token for chunk in chunks for token in chunk.token_ids] or list(complete.output_ids)
    assert tokens == list(b"The prompt, over")
    assert (complete.finish_reason, complete.matched_stop_str, complete.completion_tokens) == ("stop", "over", 16)
    assert len(stack.engine.commands_of("cut")) == 1


async def test_parameters_reach_the_engine(stack: FrontStack, stub: vllm_grpc.VllmEngineStub) -> None:
    params = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5}
    await gathered(stub, asked(**params, seed=-1, stop_token_ids=[9], min_tokens=2, logit_bias={5: 1.0}))
    (command,) = stack.engine.commands_of("submit")
    sampling = command.submit.sampling
    assert {name: getattr(sampling, name) for name in params} == params
    assert (command.submit.seed, command.submit.request_id, sampling.min_tokens) == (2**64 - 1, "r", 2)


async def test_absent_parameters_take_our_defaults(stack: FrontStack, stub: vllm_grpc.VllmEngineStub) -> None:
    request = vllm.GenerateRequest(request_id="r", text="Hi", sampling_params=vllm.SamplingParams(stop=["H"]))
    _, (complete,) = await gathered(stub, request)
    assert complete.matched_stop_str == "H"
    submit = stack.engine.commands_of("submit")[0].submit
    assert (submit.n, submit.max_tokens) == (1, CONTEXT_LENGTH - 2)
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0, 1.0)


async def test_hints_of_a_conversation_reach_the_engine(stack: FrontStack, stub: vllm_grpc.VllmEngineStub) -> None:
    request = asked(max_tokens=2)
    request.kv_transfer_params_json = '{"conversation_id": "c", "kv_retain_s": 60, "next_turn_s": 0.5}'
    await gathered(stub, request)
    submit = stack.engine.commands_of("submit")[0].submit
    assert (submit.conversation_id, submit.kv_retain_s, submit.next_turn_s) == ("c", 60, 0.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "it is not JSON"),
        ("[]", "this server does not transfer KV between workers"),
        ('{"do_remote_decode": true}', "and send at most conversation_id, kv_retain_s, next_turn_s"),
        ('{"conversation_id": 3}', "kv_transfer_params.conversation_id: it is 3; send a string"),
        ('{"kv_retain_s": "long"}', "it is 'long'; send a number of seconds"),
        ('{"next_turn_s": true}', "it is True; send a number of seconds"),
        ('{"next_turn_s": -1}', "next_turn_s: -1 is out of range"),
    ],
)
async def test_wrong_hints_are_refused(stub: vllm_grpc.VllmEngineStub, text: str, words: str) -> None:
    request = asked()
    request.kv_transfer_params_json = text
    code, message = await refusal(stub, request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT and words in message


@pytest.mark.parametrize(
    "params",
    [
        {"regex": "a" * 70_000},
        {"structural_tag": "{}"},
        {"logprobs": -1},
        {"logit_bias": {-1: 1.0}},
        {"truncate_prompt_tokens": 3},
        {"temperature": -1.0},
        {"max_tokens": 0},
    ],
)
async def test_unsupported_options_are_refused(stub: vllm_grpc.VllmEngineStub, params: dict[str, object]) -> None:
    code, message = await refusal(stub, asked(**params))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert next(iter(params)) in message


@pytest.mark.parametrize(
    ("params", "kind", "part"),
    [
        ({"json_schema": '{"type": "null"}'}, "json_schema", '"type": "null"'),
        ({"json_object": True}, "json_schema", '"type": "object"'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'root ::= "a"'}, "grammar", "root"),
        ({"choice": vllm.ChoiceConstraint(choices=["yes", "no"])}, "grammar", "yes"),
        (
            {"structural_tag": '{"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}'},
            "grammar",
            "</a>",
        ),
        ({"json_object": False}, "", ""),
    ],
)
async def test_constraints_reach_the_engine(
    stack: FrontStack, stub: vllm_grpc.VllmEngineStub, params: dict[str, object], kind: str, part: str
) -> None:
    await gathered(stub, asked(**params))
    (command,) = stack.engine.commands_of("submit")
    assert part in command.submit.grammar and bool(part) == bool(command.submit.grammar)
    assert command.submit.grammar_kind == kind


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
async def test_the_engines_refusal_is_the_calls_status(
    stack: FrontStack, stub: vllm_grpc.VllmEngineStub, code: grpc.StatusCode
) -> None:
    stack.engine.refuse = lambda submit: engine_pb2.Refused(code=code.value[0], message="later")
    assert await refusal(stub, asked()) == (code, "later")


async def test_a_passed_deadline_is_a_status(stub: vllm_grpc.VllmEngineStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for _ in stub.Generate(asked(stream=False, max_tokens=4000), timeout=0.3):
            pass
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_abort_ends_a_request_and_ignores_others(stack: FrontStack, stub: vllm_grpc.VllmEngineStub) -> None:
    call = aiter(stub.Generate(asked(max_tokens=4000, request_id="mine")))
    assert (await anext(call)).HasField("chunk")
    await stub.Abort(vllm.AbortRequest(request_ids=["another", "mine", "mine"]))
    async with asyncio.timeout(10):
        answers = [answer async for answer in call]
    assert answers[-1].complete.finish_reason == "abort"


async def test_a_client_that_leaves_ends_its_request(stack: FrontStack, stub: vllm_grpc.VllmEngineStub) -> None:
    call = stub.Generate(asked(stream=False, max_tokens=4000))
    async with asyncio.timeout(10):
        while not stack.engine.commands_of("submit"):
            await asyncio.sleep(0.005)
        call.cancel()
        while not stack.engine.commands_of("disconnect"):
            await asyncio.sleep(0.005)


async def test_the_tokenizer_comes_as_a_bundle(stub: vllm_grpc.VllmEngineStub) -> None:
    chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert Tokenizer.from_buffer(files["tokenizer.json"]).encode("ab").ids == [97, 98]
    config = json.loads(files["config.json"])
    assert (config["vocab_size"], config["max_position_embeddings"]) == (VOCAB_SIZE, CONTEXT_LENGTH)
    assert "im_start" in json.loads(files["tokenizer_config.json"])["chat_template"]


async def test_it_describes_itself(stack: FrontStack, stub: vllm_grpc.VllmEngineStub) -> None:
    model = await stub.GetModelInfo(vllm.GetModelInfoRequest())
    assert (model.served_model_name, model.max_context_length, model.vocab_size) == ("fake", CONTEXT_LENGTH, VOCAB_SIZE)
    assert (list(model.eos_token_ids), model.pad_token_id) == ([257], 258)
    assert (await stub.GetServerInfo(vllm.GetServerInfoRequest())).active_requests == 7
    (load,) = (await stub.GetLoads(vllm.GetLoadsRequest())).loads
    assert load.num_waiting_reqs == 7
    assert (await stub.FlushCache(common_pb2.FlushCacheRequest())).success
    assert len(stack.engine.commands_of("flush_prefixes")) == 1


async def test_health_follows_readiness(stack: FrontStack, stub: vllm_grpc.VllmEngineStub) -> None:
    assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
    draining = engine_pb2.ModelState()
    draining.CopyFrom(stack.engine.state)
    draining.draining = True
    stack.engine.state = draining
    async with asyncio.timeout(10):
        while (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy:
            await asyncio.sleep(0.01)


async def test_without_a_model_calls_are_unavailable() -> None:
    async with front_stack(with_model=False) as stack:
        stub = vllm_grpc.VllmEngineStub(stack.channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:  # a gateway registers a worker on any answer
            await stub.HealthCheck(vllm.HealthCheckRequest(), wait_for_ready=True)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        code, _ = await refusal(stub, asked())
        assert code is grpc.StatusCode.UNAVAILABLE


async def test_the_service_may_have_an_address_of_its_own() -> None:
    async with front_stack(gateway_apart=True) as stack, grpc.aio.insecure_channel(stack.gateway_address) as channel:
        stub = vllm_grpc.VllmEngineStub(channel)
        assert (await stub.HealthCheck(vllm.HealthCheckRequest(), wait_for_ready=True)).healthy
        _, (complete,) = await gathered(stub, asked())
        assert complete.completion_tokens == 30
        for call in (
            vllm_grpc.VllmEngineStub(stack.channel).HealthCheck(vllm.HealthCheckRequest()),
            inference_pb2_grpc.InferenceServiceStub(channel).GetModel(inference_pb2.GetModelRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

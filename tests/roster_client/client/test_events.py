from __future__ import annotations

import random

import pytest

from roster_client.client.errors import StreamGapError
from roster_client.client.events import Assembler, Choice, Delta, Finish, FinishReason, Started, TokenLogprobs, Usage
from roster_protos import inference_pb2 as pb


def test_random_interleavings_assemble_to_the_same_answers() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    answers = [[rng.randrange(100) for _ in range(rng.randrange(30))] for _ in range(rng.randrange(1, 6))]
    cursors = [0] * len(answers)
    assembler, events = Assembler(), 0
    while any(cursor < len(answer) for cursor, answer in zip(cursors, answers, strict=True)):
        response = pb.GenerateResponse()
        for index, answer in enumerate(answers):
            tokens = answer[cursors[index] : cursors[index] + rng.randrange(4)]
            if tokens:
                response.deltas.add(
                    index=index, first_index=cursors[index], token_ids=tokens, text="".join(f"{t}," for t in tokens)
                )
                cursors[index] += len(tokens)
        events += len(list(assembler.events(response)))
    for index, answer in enumerate(answers):
        if answer:
            choice = assembler.completion.choices[index]
            assert choice == Choice(index, "".join(f"{t}," for t in answer), answer)
    assert assembler.received[: len(answers)] == [len(answer) for answer in answers[: len(assembler.received)]]
    assert events >= sum(bool(answer) for answer in answers)


@pytest.mark.parametrize("first_index", [0, 1, 3])
def test_a_gap_or_a_repetition_raises(first_index: int) -> None:
    assembler = Assembler()
    list(assembler.events(pb.GenerateResponse(deltas=[pb.Delta(first_index=0, token_ids=[5, 6], text="ab")])))
    with pytest.raises(StreamGapError, match="expected 2"):
        list(assembler.events(pb.GenerateResponse(deltas=[pb.Delta(first_index=first_index, token_ids=[7])])))


def test_cursors_of_an_earlier_stream_count() -> None:
    assembler = Assembler((3, 1))
    deltas = [pb.Delta(index=1, first_index=1, token_ids=[9]), pb.Delta(index=0, first_index=3, token_ids=[8, 7])]
    assert len(list(assembler.events(pb.GenerateResponse(deltas=deltas)))) == 2
    assert assembler.received == [5, 2]


def test_every_kind_of_event() -> None:
    logprobs = pb.Logprobs(sampled=[-0.5, -1], top=2, top_token_ids=[1, 2, 3, 4], top_logprobs=[-0.5, -2, -0.25, -1])
    response = pb.GenerateResponse(
        request_id="r",
        prompt=pb.PromptInfo(token_ids=[4, 5], logprobs=pb.Logprobs(sampled=[-2])),
        deltas=[pb.Delta(token_ids=[1, 4], text="ab", logprobs=logprobs)],
        finishes=[pb.Finish(reason=pb.FINISH_REASON_STOP, stop_string="", num_tokens=2)],
        usage=pb.Usage(prompt_tokens=2, completion_tokens=2, cached_tokens=1, drafted_tokens=5, accepted_tokens=1),
    )
    assembler = Assembler()
    started, delta, finish, usage = assembler.events(response)
    assert started == Started("r", (4, 5), (TokenLogprobs(-2, ()),))
    assert isinstance(delta, Delta)
    assert delta.logprobs == (TokenLogprobs(-0.5, ((1, -0.5), (2, -2))), TokenLogprobs(-1, ((3, -0.25), (4, -1))))
    # A matched empty stop string differs from no match.
    assert finish == Finish(0, FinishReason.STOP, 2, stop_string="", stop_token_id=None)
    assert usage == Usage(2, 2, 1, 5, 1)
    completion = assembler.completion
    assert (completion.request_id, completion.text, completion.usage) == ("r", "ab", usage)
    assert completion.choices[0].finish == finish and completion.choices[0].logprobs == list(delta.logprobs)


def test_data_of_the_prompt_may_follow_the_acceptance() -> None:
    """As in a session; a resumed stream repeats the data."""
    prompt = pb.PromptInfo(token_ids=[4, 5], logprobs=pb.Logprobs(sampled=[-2]))
    assembler = Assembler()
    assert list(assembler.events(pb.GenerateResponse(request_id="r"))) == [Started("r")]
    expected = Started("r", (4, 5), (TokenLogprobs(-2, ()),))
    assert list(assembler.events(pb.GenerateResponse(prompt=prompt))) == [expected]
    assert not list(assembler.events(pb.GenerateResponse(request_id="r")))
    assert not list(assembler.events(pb.GenerateResponse(prompt=prompt)))
    assert assembler.completion.started == expected


def test_every_finish_reason_has_a_name() -> None:
    sent = {value for value in pb.FinishReason.values() if value != pb.FINISH_REASON_UNSPECIFIED}
    assert sent == {reason.value for reason in FinishReason}

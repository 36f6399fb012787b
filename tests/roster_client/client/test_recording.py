"""A record has what a replay needs, exactly; an answer that differs is described by its first token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from roster_client.client.events import Choice, Completion, Finish, FinishReason, Started, TokenLogprobs, Usage
from roster_client.client.recording import TOP, RecordedChoice, Recording, difference, recordable
from roster_client.client.requests import build_request
from roster_protos import inference_pb2 as pb

TENTH = 0.10000000149011612
"""0.1 in float32."""
SCORES = [TokenLogprobs(-TENTH, ((5, -TENTH), (6, -3.5))), TokenLogprobs(-1.25, ((7, -1.25),))]


def recording() -> Recording:
    request = build_request("hello", {"temperature": 0.5, "max_tokens": 2, "request_id": "mine"})
    recordable(request)
    completion = Completion(
        "mine", Started("mine", (3, 4)), [Choice(0, "ab", [5, 7], SCORES)], Usage(2, 2, 0, numerics="6b17")
    )
    return Recording.of(request, completion, pb.GetModelResponse(name="tiny"))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, written = tmp_path / "one.json", recording()
    written.write(path)
    read = Recording.read(path)
    assert read == written
    assert (read.model, read.numerics, read.choices[0].logprobs) == ("tiny", "6b17", SCORES)
    again = read.again()
    assert list(again.prompt.token_ids.ids) == [3, 4] and again.request_id == ""
    assert again.sampling.HasField("seed") and again.sampling.temperature == 0.5
    assert again.output.logprobs == TOP and again.stop.max_tokens == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "is not a record"), ("[]", "is not a record"), ('{"record": 2}', "version 2"), ('{"record": 1}', "request")],
)
def test_what_is_no_record_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(text)
    with pytest.raises(ValueError, match=says):
        Recording.read(tmp_path / "one.json")


def test_a_record_without_scores_is_refused(tmp_path: Path) -> None:
    recording().write(tmp_path / "one.json")
    raw = json.loads((tmp_path / "one.json").read_text())
    raw["choices"][0] |= {"logprobs": [], "top": []}
    (tmp_path / "one.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="tokens without log-probabilities"):
        Recording.read(tmp_path / "one.json")


def test_an_answer_that_is_not_whole_is_not_recorded() -> None:
    with pytest.raises(ValueError, match="not whole"):
        Recording.of(build_request("hello", {}), Completion(), pb.GetModelResponse())


def test_an_answer_that_was_cut_is_not_recorded_nor_is_a_replay_cut() -> None:
    """Where a deadline falls says nothing of the text: a replay would end elsewhere."""
    request = build_request("hello", {"timeout_ms": 5})
    cut = Choice(0, "a", [5], SCORES[:1], Finish(0, FinishReason.DEADLINE, 1))
    completion = Completion("mine", Started("mine", (3, 4)), [cut], Usage(2, 1, 0))
    with pytest.raises(ValueError, match="choice 0 ended by deadline"):
        Recording.of(request, completion, pb.GetModelResponse())
    cut.finish = Finish(0, FinishReason.STOP, 1)
    assert not Recording.of(request, completion, pb.GetModelResponse()).again().HasField("timeout_ms")


def test_the_first_difference_is_told_with_its_size() -> None:
    recorded = RecordedChoice([5, 7], SCORES)
    near = replace(SCORES[0], sampled=-TENTH - 2.0**-20)
    other = TokenLogprobs(-1.5, ((8, -1.5), (7, -1.75)))
    assert difference(recorded, RecordedChoice([5, 7], SCORES)) == ""
    assert difference(recorded, RecordedChoice([5, 7], [near, SCORES[1]])) == (
        "the tokens are equal; log-probabilities differ from token 0 on, by up to 9.54e-07"
    )
    assert difference(recorded, RecordedChoice([5, 8], [SCORES[0], other])) == (
        "token 1 was 7 and is 8: log-probability -1.5, -1.75 of 7 there, -1.25 when recorded"
    )
    assert "7 is not among 20" in difference(recorded, RecordedChoice([5, 8], [near, replace(other, top=())]))
    assert difference(recorded, RecordedChoice([5], SCORES[:1])) == "it had 2 tokens and has 1"

"""Tokens that a grammar forces: fewer steps, and the stream, the ends and the log-probabilities of one token a step."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
import torch

from roster_common.link_protocol import FORCED, OURS
from roster_protos import admin_pb2, plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.sampling.sampler import _row_logprobs
from scheduler_svc.constrained.process import masks
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.plan.drafted_result import certain
from scheduler_svc.plan.plan_draft import pack
from tests.scheduler_svc.constrained.test_constraints import EOS_PROBABILITY, backend, sampling, submit, text_of
from tests.support.fake_links import WORKER
from tests.support.in_process import Stack, Submitted
from tests.support.json_schemas import random_schema
from tests.support.lockstep import advance, advance_until_idle
from tests.support.mask_handles import dies_once
from tests.support.thoroughness import choice, count

LONG = "(foo|bar)bazqux(x|y)"
"""One free token, 8 forced ones, a free one, and the end."""


def make_stack(*, forces: bool = True, num_blocks: int = 64, slots: int = 4, **settings: object) -> Stack:
    stack = Stack(forced_tokens=forces, **settings)
    stack.add_runner(backend(slots, num_blocks))
    stack.step()
    return stack


def sent_until_idle(stack: Stack) -> list[plan_pb2.Plan]:
    """Advances until idle; returns the plans sent."""
    sent, send = [], stack.runners.send_plan

    def record(session: int, number: int, plan: plan_pb2.Plan) -> None:
        sent.append(plan)
        send(session, number, plan)

    stack.runners.send_plan = record  # type: ignore[method-assign]
    advance_until_idle(stack)
    return sent


def appended(plan: plan_pb2.Plan) -> list[int]:
    return np.frombuffer(plan.forced_tokens, "<i4").tolist()


def ended(request: Submitted) -> tuple[list[int], FinishReason]:
    (stream,) = request.streams
    assert stream.end is not None
    return stream.tokens, FinishReason(stream.end.reason)


@pytest.mark.parametrize("waits", [False, True])
def test_a_run_takes_one_step(waits: bool) -> None:
    """Without a look ahead the first token of a run is drawn by its mask, and the others come together."""
    stack = make_stack(depth=1)
    stack.engine.constraints.masks.looking_ahead.pays = lambda sequences, running: waits  # type: ignore[method-assign]
    stack.engine.watchers.of_steps.add(WORKER)
    request = submit(stack, "regex", LONG)
    sent = sent_until_idle(stack)
    tokens, reason = ended(request)
    assert tokens == request.expected(0, EOS_PROBABILITY) and reason is FinishReason.STOP and len(tokens) == 11
    reports = [message.step_report for message in stack.others if message.HasField("step_report")]
    reported = [(row.forced, row.kind == admin_pb2.ROW_KIND_DECODE) for report in reports for row in report.rows]
    assert [row for row in reported if row[0]] == [(8 if waits else 7, True)] and reported[0] == (0, False)
    runs = [bytes(appended(plan)) for plan in sent if plan.forced_tokens]
    assert runs == [bytes(tokens[1:9] if waits else tokens[2:9])]
    assert len(sent) == (3 if waits else 4)
    totals = stack.engine.snapshots.take_snapshot().status.totals
    assert (totals.forced_tokens, totals.sampled_tokens) == (len(runs[0]), 11)
    assert totals.decode_rows == len(sent) - 1 and totals.prefill_tokens == 3
    stack.assert_clean()


@pytest.mark.parametrize("without", ["setting", "runner"])
def test_without_the_setting_or_the_runners_feature_no_token_is_appended(without: str) -> None:
    stack = Stack(forced_tokens=without != "setting")
    if without == "runner":
        stack.runners.features = sorted(OURS - {FORCED})
    stack.add_runner(backend())
    stack.step()
    request = submit(stack, "regex", LONG)
    sent = sent_until_idle(stack)
    assert ended(request)[0] == request.expected(0, EOS_PROBABILITY)
    assert len(sent) == 11 and not any(plan.extent_forced or plan.forced_tokens for plan in sent)


def test_a_run_that_began_on_one_runner_ends_on_an_older_one() -> None:
    stack = make_stack(depth=1)
    request = submit(stack, "regex", LONG)
    for _ in range(20):
        advance(stack)
        if request.streams and len(request.streams[0].tokens) == 2:
            break
    stack.runners.features = sorted(OURS - {FORCED})
    (session,) = stack.runners.runners
    stack.runners.kill(session, Loss.LEFT)
    stack.add_runner(backend())
    sent = sent_until_idle(stack)
    assert ended(request)[0] == request.expected(0, EOS_PROBABILITY) and not any(plan.extent_forced for plan in sent)


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_within_a_run(max_tokens: int) -> None:
    stack = make_stack()
    request = submit(stack, "regex", LONG, max_tokens=max_tokens)
    advance_until_idle(stack)
    tokens, reason = ended(request)
    assert tokens == request.expected(0, EOS_PROBABILITY) and len(tokens) == max_tokens
    assert reason is (FinishReason.STOP if tokens[-1] == IM_END_ID else FinishReason.LENGTH)
    stack.assert_clean()


@pytest.mark.parametrize("stop", list(b"obazqux"))
def test_a_stop_token_within_a_run_ends_it(stop: int) -> None:
    stack = make_stack()
    chosen = sampling(1.0)
    chosen.stop_ids = pack([IM_END_ID, stop])
    request = submit(stack, "regex", "foobazqux(x|y)", sampling=chosen)
    advance_until_idle(stack)
    tokens, reason = ended(request)
    assert bytes(tokens) == b"foobazqux"[: b"foobazqux".index(stop) + 1] and reason is FinishReason.STOP
    assert request.streams[0].end is not None and request.streams[0].end.stop_token_id == stop


def test_the_context_ends_a_run() -> None:
    stack = Stack()
    sizes = {"num_slots": 2, "block_size": 4, "num_blocks": 8, "max_step_tokens": 16, "context_length": 16}
    stack.add_runner(HashBackend(**sizes))
    stack.step()
    request = submit(stack, "regex", "[xy]a{30}", max_tokens=13, open_ended=True)
    advance_until_idle(stack)
    tokens, reason = ended(request)
    assert bytes(tokens[1:]) == b"a" * 12 and reason is FinishReason.LENGTH


def test_a_stop_string_within_a_run_cuts_it() -> None:
    stack = make_stack(depth=1)
    stack.engine.constraints.masks.looking_ahead.pays = lambda sequences, running: True  # type: ignore[method-assign]
    request = submit(stack, "regex", LONG)
    while not request.streams or len(request.streams[0].tokens) < 9:
        advance(stack)
    first = request.first_sequence_id
    assert request.streams[0].end is None and len(request.streams[0].tokens) == 10, "the run came with one result"
    stack.front.put(cut={"sequence_id": first, "num_tokens": 6, "stop_string": "baz"})
    advance_until_idle(stack)
    (stream,) = request.streams
    assert stream.end is not None and (stream.end.num_tokens, stream.end.stop_string) == (6, "baz")
    stack.assert_clean()


def test_forced_tokens_that_come_too_late_are_not_counted() -> None:
    """The plan with the run is in flight when its sequence ends."""
    stack = make_stack(depth=1)
    stack.engine.constraints.masks.looking_ahead.pays = lambda sequences, running: True  # type: ignore[method-assign]
    request = submit(stack, "regex", LONG)
    while not request.streams or not request.streams[0].tokens:
        advance(stack)
    stack.front.put(cut={"sequence_id": request.first_sequence_id, "num_tokens": 1, "stop_string": "f"})
    advance_until_idle(stack)
    totals = stack.engine.requests.totals
    assert len(request.streams[0].tokens) == totals.sampled_tokens == 1 and totals.forced_tokens == 0


def test_an_answer_that_comes_after_a_cut_is_dropped() -> None:
    stack = make_stack(depth=1)
    request = submit(stack, "regex", "(foo|bar)baz[xy]quxx[ab]")
    while not request.streams or len(request.streams[0].tokens) < 7:
        advance(stack)
        if request.streams and len(request.streams[0].tokens) >= 2:
            stack.late = random.Random()
            stack.late.random = lambda: 0.0  # type: ignore[method-assign]  # requests are made, and no answer comes
            stack.runners.execute(next(iter(stack.runners.runners)))
            if len(request.streams[0].tokens) < 6:
                stack.late = None
    assert len(request.streams[0].tokens) == 7 and stack.engine.constraints.busy
    stack.front.put(cut={"sequence_id": request.first_sequence_id, "num_tokens": 1, "stop_string": "b"})
    stack.step()
    stack.late = None
    advance_until_idle(stack)
    (stream,) = request.streams
    assert stream.end is not None and (stream.end.num_tokens, stream.end.stop_string) == (1, "b")
    stack.assert_clean()


def test_a_run_is_cut_to_the_step_and_to_free_blocks() -> None:
    """Other sequences keep their blocks, and a step its size; what is left of the run comes later."""
    stack = make_stack(depth=2, num_blocks=9)
    stack.engine.constraints.masks.looking_ahead.pays = lambda sequences, running: True  # type: ignore[method-assign]
    tied = [submit(stack, "regex", "[ab]a{20}", prompt=[7, 7, number], max_tokens=14) for number in range(2)]
    sent = sent_until_idle(stack)
    assert all(np.frombuffer(plan.extent_counts, "<i4").sum() <= 16 for plan in sent)
    runs = [count for plan in sent for count in plan.extent_forced if count]
    assert sum(runs) > 12 and len(runs) > 2, runs
    for request in tied:
        assert ended(request)[0] == request.expected(0, EOS_PROBABILITY)
    stack.assert_clean()


def test_a_mask_process_that_dies_gets_the_forced_tokens_again() -> None:
    for after in choice(range(8), in_ci=range(1, 8, 3)):
        stack = make_stack()
        stack.fate = dies_once("masks", after)
        requests = [submit(stack, "regex", LONG, seed=seed) for seed in range(2)]
        advance_until_idle(stack)
        for request in requests:
            assert ended(request)[0] == request.expected(0, EOS_PROBABILITY)


def test_an_answer_that_comes_after_the_runner_was_lost_counts() -> None:
    """The sequence is planned again before the answer about its next mask has come: the second row waits for it."""
    stack = make_stack(depth=1)
    stack.late = random.Random(1)
    stack.late.random = lambda: 0.0  # type: ignore[method-assign]  # no answer comes
    request = submit(stack, "regex", LONG)
    for _ in range(4):
        stack.step()
    (session,) = stack.runners.runners
    stack.runners.kill(session, Loss.LEFT)
    stack.add_runner(backend())
    for _ in range(3):
        advance(stack)
    stack.late = None
    advance_until_idle(stack)
    assert ended(request)[0] == request.expected(0, EOS_PROBABILITY)
    stack.assert_clean()


def test_a_run_that_comes_in_parts_survives_the_loss_of_its_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next part is known before a result has confirmed the one before."""
    monkeypatch.setattr(masks, "MOST_FORCED", 3)
    for turns in choice(range(1, 9), in_ci=(3, 4, 5)):
        stack = make_stack(depth=1)
        request = submit(stack, "regex", LONG)
        advance(stack, turns)
        stack.step()
        (session,) = stack.runners.runners
        stack.runners.kill(session, Loss.LEFT)
        stack.add_runner(backend())
        advance_until_idle(stack)
        assert ended(request)[0] == request.expected(0, EOS_PROBABILITY)


def test_log_probabilities_of_forced_tokens_are_those_of_a_draw() -> None:
    for token, top in itertools.product((0, 1, 2, 77, 258), (0, 1, 3, 20)):
        logits = torch.randn(1, 259)
        logits[0, np.arange(259) != token] = -torch.inf
        drawn = _drawn_logprobs(logits, token, top)
        made = certain(0, token, top)
        assert (made.values, made.top_ids, made.top_values) == (drawn.values, drawn.top_ids, drawn.top_values)


def _drawn_logprobs(logits: torch.Tensor, token: int, top: int) -> plan_pb2.RowLogprobs:
    return _row_logprobs(logits, np.array([token], np.int32), 0, 0, top)


def test_each_forced_token_has_its_log_probabilities() -> None:
    stack = make_stack()
    request = submit(stack, "regex", LONG, sampling=sampling(1.0, logprobs=2))
    advance_until_idle(stack)
    assert ended(request)[0] == request.expected(0, EOS_PROBABILITY)  # the stack checks each token's


@pytest.mark.parametrize("seed", range(count(40, in_ci=2)))
def test_random_constraints_give_the_same_stream_with_and_without(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers late or not, plans that wait for them or not, runs whole or in parts, too few blocks, and runners and
    schedulers that die."""
    rng = random.Random(seed)
    monkeypatch.setattr(masks, "MOST_FORCED", rng.choice([1, 3, 64]))
    wanted = []
    for number in range(6):
        kind = rng.choice(["json_schema", "json_schema", "regex"])
        text = json.dumps(random_schema(rng)) if kind == "json_schema" else _regex(rng)
        options = {"seed": rng.randrange(99), "n": rng.choice([1, 1, 2]), "prompt": [rng.randrange(4)] * (1 + number)}
        chosen = sampling(rng.choice([0.0, 1.0]), rng.choice([0, 0, 20]), **rng.choice([{}, {"logprobs": 2}]))
        chosen.stop_ids = pack([IM_END_ID, *rng.sample(range(32, 127), rng.choice([0, 0, 2]))])
        wanted.append((kind, text, rng.randrange(1, 90), options, chosen))
    answers = []
    for forces in (False, True):
        stack = make_stack(forces=forces, depth=rng.randrange(1, 4), num_blocks=rng.randrange(40, 64))
        requests = []
        for kind, text, max_tokens, options, chosen in wanted:
            fields = {"grammar": text, "grammar_kind": kind, "sampling": chosen, **options}
            requests.append(stack.submit(fields.pop("prompt"), max_tokens, **fields))
        stack.step()
        stack.late = rng if forces else None
        for _ in range(3 * forces):
            for _ in range(rng.randrange(1, 50)):
                stack.turn(rng)
            if rng.random() < 0.4:
                stack.runners.kill(rng.choice(list(stack.runners.runners)), Loss.LEFT)
                stack.add_runner(backend())
            elif rng.random() < 0.4:
                stack.restart_scheduler()
        advance_until_idle(stack)
        stack.late = None
        stack.assert_clean()
        answers.append([[(s.tokens, s.end.reason if s.end else 0) for s in r.streams] for r in requests])
        if forces:
            assert stack.restarts or stack.engine.requests.totals.forced_tokens
    assert answers[0] == answers[1]


def _regex(rng: random.Random) -> str:
    pieces = ["foo", "[ab]", "(yes|no)", "x{3}", "(aa)*b", "[0-9]{2}", "qux", "(c|cc)"]
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 8)))


def test_the_text_of_a_schema_is_whole() -> None:
    stack = make_stack()
    schema = {"type": "object", "properties": {"a_long_name": {"const": 12}}, "required": ["a_long_name"]}
    request = submit(stack, "json_schema", json.dumps({**schema, "additionalProperties": False}))
    sent = sent_until_idle(stack)
    assert text_of(ended(request)[0]) == '{"a_long_name": 12}' and len(sent) == 3

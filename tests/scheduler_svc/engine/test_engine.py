"""The engine's guarantees to a front worker: refusals, cancels, deadlines, cuts, attaching, retention, drain."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from roster_protos import admin_pb2, engine_pb2
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.execution.runner import Runner
from scheduler_svc.model.sequence import End, FinishReason
from scheduler_svc.plan.plan_draft import pack
from tests.support.in_process import Stack

NO_EOS = 0.0


def stack_with_runner(slots: int = 2, num_blocks: int = 32, **settings: object) -> tuple[Stack, int]:
    stack = Stack(**settings)
    backend = HashBackend(
        num_slots=slots,
        block_size=4,
        num_blocks=num_blocks,
        max_step_tokens=64,
        context_length=256,
        eos_probability=NO_EOS,
    )
    session = stack.add_runner(backend)
    stack.step()
    return stack, session


def finish(stack: Stack, session: int) -> None:
    for _ in range(500):
        stack.advance(session)
        if stack.engine.requests.idle:
            return
    raise AssertionError("never idle")


def reason_of(stack: Stack, sequence_id: int | None) -> FinishReason:
    assert sequence_id is not None
    end = stack.streams[sequence_id].end
    assert end is not None
    return FinishReason(end.reason)


def test_the_model_and_readiness_are_announced() -> None:
    stack, session = stack_with_runner()
    assert stack.model is not None and stack.model.ready and stack.model.model.name == "hash"
    assert stack.model.pool_tokens == 32 * 4 + 1
    stack.runners.kill(session)
    stack.step()
    assert not stack.model.ready and stack.model.model.name == "hash"


def test_the_same_id_with_another_body_is_refused_and_with_the_same_body_attaches() -> None:
    stack, session = stack_with_runner()
    first = stack.submit([1, 2, 3], 20, request_id="same", digest=b"a")
    stack.advance(session, 3)
    other = stack.submit([1, 2, 3], 20, request_id="same", digest=b"b")
    elsewhere = stack.submit([1, 2, 3], 20, request_id="same", digest=b"b", tenant="another")
    again = stack.submit([1, 2, 3], 20, request_id="same", digest=b"a")
    stack.step()
    assert other.refused is not None and other.refused.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
    assert other.refused.field == "request_id" and elsewhere.refused is None
    assert again.refused is None and again.first_sequence_id is None
    kinds = [message.WhichOneof("message") for message in stack.others]
    assert kinds == ["detached", "attached"]
    attached = stack.others[1].attached
    assert attached.handle == again.handle and stack.others[0].detached.handle == first.handle
    assert np.frombuffer(attached.prompt, "<i4").tolist() == [1, 2, 3]
    assert first.first_sequence_id is not None
    stream = stack.streams[first.first_sequence_id]
    assert attached.choices[0].sequence_id == first.first_sequence_id
    assert np.frombuffer(attached.choices[0].tokens, "<i4").tolist() == stream.tokens
    finish(stack, session)
    assert stream.tokens == first.expected(0, NO_EOS)


def test_attached_tokens_and_later_steps_join_without_a_gap() -> None:
    """A result that arrives in the same step as the Attach is delivered once."""
    stack, session = stack_with_runner()
    first = stack.submit([5, 6], 30, request_id="r")
    stack.advance(session, 4)
    stack.runners.execute(session)
    stack.runners.deliver(session)
    stack.front.put(b"other worker", attach=engine_pb2.Attach(handle=99, request_id="r"))
    stack.step()
    attached = stack.others[-1].attached
    joined = np.frombuffer(attached.choices[0].tokens, "<i4").tolist()
    assert first.first_sequence_id is not None
    assert joined == stack.streams[first.first_sequence_id].tokens
    finish(stack, session)
    assert stack.streams[first.first_sequence_id].tokens == first.expected(0, NO_EOS)


def test_a_request_that_never_fits_is_refused() -> None:
    stack, session = stack_with_runner(num_blocks=4)
    too_long = stack.submit([1] * 10, 8)
    fits = stack.submit([1] * 10, 7)
    finish(stack, session)
    assert too_long.refused is not None and too_long.refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert too_long.refused.field == "stop.max_tokens" and fits.refused is None
    assert reason_of(stack, fits.first_sequence_id) is FinishReason.LENGTH


def test_a_full_queue_refuses_with_a_time_to_come_back_and_stays_sound() -> None:
    stack, session = stack_with_runner(max_waiting_requests=3, max_waiting_tokens=40)
    requests = [stack.submit([1] * 8, 4) for _ in range(6)]
    stack.step()
    refused = [request.refused for request in requests if request.refused is not None]
    assert len(refused) == 3
    assert all(r.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0] and r.retry_after_ms >= 500 for r in refused)
    many_tokens = stack.submit([1] * 41, 4)
    stack.step()
    assert many_tokens.refused is not None and "tokens" in many_tokens.refused.message
    finish(stack, session)
    stack.assert_clean()
    assert stack.engine.requests.totals.refused == 4


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancel_ends_a_request_wherever_it_is(steps: int) -> None:
    stack, session = stack_with_runner(slots=1)
    running, waiting = stack.submit([1] * 9, 50), stack.submit([2] * 9, 50, n=2)
    stack.advance(session, steps)
    for request in (running, waiting):
        stack.front.put(cancel=engine_pb2.Cancel(handle=request.handle))
    finish(stack, session)
    assert waiting.first_sequence_id is not None
    for sequence_id in (running.first_sequence_id, waiting.first_sequence_id, waiting.first_sequence_id + 1):
        assert reason_of(stack, sequence_id) is FinishReason.CANCELLED
    stack.assert_clean()


def test_cancel_by_id_answers_whether_there_is_such_a_request() -> None:
    stack, _ = stack_with_runner()
    stack.submit([1], 50, request_id="mine", tenant="t")
    stack.step()
    for handle, tenant in ((70, "t"), (71, "other")):
        stack.front.put(cancel_by_id=engine_pb2.CancelById(handle=handle, tenant=tenant, request_id="mine"))
    refusals: list[engine_pb2.Refused] = []
    stack.engine.step()
    for _, message in stack.front.messages:
        if message.WhichOneof("message") == "refused":
            refusals.append(message.refused)
    done = [m.done.handle for _, m in stack.front.messages if m.WhichOneof("message") == "done"]
    assert done == [70]
    assert [(r.handle, r.code) for r in refusals] == [(71, grpc.StatusCode.NOT_FOUND.value[0])]


def test_deadlines_count_in_the_queue_and_while_running() -> None:
    stack, session = stack_with_runner(slots=1)
    running, waiting = stack.submit([1], 90, timeout_ms=1000), stack.submit([2], 90, timeout_ms=500)
    stack.advance(session, 2)
    stack.now_s = 0.6
    stack.step()
    assert reason_of(stack, waiting.first_sequence_id) is FinishReason.DEADLINE
    stack.now_s = 1.1
    finish(stack, session)
    assert reason_of(stack, running.first_sequence_id) is FinishReason.DEADLINE
    stack.assert_clean()


def test_a_cut_stream_is_cancelled_or_kept_for_its_time() -> None:
    stack, session = stack_with_runner()
    dropped, kept = stack.submit([1], 90), stack.submit([2], 90, keep_ms=1000)
    stack.advance(session, 1)
    for request in (dropped, kept):
        stack.front.put(disconnect=engine_pb2.Disconnect(handle=request.handle))
    stack.advance(session, 1)
    assert reason_of(stack, dropped.first_sequence_id) is FinishReason.CANCELLED
    assert kept.first_sequence_id is not None and stack.streams[kept.first_sequence_id].end is None
    stack.now_s = 1.5
    stack.step()
    assert reason_of(stack, kept.first_sequence_id) is FinishReason.CANCELLED


def test_a_cut_takes_back_what_was_sampled_beyond_the_stop_string() -> None:
    stack, session = stack_with_runner(retention_s=60, retention_requests=10)
    request = stack.submit([1, 2], 90, request_id="cut", tenant="t")
    stack.advance(session, 8)
    assert stack.engine.ledger.account("t").sampled_tokens > 3
    assert request.first_sequence_id is not None
    cut = engine_pb2.Cut(sequence_id=request.first_sequence_id, num_tokens=3, stop_string="end")
    stack.front.put(cut=cut)
    finish(stack, session)
    end = stack.streams[request.first_sequence_id].end
    assert end is not None and end.stop_string == "end" and end.num_tokens == 3
    assert stack.engine.ledger.account("t").sampled_tokens == 3, "the tenant is charged for what it receives"
    stack.front.put(cut=cut)  # repeated
    stack.front.put(attach=engine_pb2.Attach(handle=50, request_id="cut", tenant="t"))
    stack.step()
    assert stack.engine.ledger.account("t").sampled_tokens == 3
    record = stack.others[-1].attached.choices[0]
    assert np.frombuffer(record.tokens, "<i4").tolist() == request.expected(0, NO_EOS)[:3]
    assert record.end.stop_string == "end" and record.end.num_tokens == 3


def test_a_repeated_cut_within_received_tokens_charges_nothing() -> None:
    stack, session = stack_with_runner(retention_s=60, retention_requests=10)
    request = stack.submit([1, 2], 90, received=pack([3, 4, 5, 6]), tenant="t")
    stack.advance(session, 8)
    assert request.first_sequence_id is not None and stack.engine.ledger.account("t").sampled_tokens > 0
    for _ in range(3):  # of several streams that replay the same tokens
        stack.front.put(cut=engine_pb2.Cut(sequence_id=request.first_sequence_id, num_tokens=1, stop_string="end"))
    finish(stack, session)
    assert stack.engine.ledger.account("t").sampled_tokens == 0


def test_finished_requests_stay_attachable_for_their_retention() -> None:
    stack, session = stack_with_runner(retention_s=10, retention_requests=2)
    for number in range(3):
        stack.submit([number], 3, request_id=f"r{number}")
        finish(stack, session)
    assert [stack.engine.requests.book.by_key("", f"r{n}") is not None for n in range(3)] == [False, True, True]
    stack.now_s = 11
    stack.step()
    assert stack.engine.requests.book.by_key("", "r2") is None


def test_received_tokens_are_continued_and_may_already_be_the_end() -> None:
    stack, session = stack_with_runner()
    whole = stack.submit([3, 4], 12)
    finish(stack, session)
    assert whole.first_sequence_id is not None
    tokens = stack.streams[whole.first_sequence_id].tokens
    rest = stack.submit([3, 4], 12, received=pack(tokens[:5]))
    over = stack.submit([3, 4], 12, received=pack(tokens))
    finish(stack, session)
    assert rest.first_sequence_id is not None and over.first_sequence_id is not None
    assert stack.streams[rest.first_sequence_id].tokens == tokens[5:]
    assert stack.streams[over.first_sequence_id].tokens == []
    assert reason_of(stack, over.first_sequence_id) is FinishReason.LENGTH


def test_without_a_runner_for_too_long_streams_end_unavailable() -> None:
    stack, session = stack_with_runner(no_runner_s=5)
    request = stack.submit([1], 90)
    stack.advance(session, 2)
    stack.runners.kill(session)
    stack.step()
    stack.now_s = 4
    stack.step()
    assert request.first_sequence_id is not None and stack.streams[request.first_sequence_id].end is None
    stack.now_s = 6
    stack.step()
    stack.step()
    assert reason_of(stack, request.first_sequence_id) is FinishReason.UNAVAILABLE


def test_a_draining_engine_takes_nothing_and_says_so() -> None:
    stack, session = stack_with_runner()
    running = stack.submit([1], 5)
    stack.step()
    stack.engine.shutdown.begin()
    late = stack.submit([1], 5)
    finish(stack, session)
    assert late.refused is not None and late.refused.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert reason_of(stack, running.first_sequence_id) is FinishReason.LENGTH
    assert stack.model is not None and stack.model.draining and not stack.model.ready


def test_streams_of_a_worker_that_died_wait_for_their_clients() -> None:
    """The dead worker gets no more messages; the new one may attach; after a time they are cancelled."""
    stack, session = stack_with_runner(attach_s=5.0)
    one, other = stack.submit([1], 90), stack.submit([2], 90)
    stack.advance(session, 1)
    stack.front.put(b"new identity", hello=engine_pb2.WorkerHello(worker=0))
    stack.advance(session, 2)
    sent = len(stack.streams[one.first_sequence_id].tokens)  # type: ignore[index]
    stack.advance(session, 2)
    assert len(stack.streams[one.first_sequence_id].tokens) == sent  # type: ignore[index]
    stack.front.put(b"new identity", attach=engine_pb2.Attach(handle=99, request_id=one.submit.request_id))
    stack.step()
    stack.now_s += 5.1
    stack.step()
    assert stack.engine.requests.book.by_key("", one.submit.request_id) is not None
    assert stack.engine.requests.book.by_key("", other.submit.request_id) is None
    finish(stack, session)
    assert reason_of(stack, one.first_sequence_id) is FinishReason.LENGTH


def test_runners_that_do_not_fit_are_rejected_with_the_reason() -> None:
    stack, _ = stack_with_runner()
    other = HashBackend(num_slots=2, max_step_tokens=8)
    other.model.weights_version = "other"
    small = HashBackend(num_slots=9, max_step_tokens=8)
    blocks = HashBackend(num_slots=2, max_step_tokens=8, block_size=8, context_length=256, eos_probability=NO_EOS)
    sessions = [stack.add_runner(other), stack.add_runner(small), stack.add_runner(blocks)]
    stack.step()
    assert "same model" in stack.runners.rejected[sessions[0]]
    assert "max_step_tokens" in stack.runners.rejected[sessions[1]]
    assert "blocks of 8 tokens" in stack.runners.rejected[sessions[2]]
    assert len(stack.engine.pool.schedulers) == 1


def test_watchers_see_joins_and_leaves_and_how_full_the_batch_is() -> None:
    stack, session = stack_with_runner()
    stack.front.put(watch=engine_pb2.Watch(on=True))
    for number, length in enumerate((3, 9)):
        stack.submit([number] * 3, length, request_id=f"r{number}")
    finish(stack, session)
    stack.submit([9], 2, request_id="last")
    finish(stack, session)
    reports: list[admin_pb2.WatchStepsResponse] = [
        message.step_report for message in stack.others if message.WhichOneof("message") == "step_report"
    ]
    assert [r.number for r in reports] == list(range(1, len(reports) + 1))
    assert [s.request_id for s in reports[0].joined] == ["r0", "r1"] and len(reports[0].rows) == 2
    left = [(leave.sequence.request_id, leave.reason) for report in reports for leave in report.left]
    assert left == [("r0", "length"), ("r1", "length")]
    assert {row.sequence.request_id for row in reports[-1].rows} == {"last"}
    stack.front.put(watch=engine_pb2.Watch(on=False))
    stack.submit([9], 2)
    before = len(stack.others)
    finish(stack, session)
    assert len(stack.others) == before


def test_status_counts_what_happened() -> None:
    stack, session = stack_with_runner()
    stack.submit([1, 2, 3], 5)
    finish(stack, session)
    stack.front.put(status_query=engine_pb2.StatusQuery(handle=5))
    stack.step()
    status = stack.others[-1].status_reply.status
    assert stack.others[-1].status_reply.handle == 5
    assert (status.policy, status.waiting, status.totals.requests, status.totals.finished) == ("auto", 0, 1, 1)
    assert (status.totals.sampled_tokens, status.totals.prefill_tokens) == (5, 3)
    runner = status.runners[0]
    assert (runner.free_blocks, runner.blocks, runner.running, runner.slots) == (32, 32, 0, 2)


def test_status_and_model_say_which_decoder_computes() -> None:
    stack = Stack()
    backend = HashBackend(num_slots=2)
    backend.model.decoder = "transformers"
    stack.add_runner(backend)
    stack.step()
    stack.front.put(status_query=engine_pb2.StatusQuery(handle=5))
    stack.step()
    assert stack.others[-1].status_reply.status.runners[0].decoder == "transformers"
    assert stack.model is not None and stack.model.model.decoder == "transformers"


def test_a_runner_whose_model_needs_several_block_tables_is_rejected() -> None:
    hello = Runner(HashBackend(num_slots=2), "hybrid").hello()
    pool = Stack().engine.pool
    assert hello.cache_groups == 1 and pool.unfit(hello) == ""
    hello.cache_groups = 3
    assert "3 block tables a sequence" in pool.unfit(hello)


def test_an_unusable_command_does_no_harm() -> None:
    stack, session = stack_with_runner()
    neighbour = stack.submit([1], 5)
    stack.front.put(submit=engine_pb2.Submit(handle=1000, request_id="bad", prompt=b"abc", n=1, max_tokens=3))
    stack.front.commands.append((b"worker", engine_pb2.Command()))
    finish(stack, session)
    assert reason_of(stack, neighbour.first_sequence_id) is FinishReason.LENGTH


def test_finish_is_idempotent() -> None:
    stack, session = stack_with_runner()
    request = stack.submit([1], 50)
    stack.advance(session, 1)
    assert request.first_sequence_id is not None
    sequence = stack.engine.requests.book.sequence(request.first_sequence_id)
    assert sequence is not None
    stack.engine.requests.finish(sequence, End(FinishReason.ERROR, message="first"))
    stack.engine.requests.finish(sequence, End(FinishReason.CANCELLED))
    finish(stack, session)
    assert reason_of(stack, request.first_sequence_id) is FinishReason.ERROR
    stack.assert_clean()

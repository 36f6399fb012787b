"""The view of WatchRoster against the engine's requests, and the times reported to watchers of steps."""

from __future__ import annotations

from roster_protos import admin_pb2, engine_pb2
from runner_svc.backends.hash_backend import HashBackend
from tests.support.in_process import Stack
from tests.support.lockstep import advance


def stack_with_runner() -> Stack:
    stack = Stack()
    backend = HashBackend(num_slots=2, num_blocks=64, block_size=4, max_step_tokens=8, eos_probability=0)
    stack.add_runner(backend)
    stack.step()
    return stack


def look(stack: Stack, *handles: int) -> list[engine_pb2.RosterReply]:
    for handle in handles:
        stack.front.put(roster_query=engine_pb2.RosterQuery(handle=handle))
    stack.step()
    replies = [message.roster_reply for message in stack.others if message.HasField("roster_reply")]
    return replies[-len(handles) :]


def test_running_sequences_with_their_progress_and_the_queue() -> None:
    stack = stack_with_runner()
    stack.submit([1, 2, 3], 30, tenant="a")
    stack.submit(list(range(1, 30)), 20, tenant="b")
    for _ in range(3):
        stack.submit([7], 5, tenant="c")
    advance(stack, 2, turn_s=0.5)
    (reply,) = look(stack, 9)
    roster = reply.roster
    assert reply.handle == 9 and roster.time_s == stack.now_s
    first, second = roster.running
    assert (first.sequence.request_id, first.tenant, first.prompt_tokens, first.max_tokens) == ("r1", "a", 3, 30)
    assert first.kind == admin_pb2.ROW_KIND_DECODE and first.generated >= 1
    assert second.tenant == "b" and second.kind == admin_pb2.ROW_KIND_PREFILL
    assert 0 < second.computed < 29 and second.generated == 0
    assert first.age_s == second.age_s == 1.0
    assert [(queue.tenant, queue.waiting) for queue in roster.waiting] == [("c", 3)]
    assert roster.status.waiting == 3 and roster.status.runners[0].running == 2
    advance(stack, 12, turn_s=0.5)
    (reply,) = look(stack, 10)
    assert {row.kind for row in reply.roster.running} == {admin_pb2.ROW_KIND_DECODE}
    assert reply.roster.running[1].computed >= 29


def test_all_queries_between_two_steps_get_the_same_answer() -> None:
    stack = stack_with_runner()
    stack.submit([1], 5)
    advance(stack, 3, turn_s=0.5)
    replies = look(stack, 3, 4)
    assert [reply.handle for reply in replies] == [3, 4]
    assert replies[0].roster == replies[1].roster
    assert not stack.engine.watchers.roster_queries


def test_latencies_are_counted_up_to_now() -> None:
    stack = stack_with_runner()
    assert sum(look(stack, 1)[0].roster.ttft_s.counts) == 0
    request = stack.submit([1], 6)
    while not (request.streams and request.streams[0].end):
        advance(stack, 1, turn_s=0.5)
    roster = look(stack, 2)[0].roster
    assert (sum(roster.ttft_s.counts), sum(roster.itl_s.counts)) == (1, 5)
    assert len(roster.itl_s.counts) == len(roster.itl_s.bounds) + 1
    assert roster.run_s > 0


def test_watchers_hear_when_a_step_is_done_and_how_long_it_ran() -> None:
    stack = stack_with_runner()
    stack.front.put(watch=engine_pb2.Watch(on=True))
    request = stack.submit(list(range(1, 13)), 4)
    while not (request.streams and request.streams[0].end):
        advance(stack, 1, turn_s=0.5)
    reports = [message.step_report for message in stack.others if message.HasField("step_report")]
    dones = [message.step_done for message in stack.others if message.HasField("step_done")]
    assert [done.number for done in dones] == [report.number for report in reports][: len(dones)]
    assert all(0 < done.run_s <= done.done_s for done in dones)
    kinds = [(row.kind, row.count) for report in reports for row in report.rows]
    prefill, decode = admin_pb2.ROW_KIND_PREFILL, admin_pb2.ROW_KIND_DECODE
    assert kinds[:4] == [(prefill, 8), (prefill, 4), (decode, 1), (decode, 1)]
    assert {report.policy for report in reports} == {"auto"}

"""Prefixes that are never shared: other salts, other tenants, positions that depend on more than the prefix."""

from __future__ import annotations

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.model.sequence import FinishReason
from tests.support.in_process import Stack
from tests.support.sharing import NO_EOS, OUTPUT, SIZE, Service, prompt, service


def test_salts_and_tenants_isolate() -> None:
    served = service(isolate_tenants=True)
    served.stack.submit(prompt(3 * SIZE), OUTPUT, tenant="a", cache_salt="x")
    served.finish()
    same, salt, tenant, none = (
        served.stack.submit(prompt(3 * SIZE), OUTPUT, tenant=tenant, cache_salt=salt)
        for tenant, salt in (("a", "x"), ("a", "y"), ("b", "x"), ("a", ""))
    )
    served.finish()
    assert [served.cached(request) for request in (same, salt, tenant, none)] == [2 * SIZE, 0, 0, 0]


def test_tenants_share_unless_they_are_isolated() -> None:
    served = service()
    served.stack.submit(prompt(3 * SIZE), OUTPUT, tenant="a")
    served.finish()
    other = served.stack.submit(prompt(3 * SIZE), OUTPUT, tenant="b")
    served.finish()
    assert served.cached(other) == 2 * SIZE


def test_nothing_is_shared_when_it_is_turned_off() -> None:
    served = service(prefix_sharing=False)
    requests = [served.stack.submit(prompt(3 * SIZE), OUTPUT, n=2) for _ in range(2)]
    served.finish()
    assert [served.cached(request, index) for request in requests for index in (0, 1)] == [0] * 4
    assert served.scheduler.pool.num_cached == 0


def test_prompt_logprobs_need_every_position() -> None:
    served = service()
    sampling = plan_pb2.Sampling(top_p=1, repetition_penalty=1, prompt_logprobs=1)
    served.stack.submit(prompt(3 * SIZE), OUTPUT)
    served.finish()
    scored = served.stack.submit(prompt(3 * SIZE), OUTPUT, sampling=sampling)
    served.finish()
    assert served.cached(scored) == 0


def test_positions_whose_kv_depends_on_the_length_of_the_prompt_are_not_shared() -> None:
    stack = Stack()
    backend = HashBackend(
        num_slots=4, block_size=SIZE, num_blocks=64, max_step_tokens=64, context_length=256, eos_probability=NO_EOS
    )
    backend.model.prefix_positions = 2 * SIZE + 2
    served = Service(stack, stack.add_runner(backend))
    stack.step()
    stack.submit(prompt(2 * SIZE + 2), 2 * SIZE)
    served.finish()
    lengths = (2 * SIZE + 2, 2 * SIZE + 3, 4 * SIZE)
    requests = [stack.submit(prompt(length), OUTPUT) for length in lengths]
    served.finish()
    assert [served.cached(request) for request in requests] == [2 * SIZE, 0, 0]


def test_a_sequence_that_failed_shares_nothing() -> None:
    served = service()
    failing = served.stack.submit(prompt(3 * SIZE), OUTPUT)
    served.stack.step()
    served.stack.runners.execute(served.session)
    result = served.stack.runners.results[served.session][0].result
    result.statuses = bytes([plan_pb2.ROW_STATUS_NOT_FINITE])
    result.token_counts, result.tokens = bytes(1), b""
    served.finish()
    assert failing.first_sequence_id is not None
    end = served.stack.streams[failing.first_sequence_id].end
    assert end is not None and end.reason == FinishReason.ERROR
    again = served.stack.submit(prompt(3 * SIZE), OUTPUT)
    served.finish()
    assert served.cached(again) == 0

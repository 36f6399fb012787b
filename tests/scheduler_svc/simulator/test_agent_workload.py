"""The generator of agents' sessions has the stated distributions, and the simulator plays them as conversations."""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from scheduler_svc.simulator.agent_workload import RETAIN_S, AgentWorkload, agent_trace, agent_workload
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import Trace, TraceRequest
from tests.support.simulated_cost import round_cost

SMALL = AgentWorkload(
    sessions=12,
    live=4,
    turns=6,
    context_tokens=1200,
    most_context=2500,
    system_prompts=2,
    system_tokens=160,
    task_tokens=50,
    output_tokens=20,
    fan_out=0.1,
    ramp_s=2.0,
)


def sessions_of(trace: Trace) -> dict[str, list[TraceRequest]]:
    by_name: defaultdict[str, list[TraceRequest]] = defaultdict(list)
    for request in trace.requests:
        assert request.turn is not None
        by_name[request.turn.conversation].append(request)
    return by_name


def test_a_median_session_is_as_long_as_reported() -> None:
    trace = agent_trace(AgentWorkload(sessions=500, live=20, fan_out=0.0), seed=1)
    whole = list(sessions_of(trace).values())[20:]
    assert statistics.median(map(len, whole)) == pytest.approx(43, rel=0.1)
    assert statistics.median(session[-1].prompt_tokens for session in whole) == pytest.approx(142_000, rel=0.1)
    assert statistics.mean(request.output_tokens for request in trace.requests) == pytest.approx(523, rel=0.05)
    assert max(request.prompt_tokens + request.output_tokens for request in trace.requests) <= 256_000 + 8192


def test_gaps_with_persons_are_as_long_as_reported() -> None:
    trace = agent_trace(AgentWorkload(sessions=500, live=20, fan_out=0.0, person_share=8.9 / 82.5), seed=2)
    turns = [request.turn for request in trace.requests if request.turn is not None]
    gaps_s = np.array([turn.pause_s for turn in turns if turn.continues is not None])
    assert [(gaps_s > limit_s).mean() for limit_s in (60, 300, 3599)] == pytest.approx([0.132, 0.052, 0.005], abs=0.01)


def test_the_same_seed_gives_the_same_sessions() -> None:
    assert agent_trace(SMALL, 3) == agent_trace(SMALL, 3) != agent_trace(SMALL, 4)


def test_turns_continue_their_session_and_follow_what_they_need() -> None:
    trace = agent_trace(SMALL.model_copy(update={"sessions": 60, "tenants": 2}), seed=5)
    sessions = sessions_of(trace)
    assert {request.tenant for request in trace.requests} == {"tenant-0", "tenant-1"}
    assert any("/" in name for name in sessions)
    for session in sessions.values():
        for former, request in pairwise(session):
            turn = request.turn
            assert turn is not None and turn.continues is not None and turn.after
            assert trace.requests[turn.continues] is former
            new = sum(tokens for _, tokens in turn.parts)
            assert request.prompt_tokens == former.prompt_tokens + former.output_tokens + new
        hints = [request.turn.retain_s for request in session if request.turn is not None]
        assert hints == [RETAIN_S] * (len(session) - 1) + [0.0]


def test_every_turn_hits_all_that_came_before() -> None:
    """With room for all contexts, a turn computes only what is new: the output is in the context as it was sampled."""
    trace = agent_trace(SMALL.model_copy(update={"sessions": 8}), seed=6)
    setup = Setup(round_cost(), kv_tokens=24_000, slots=32, prefix_sharing=True, check=True)
    outcome = simulate(trace, setup)
    assert outcome.refusals == {}
    assert outcome.tokens.tolist() == [request.output_tokens for request in trace.requests]
    later = 0
    for index, cached in enumerate(outcome.cached_tokens.tolist()):
        turn = trace.requests[index].turn
        assert turn is not None
        if turn.continues is not None:
            former = trace.requests[turn.continues]
            known = former.prompt_tokens + former.output_tokens - 1  # the KV of the last output is not computed
            assert cached == known // 16 * 16
            end_s = outcome.last_token_at[turn.continues]
            assert outcome.arrival_s[index] >= end_s + turn.pause_s - 1e-9
            later += 1
    assert later > 25


def test_an_output_that_ends_early_is_in_the_context() -> None:
    base = agent_trace(SMALL.model_copy(update={"fan_out": 0.0, "sessions": 2, "live": 2}), seed=7)
    requests = tuple(
        TraceRequest(r.arrival_s, r.prompt_tokens, r.output_tokens, max_tokens=r.output_tokens + 50, turn=r.turn)
        for r in base.requests
    )
    outcome = simulate(Trace("early", requests), Setup(round_cost(), kv_tokens=100_000, prefix_sharing=True))
    for index, cached in enumerate(outcome.cached_tokens.tolist()):
        turn = requests[index].turn
        if turn is not None and turn.continues is not None:
            former = requests[turn.continues]
            assert cached == (former.prompt_tokens + former.output_tokens - 1) // 16 * 16


def test_a_refused_turn_does_not_stop_its_session() -> None:
    outcome = simulate(agent_trace(SMALL, seed=6), Setup(round_cost(), kv_tokens=1024, prefix_sharing=True))
    assert 0 < len(outcome.refusals) < len(outcome.served)
    assert len(outcome.refusals) + len(outcome.served) == len(outcome.trace.requests)


def test_fast_forwards_change_nothing() -> None:
    trace = agent_trace(SMALL, seed=8)
    first, second = (
        simulate(trace, Setup(round_cost(), kv_tokens=4096, prefix_sharing=True, fast_forwards=fast))
        for fast in (True, False)
    )
    assert first.token_times_s.tobytes() == second.token_times_s.tobytes()
    assert first.cached_tokens.tolist() == second.cached_tokens.tolist()


def test_wrong_parameters_are_named() -> None:
    assert agent_workload('{"live": 3}').live == 3
    with pytest.raises(ValueError, match=r"live: .*greater than or equal to 1.*Known are: sessions, live, turns"):
        agent_workload('{"live": 0}')

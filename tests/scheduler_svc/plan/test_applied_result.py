"""Results that do not fit their plan: the runner starts a new session, and its sequences continue."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from roster_protos import plan_pb2
from tests.support.sharing import OUTPUT, prompt, service


def cut_within_a_token(result: plan_pb2.Result) -> None:
    result.tokens = result.tokens[:-1]


def cut_a_token(result: plan_pb2.Result) -> None:
    result.tokens = result.tokens[:-4]


def add_a_token(result: plan_pb2.Result) -> None:
    result.tokens += bytes(4)


def cut_the_statuses(result: plan_pb2.Result) -> None:
    result.statuses = result.statuses[:-1]


def fail_a_row_that_has_a_token(result: plan_pb2.Result) -> None:
    result.statuses = bytes([plan_pb2.ROW_STATUS_FAILED]) + result.statuses[1:]


def score_the_prompt_of_nobody(result: plan_pb2.Result) -> None:
    result.prompt_logprobs.add(row=len(result.statuses))


@pytest.mark.parametrize(
    "spoil",
    [
        cut_within_a_token,
        cut_a_token,
        add_a_token,
        cut_the_statuses,
        fail_a_row_that_has_a_token,
        score_the_prompt_of_nobody,
    ],
)
@pytest.mark.parametrize("steps", [1, 3], ids=["prompts", "decoding"])
def test_a_result_that_does_not_fit_its_plan_ends_the_session(
    spoil: Callable[[plan_pb2.Result], None], steps: int
) -> None:
    served = service()
    requests = [served.stack.submit(prompt(10, seed=seed), OUTPUT) for seed in range(2)]
    runners, former = served.stack.runners, served.session
    for step in range(steps):
        served.stack.step()
        runners.execute(former)
        if step == steps - 1:
            spoil(runners.results[former][0].result)
            runners.garbled.add(former)
        runners.deliver(former)
    runner = runners.runners[former]
    served.stack.step()
    assert former not in runners.runners
    served.session = former + 1
    runners.connect(served.session, runner)
    served.finish()
    for request in requests:
        served.cached(request)  # the stream is correct
    served.stack.assert_clean()

"""Every feature of a request with every other one, disturbed by every event: the answer is that of an undisturbed run.

What is compared: each choice's tokens, text, log-probabilities and their alternatives, finish; the usage; and what each
connection told of the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

from roster_client.client.errors import UnavailableError
from roster_client.client.events import Completion
from roster_protos import inference_pb2 as pb
from scheduler_svc.front.text.tokenizer import ModelText
from tests.support.penalised_backend import PenalisedBackend
from tests.support.virtual_client import VirtualService, VirtualStream

FEATURES = ("structured", "logprobs", "prompt_logprobs", "choices", "penalties", "stop", "seed", "min_tokens")
CONSTRAINT = ("regex", "([a-d]{3}-){6,12}[0-9]{2,6}")
STOP_IDS = [3, 5, 100, 101]
PROMPT_TOKENS = 40
SLOTS = 2
LEAST_TOKENS = 8
"""Of each choice, so that there is a middle."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request, and what happens to it when so much of its turns is over."""

    features: frozenset[str]
    event: str
    at: float

    def __str__(self) -> str:
        return f"{'+'.join(sorted(self.features))}, {self.event} at {self.at}"


def backend() -> PenalisedBackend:
    """Small enough that a prompt takes three steps."""
    return PenalisedBackend(
        num_slots=SLOTS, block_size=4, num_blocks=96, max_step_tokens=16, context_length=256, eos_probability=1 / 40
    )


@cache
def _text() -> ModelText:
    return ModelText(backend().model)


# ------------------------------------------------------------------ the events


def _running(service: VirtualService) -> list[int]:
    return [session for session, s in service.engine.pool.schedulers.items() if s.table.num_running]


def runner_dies(service: VirtualService, stream: VirtualStream) -> None:
    """One that computes the request; another comes."""
    service.runners.kill(_running(service)[0])
    service.add_runner(backend())


def scheduler_dies(service: VirtualService, stream: VirtualStream) -> None:
    """And its front workers; the next one takes over from the runners' snapshots."""
    service.restart_scheduler()


def preempted(service: VirtualService, stream: VirtualStream) -> None:
    """All that runs, with rows on their way."""
    for scheduler in service.engine.pool.schedulers.values():
        for sequence in scheduler.table.running():
            scheduler._preempt(sequence, service.engine.requests.queue)


def attached(service: VirtualService, stream: VirtualStream) -> None:
    """Another call takes the stream over."""
    stream.attach()


def preempted_and_attached(service: VirtualService, stream: VirtualStream) -> None:
    """Once the prompt has been computed again."""
    preempted(service, stream)
    for _ in range(5):
        service.whole_turn(*service.runners.runners, most_plans=1)
    if not stream.over:
        stream.attach()


def scheduler_and_runner_die(service: VirtualService, stream: VirtualStream) -> None:
    """The second before what was taken over has gone far."""
    service.restart_scheduler()
    service.whole_turn(*service.runners.runners, most_plans=1)
    if _running(service):
        runner_dies(service, stream)


EVENTS: dict[str, Callable[[VirtualService, VirtualStream], None]] = {
    "runner": runner_dies,
    "scheduler": scheduler_dies,
    "preemption": preempted,
    "attach": attached,
    "preemption and attach": preempted_and_attached,
    "scheduler and runner": scheduler_and_runner_die,
}
MOMENTS = (0.1, 0.45, 0.8)
"""Parts of the turns of an undisturbed run; the first one while the prompt is computed."""


def all_cases() -> list[Case]:
    """Each feature alone, each pair, and all together."""
    together = [*combinations(FEATURES, 1), *combinations(FEATURES, 2), FEATURES]
    return [Case(frozenset(some), event, at) for some in together for event in EVENTS for at in MOMENTS]


def some_cases(count: int) -> list[Case]:
    """So many of all, evenly spread, and besides each event for the pairs that have lost something once."""
    cases = all_cases()
    spread = [cases[int((index + 0.5) * len(cases) / count)] for index in range(count)]
    lost = [("structured", "logprobs"), ("prompt_logprobs", "choices"), FEATURES]
    return spread + [Case(frozenset(some), event, MOMENTS[1]) for some in lost for event in EVENTS]


# ------------------------------------------------------------------ the request


def _request(features: frozenset[str], number: int, stop: str) -> pb.GenerateRequest:
    rng = random.Random(number)
    request = pb.GenerateRequest(request_id=f"case-{number}")
    request.prompt.token_ids.ids.extend(rng.randrange(97, 123) for _ in range(PROMPT_TOKENS))
    request.stop.max_tokens = 60
    request.sampling.temperature = 1.0 if features & {"seed", "choices"} else 0.0
    if "logprobs" in features:
        request.output.logprobs = 2
    if "prompt_logprobs" in features:
        request.output.prompt_logprobs = 1
    if "choices" in features:
        request.n = 3
    if "penalties" in features:
        request.sampling.repetition_penalty = 1.3
        request.sampling.presence_penalty = 0.5
        request.sampling.frequency_penalty = 0.25
    if "seed" in features:
        request.sampling.seed = 1000 + number
    if "min_tokens" in features:
        request.stop.min_tokens = 20
        request.stop.token_ids.extend(STOP_IDS)
    if stop:
        request.stop.strings.append(stop)
    return request


# ------------------------------------------------------------------ a run


@dataclass(slots=True)
class Run:
    """What the client got."""

    completion: Completion
    prompts: list[pb.PromptInfo]
    turns: int

    def answer(self) -> dict[str, Any]:
        """All that must not depend on what happened."""
        usage = self.completion.usage
        assert usage is not None
        return {
            "prompt": self.completion.started,
            "choices": self.completion.choices,
            "usage": (usage.prompt_tokens, usage.completion_tokens),
        }


def run(request: pb.GenerateRequest, features: frozenset[str], event: str = "", at_turn: int = 0) -> Run:
    """The request on two runners that have its prompt cached already, with an event at a turn."""
    service = VirtualService(_text(), depth=2, prefix_sharing=True, retention_s=60, retention_requests=8)
    for _ in range(2):
        service.add_runner(backend())
    service.step()
    warm = pb.GenerateRequest(request_id="warm", prompt=request.prompt, n=4)
    warm.stop.max_tokens = 2
    before = service.generate(warm)
    for _ in _turns_until(service, lambda: before.over):
        pass
    stream = service.generate(request, CONSTRAINT if "structured" in features else None)
    turns = 0
    for turns in _turns_until(service, lambda: stream.over):
        if event and turns == at_turn:
            EVENTS[event](service, stream)
        if isinstance(stream.error, UnavailableError) and stream.completion.started is None:
            stream.send_again()
    assert stream.error is None, stream.error
    for _ in range(8):
        service.whole_turn(*service.runners.runners)
    service.assert_clean()
    return Run(stream.completion, stream.prompts, turns)


def _turns_until(service: VirtualService, over: Callable[[], bool]) -> Iterator[int]:
    """Counts the turns that it takes, each before it is taken. The first runner rests in every third."""
    for turn in range(1, 2000):
        if over():
            return
        yield turn
        slower = [] if turn % 3 else list(service.runners.runners)[1:]
        service.whole_turn(*(slower or service.runners.runners), most_plans=1)
    raise AssertionError("it never ends")


@cache
def undisturbed(features: frozenset[str]) -> tuple[pb.GenerateRequest, Run]:
    """A request with these features whose choices are long enough, and its answer."""
    for number in range(200):
        plain = run(_request(features - {"stop"}, number, ""), features)
        if "stop" not in features:
            request, found = _request(features, number, ""), plain
        else:
            text = plain.completion.choices[0].text
            begin = len(text) * 2 // 3
            request = _request(features, number, text[begin : begin + 3] or "x")
            found = run(request, features)
            if not any(choice.finish and choice.finish.stop_string for choice in found.completion.choices):
                continue
        if all(len(choice.token_ids) >= LEAST_TOKENS for choice in found.completion.choices):
            return request, found
    raise AssertionError(f"no request with {features} is long enough")


def differences(case: Case) -> list[str]:
    """What the event changed; nothing may."""
    request, expected = undisturbed(case.features)
    found = run(request, case.features, case.event, max(2, round(case.at * expected.turns)))
    first, second = expected.answer(), found.answer()
    told = [f"{case}: {key}: {second[key]} for {first[key]}" for key in first if first[key] != second[key]]
    told += [f"{case}: a connection told {prompt}" for prompt in found.prompts if prompt != expected.prompts[0]]
    if "prompt_logprobs" in case.features:
        scored = len(expected.prompts[0].logprobs.sampled)
        if scored != PROMPT_TOKENS - 1:
            told.append(f"{case}: {scored} of the prompt's tokens have log-probabilities")
    for choice in found.completion.choices if "logprobs" in case.features else ():
        if len(choice.logprobs) != len(choice.token_ids):
            told.append(f"{case}: {len(choice.logprobs)} log-probabilities for {len(choice.token_ids)} tokens")
    return told

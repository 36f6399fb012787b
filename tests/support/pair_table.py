"""Disturbs each pair of request features by each event: the answer must equal that of an undisturbed run.

Compared are each choice's tokens, text, log-probabilities with alternatives and finish; the usage; and each
connection's prompt information. In most disturbed runs the runners draft; in an undisturbed one they never do.
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
from tests.support.drafters import LateHash, drafting_backend
from tests.support.penalised_backend import PenalisedBackend
from tests.support.scripted_drafts import RandomDrafts
from tests.support.virtual_client import VirtualService, VirtualStream

FEATURES = ("structured", "logprobs", "prompt_logprobs", "choices", "penalties", "stop", "seed", "min_tokens")
CONSTRAINT = ("regex", "([a-d]{3}-){6,12}[0-9]{2,6}")
STOP_IDS = [3, 5, 100, 101]
PROMPT_TOKENS = 40
SLOTS = 2
LEAST_TOKENS = 8
"""Tokens that each choice must have, so that an event can fall in the middle."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request and an event that happens after fraction `at` of its turns."""

    features: frozenset[str]
    event: str
    at: float
    drafts: int | None
    """Seed of what is drafted; None: nothing."""

    def __str__(self) -> str:
        return f"{'+'.join(sorted(self.features))}, {self.event} at {self.at}, drafts {self.drafts}"


SIZES = {
    "num_slots": SLOTS, "block_size": 4, "num_blocks": 96, "max_step_tokens": 16, "context_length": 256,
    "eos_probability": 1 / 40,
}  # fmt: skip


class LatePenalisedBackend(PenalisedBackend, LateHash):
    """A penalised backend that overlaps."""


def backend(drafts: random.Random | None = None) -> PenalisedBackend:
    """Returns a backend so small that a prompt takes three steps."""
    if drafts is None:
        return PenalisedBackend(**SIZES)
    return drafting_backend(drafts.choice((PenalisedBackend, LatePenalisedBackend)), drafts, wrong=0.2, **SIZES)


class PairService(VirtualService):
    """The service, whose runners draft if there is a `seed` for it."""

    def __init__(self, seed: int | None) -> None:
        super().__init__(_text(), depth=2, prefix_sharing=True, retention_s=60, retention_requests=8)
        self._rng = random.Random(seed) if seed is not None else None
        if self._rng is not None:
            self.drafts = RandomDrafts(self._rng)
        for _ in range(2):
            self.add()

    def add(self) -> None:
        """Adds a runner."""
        self.add_runner(backend(self._rng))


@cache
def _text() -> ModelText:
    return ModelText(backend().model)


# ------------------------------------------------------------------ the events


def _running(service: VirtualService) -> list[int]:
    return [session for session, s in service.engine.pool.schedulers.items() if s.table.num_running]


def runner_dies(service: PairService, stream: VirtualStream) -> None:
    """Kills a runner that computes the request and adds another."""
    service.runners.kill(_running(service)[0])
    service.add()


def scheduler_dies(service: PairService, stream: VirtualStream) -> None:
    """Kills the scheduler and its front workers; the next scheduler takes over from the runners' snapshots."""
    service.restart_scheduler()


def preempted(service: PairService, stream: VirtualStream) -> None:
    """Preempts all running sequences while rows are in flight."""
    for scheduler in service.engine.pool.schedulers.values():
        for sequence in scheduler.table.running():
            scheduler.departures.preempt(sequence, service.engine.requests.queue)


def attached(service: PairService, stream: VirtualStream) -> None:
    """Attaches another call to the stream."""
    stream.attach()


def preempted_and_attached(service: PairService, stream: VirtualStream) -> None:
    """Preempts, then attaches once the prompt has been computed again."""
    preempted(service, stream)
    for _ in range(5):
        service.whole_turn(*service.runners.runners, most_plans=1)
    if not stream.over:
        stream.attach()


def scheduler_and_runner_die(service: PairService, stream: VirtualStream) -> None:
    """Kills the scheduler, then the runner before the recovered sequences have made much progress."""
    service.restart_scheduler()
    service.whole_turn(*service.runners.runners, most_plans=1)
    if _running(service):
        runner_dies(service, stream)


def nothing(service: PairService, stream: VirtualStream) -> None:
    """Leaves everything to the drafts."""


EVENTS: dict[str, Callable[[PairService, VirtualStream], None]] = {
    "nothing": nothing,
    "runner": runner_dies,
    "scheduler": scheduler_dies,
    "preemption": preempted,
    "attach": attached,
    "preemption and attach": preempted_and_attached,
    "scheduler and runner": scheduler_and_runner_die,
}
MOMENTS = (0.1, 0.45, 0.8)
"""Fractions of an undisturbed run's turns; the first falls into the prompt's computation."""


def all_cases() -> list[Case]:
    """Returns each feature alone, each pair, and all features together, with each event and moment."""
    together = [*combinations(FEATURES, 1), *combinations(FEATURES, 2), FEATURES]
    made = [(frozenset(some), event, at) for some in together for event in EVENTS for at in MOMENTS]
    return [Case(*case, None if number % 4 == 2 else number) for number, case in enumerate(made)]


def some_cases(count: int) -> list[Case]:
    """Returns `count` evenly spread cases, plus every event for the combinations in which data has been lost before."""
    cases = all_cases()
    spread = [cases[int((index + 0.5) * len(cases) / count)] for index in range(count)]
    lost = [("structured", "logprobs"), ("prompt_logprobs", "choices"), FEATURES]
    return spread + [Case(frozenset(some), event, MOMENTS[1], 7) for some in lost for event in EVENTS]


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
    """What the client received."""

    completion: Completion
    prompts: list[pb.PromptInfo]
    turns: int

    def answer(self) -> dict[str, Any]:
        """Returns everything that must not depend on events."""
        usage = self.completion.usage
        assert usage is not None
        return {
            "prompt": self.completion.started,
            "choices": self.completion.choices,
            "usage": (usage.prompt_tokens, usage.completion_tokens),
        }


def run(
    request: pb.GenerateRequest,
    features: frozenset[str],
    event: str = "",
    at_turn: int = 0,
    drafts: int | None = None,
) -> Run:
    """Runs the request on two runners that have its prompt cached, with an event at a turn."""
    service = PairService(drafts)
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
    """Yields each turn's number before taking it, until `over`. The first runner skips every third turn."""
    for turn in range(1, 2000):
        if over():
            return
        yield turn
        slower = [] if turn % 3 else list(service.runners.runners)[1:]
        service.whole_turn(*(slower or service.runners.runners), most_plans=1)
    raise AssertionError("the request never ends")


@cache
def undisturbed(features: frozenset[str]) -> tuple[pb.GenerateRequest, Run]:
    """Returns a request with these features whose choices are long enough, and its answer."""
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
    """Returns the differences between the disturbed and the undisturbed answer; there must be none."""
    request, expected = undisturbed(case.features)
    turns = expected.turns * (1 if case.drafts is None else 0.6)
    found = run(request, case.features, case.event, max(2, round(case.at * turns)), case.drafts)
    first, second = expected.answer(), found.answer()
    told = [f"{case}: {key}: {second[key]} for {first[key]}" for key in first if first[key] != second[key]]
    told += [f"{case}: a connection reported {prompt}" for prompt in found.prompts if prompt != expected.prompts[0]]
    if "prompt_logprobs" in case.features:
        scored = len(expected.prompts[0].logprobs.sampled)
        if scored != PROMPT_TOKENS - 1:
            told.append(f"{case}: {scored} of the prompt's tokens have log-probabilities")
    for choice in found.completion.choices if "logprobs" in case.features else ():
        if len(choice.logprobs) != len(choice.token_ids):
            told.append(f"{case}: {len(choice.logprobs)} log-probabilities for {len(choice.token_ids)} tokens")
    return told

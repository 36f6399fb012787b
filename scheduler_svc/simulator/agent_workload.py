"""Generator of agents' sessions: turns, tool pauses, growing contexts, shared system prompts, fan-out of sub-agents.

A *session* is one conversation. A turn's prompt is the previous turn's prompt, its output, and the result of the tool
that the model called meanwhile. `live` sessions are open at once; when one ends, the next one of its place begins. The
first of each place is joined at a random turn, with the context that it has by then, so that a simulation begins with
sessions of all ages. Everything follows from the seed.

What is sourced:

- *Turns and context.* Median 43 turns and 142,000 input tokens a session (vLLM #52113 and #57103; read here as the
  input of the last turn: TraceLab, arXiv 2606.30560, has 154,000 input tokens a step on average).
- *Outputs.* 523 tokens a step on average (TraceLab: 186.9 M tokens in 357,161 steps).
- *Pauses.* That gaps are log-normal: SAECache, arXiv 2605.18825. With `person_share` at TraceLab's 8.9 of 82.5 steps,
  13% of the gaps exceed a minute, 5% five minutes and 0.5% an hour; an evictor with these timeouts misses 14.6%,
  about 6% and 1.4% of TraceLab's tokens.

What is assumed: the spread of turns (0.8, log-normal), the spread of lengths, medians and spreads of both kinds of
pause, the sizes of system prompts, tasks and sub-agents, how often a turn fans out, and how well a client knows when it
comes back (`hint_spread`). `person_share` is 0 unless set: the sessions are agents, without a person's reading.

Hints are in the trace; a simulation may withhold them. An agent states `next_turn_s` when it calls a tool, the pause
times a log-normal error; none while sub-agents run. It states `retain_s` = 0 with its last turn, and an hour otherwise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roster_common.wrong_values import wrong_values
from scheduler_svc.simulator.conversations.turn import Turn
from scheduler_svc.simulator.trace import Trace, TraceRequest

RETAIN_S = 3600.0
"""Seconds for which an agent asks to keep the context of a session that goes on."""
_MOST_PART = (1 << 20) - 1
_SUB_AGENT = 1 << 20
"""First content id of the system prompts of sub-agents; those of agents begin at 0."""
_OWN = 1 << 21
"""First content id of what only one session has."""


class AgentWorkload(BaseModel):
    """Parameters of the generator; the module's docstring says which of them have a source."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sessions: int = Field(default=200, ge=1, description="Number of sessions, without sub-agents.")
    live: int = Field(default=48, ge=1, description="Sessions that are open at once.")
    turns: float = Field(default=43, ge=1, description="Median number of turns of a session.")
    turns_spread: float = Field(default=0.8, ge=0, description="Standard deviation of the logarithm of the turns.")
    context_tokens: int = Field(default=142_000, ge=64, description="Input of the last turn of a median session.")
    most_context: int = Field(default=256_000, ge=64, description="Input at which a session ends early.")
    system_prompts: int = Field(default=4, ge=1, description="Different agents; sessions of one share its prompt.")
    system_tokens: int = Field(default=12_000, ge=1, le=_MOST_PART, description="Tokens of a shared system prompt.")
    task_tokens: float = Field(default=2_000, ge=1, description="Mean tokens of a session's first message.")
    output_tokens: float = Field(default=523, ge=1, description="Mean tokens of an output.")
    length_spread: float = Field(default=1.2, ge=0, description="Standard deviation of the logarithm of lengths.")
    tool_pause_s: float = Field(default=3.0, gt=0, description="Median seconds for which a tool runs.")
    tool_spread: float = Field(default=1.8, ge=0, description="Standard deviation of the logarithm of tool pauses.")
    person_share: float = Field(default=0.0, ge=0, le=1, description="Share of turns that wait for a person instead.")
    person_pause_s: float = Field(default=240.0, gt=0, description="Median seconds until a person answers.")
    person_spread: float = Field(default=1.5, ge=0, description="Standard deviation of the logarithm of that.")
    longest_pause_s: float = Field(default=3600.0, gt=0, description="Longest pause, in seconds.")
    fan_out: float = Field(default=0.03, ge=0, le=1, description="Share of turns that start sub-agents.")
    sub_agents: int = Field(default=3, ge=1, description="Mean number of sub-agents of such a turn.")
    sub_turns: float = Field(default=6, ge=1, description="Median number of turns of a sub-agent.")
    hint_spread: float = Field(default=0.5, ge=0, description="Standard deviation of the logarithm of a hint's error.")
    ramp_s: float = Field(default=30.0, ge=0, description="Seconds over which the first sessions begin.")
    tenants: int = Field(default=1, ge=1, description="Tenants that the places belong to, in turns.")

    @property
    def result_tokens(self) -> float:
        """Mean tokens of a tool's result, so that a session of the median turns has the median context."""
        growth = (self.context_tokens - self.system_tokens - self.task_tokens) / max(1, self.turns - 1)
        return max(1.0, growth - self.output_tokens)


def agent_workload(text: str) -> AgentWorkload:
    """Returns the parameters that a JSON object sets. Raises ValueError with what is wrong and what it may set."""
    try:
        return AgentWorkload.model_validate_json(text)
    except ValidationError as error:
        known = ", ".join(AgentWorkload.model_fields)
        raise ValueError(f"these are no parameters of agents: {wrong_values(error)}. Known are: {known}") from error


def agent_trace(workload: AgentWorkload, seed: int = 0) -> Trace:
    """Returns the sessions as a trace of turns, in the order in which places and sessions were drawn."""
    requests = _Sessions(workload, random.Random(seed)).requests()
    return Trace(f"agents-{workload.sessions}x{workload.live}-{seed}", tuple(requests))


class _Sessions:
    """Draws sessions one after another."""

    def __init__(self, workload: AgentWorkload, rng: random.Random) -> None:
        self._workload = workload
        self._rng = rng
        self._requests: list[TraceRequest] = []
        self._content = _OWN

    def requests(self) -> list[TraceRequest]:
        """Returns the requests of all sessions."""
        workload, rng = self._workload, self._rng
        last: list[int | None] = [None] * min(workload.live, workload.sessions)
        for session in range(workload.sessions):
            place = session % len(last)
            tenant = f"tenant-{place % workload.tenants}" if workload.tenants > 1 else ""
            begin_s = rng.uniform(0, workload.ramp_s)
            former = last[place]
            after, pause_s = ((), 0.0) if former is None else ((former,), self._pause_s(1.0))
            system = (rng.randrange(workload.system_prompts), workload.system_tokens)
            turns = self._turns(workload.turns)
            joined = rng.randrange(turns) if former is None else 0
            last[place] = self._session(f"session-{session}", tenant, begin_s, after, pause_s, system, turns, joined)
        return self._requests

    def _session(
        self,
        name: str,
        tenant: str,
        begin_s: float,
        after: tuple[int, ...],
        pause_s: float,
        system: tuple[int, int],
        turns: int,
        joined: int = 0,
        can_fan_out: bool = True,
    ) -> int:
        """Adds a session, from its turn `joined` on; returns the index of its last request."""
        workload, rng = self._workload, self._rng
        task = self._length(workload.task_tokens)
        past = sum(self._length(workload.output_tokens) + self._length(workload.result_tokens) for _ in range(joined))
        parts = (system, *self._own(min(task + past, workload.most_context - system[1] - 1)))
        length, continues = sum(tokens for _, tokens in parts), None
        for turn in range(joined, turns):
            output = min(self._length(workload.output_tokens), 8192)
            is_last = turn == turns - 1 or length + output >= workload.most_context
            fans_out = can_fan_out and not is_last and rng.random() < workload.fan_out
            by_person = rng.random() < workload.person_share
            next_s = self._pause_s(1.0 if by_person else 0.0)
            hint_s = next_s * rng.lognormvariate(0, workload.hint_spread)
            told = not (is_last or fans_out or by_person)
            place = Turn(name, parts, continues, after, pause_s, hint_s if told else None, 0.0 if is_last else RETAIN_S)
            continues = len(self._requests)
            self._requests.append(TraceRequest(begin_s, length, output, tenant=tenant, max_tokens=None, turn=place))
            if is_last:
                break
            after, pause_s = (continues,), next_s
            if fans_out:
                after, pause_s = self._fan_out(name, tenant, begin_s, continues), 0.0
            room = workload.most_context - length - output
            parts = tuple(self._own(max(1, min(self._length(workload.result_tokens), room))))
            length += output + sum(tokens for _, tokens in parts)
        return continues if continues is not None else -1

    def _fan_out(self, name: str, tenant: str, begin_s: float, parent: int) -> tuple[int, ...]:
        """Adds the sub-agents that a turn starts; returns their last requests, which the next turn follows."""
        workload, rng = self._workload, self._rng
        system = (_SUB_AGENT + rng.randrange(workload.system_prompts), max(1, workload.system_tokens // 2))
        count = max(1, round(rng.expovariate(1 / workload.sub_agents)))
        return tuple(
            self._session(
                f"{name}/{parent}.{index}",
                tenant,
                begin_s,
                (parent,),
                self._pause_s(0.0) * 0.1,
                system,
                self._turns(workload.sub_turns),
                can_fan_out=False,
            )
            for index in range(count)
        )

    def _own(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Yields new parts of `tokens` tokens together."""
        while tokens > 0:
            self._content += 1
            yield self._content, min(tokens, _MOST_PART)
            tokens -= _MOST_PART

    def _turns(self, median: float) -> int:
        return max(1, round(median * self._rng.lognormvariate(0, self._workload.turns_spread)))

    def _length(self, mean: float) -> int:
        spread = self._workload.length_spread
        return max(1, round(mean * self._rng.lognormvariate(-spread * spread / 2, spread)))

    def _pause_s(self, person: float) -> float:
        """Returns the seconds until a tool's result, or a person's message (`person` 1)."""
        workload = self._workload
        median, spread = (
            (workload.person_pause_s, workload.person_spread)
            if person
            else (workload.tool_pause_s, workload.tool_spread)
        )
        return min(workload.longest_pause_s, median * math.exp(self._rng.gauss(0, spread)))

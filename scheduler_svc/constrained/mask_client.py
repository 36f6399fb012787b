"""The scheduler's requests to its mask processes, and the recovery when one of them dies.

Two processes share nothing. *Grammars* compiles each grammar first: a grammar may crash it without delaying a mask.
*Masks* has a matcher for each sequence. After a process died, its requests are repeated in isolation, one grammar or
one row at a time, so that a crash is attributed to that grammar or row and all others get their answers. If the
process was killed or ran out of memory, there is one more attempt. Matchers are rebuilt from the tokens of their
sequences.

Calls block. One thread calls `check` and `open`, another calls `make`.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, TypeVar

from roster_protos import plan_pb2
from scheduler_svc.constrained.columns import MaskAnswer, MaskAsk, first_places
from scheduler_svc.constrained.fork_server import ForkServer, Limits, MasksUnavailable
from scheduler_svc.constrained.mask_handle import Channel, Died, DiedBefore, MaskHandle
from scheduler_svc.constrained.open_matchers import OpenMatchers, open_request
from scheduler_svc.constrained.packed_rows import PackedRows, every_token, mask_bytes
from scheduler_svc.constrained.source import UnusableGrammar
from scheduler_svc.model.output_state import OutputState

GRAMMAR_LIMITS = Limits(spare_bytes=512 << 20, niceness=5)
MASK_LIMITS = Limits(spare_bytes=1 << 30)
"""Limits of the two kinds of processes (SECURITY.md). The one for masks holds every open request's matcher and delays
steps, so it has more memory and no added niceness."""

CHANCES = 2
"""Deaths on one grammar or row in isolation after which the fault is attributed to it even if it may be chance."""

T = TypeVar("T")


@dataclass(slots=True)
class AwaitedRow:
    """A row that waits for its masks: its index in the plan, its matcher, and the tokens that the matcher lacks.

    `draft`: tokens that may follow; a mask is made before the first and after each.
    """

    row: int
    output: OutputState
    tokens: list[int]
    draft: Sequence[int] = ()


@dataclass(slots=True)
class MadeMasks:
    """The masks for the runner, and the rows whose matcher has failed: their mask allows every token."""

    masks: plan_pb2.Masks
    failures: list[tuple[int, str]] = field(default_factory=list)
    """(index among the awaited rows, reason)."""
    unavailable: set[int] = field(default_factory=set)
    """Indices of the failures not caused by the row: no mask process could be started."""
    ahead: dict[int, list[bytes]] = field(default_factory=dict)
    """By index of a row with a draft, the masks after its draft tokens, up to the first that is not allowed."""
    forced: dict[int, list[int]] = field(default_factory=dict)
    """By index, the tokens that must come next, which the matcher has taken; only of rows that have some."""


class Handle(Protocol):
    """Interface of `MaskHandle`."""

    deaths: int

    def start(self) -> int: ...

    @property
    def running(self) -> int: ...

    def ask(
        self,
        channel: Channel,
        generation: int,
        body: bytes,
        *,
        alone: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> bytes: ...

    def reserve(self, num_bytes: int) -> None: ...

    @property
    def memory(self) -> mmap.mmap | bytes: ...

    def close(self) -> None: ...


class MaskClient:
    """Client of the two mask processes of one scheduler and its model."""

    def __init__(self, vocab_size: int, grammars: Handle, masks: Handle, server: ForkServer | None = None) -> None:
        """`grammars` and `masks`: the two processes, not started yet. `server` forks them."""
        self._server = server
        self._mask_bytes = mask_bytes(vocab_size)
        self._every_token = every_token(vocab_size)
        self._packed = PackedRows(self._mask_bytes)
        self._grammars, self._masks = grammars, masks
        self._ids = count(1)
        self._dropped: list[int] = []
        self._told: list[tuple[OutputState, list[int]]] = []  # tokens that the process has and the logs lack
        self._open = OpenMatchers(-1, [])

    @classmethod
    def of(cls, model: plan_pb2.Model, threads: int) -> MaskClient:
        """Returns a client with processes of its own; `threads` make the masks of one plan."""
        server = ForkServer(model)
        grammars = MaskHandle("grammars", server, 1, GRAMMAR_LIMITS)
        return cls(model.vocab_size, grammars, MaskHandle("masks", server, threads, MASK_LIMITS), server)

    def start(self) -> None:
        """Starts both processes before they are needed. Raises MasksUnavailable."""
        self._grammars.start()
        self._masks.start()

    def close(self) -> None:
        """Ends both processes."""
        if self._server is not None:
            self._server.close()
        self._grammars.close()
        self._masks.close()

    @property
    def deaths(self) -> dict[str, int]:
        """Number of mask processes that have died, by role."""
        return {"grammars": self._grammars.deaths, "masks": self._masks.deaths}

    # ------------------------------------------------------------------ grammars

    def check(self, kind: str, text: str, received: list[int]) -> tuple[str, int]:
        """Returns the grammar in llguidance's form, and how many of the received tokens begin a match.

        Raises UnusableGrammar and MasksUnavailable.
        """
        asked = {"check": {"kind": kind, "text": text, "received": received}}
        answer = self._grammar(self._grammars, asked)
        return answer["grammar"], answer["taken"]

    def open(self, grammar: str, count: int, min_tokens: int, stop_ids: list[int]) -> list[OutputState]:
        """Opens `count` matchers at the beginning of a checked grammar. Raises UnusableGrammar and MasksUnavailable."""
        outputs = [OutputState(next(self._ids), grammar, min_tokens, stop_ids) for _ in range(count)]
        generation = self._masks.start()
        self._grammar(self._masks, open_request(outputs))
        for output in outputs:
            output.generation = generation
        return outputs

    def _grammar(self, handle: Handle, asked: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(asked).encode()

        def ask(alone: bool) -> bytes:
            return handle.ask(Channel.GRAMMARS, handle.start(), body, alone=alone)

        try:
            answer = _patiently(lambda: ask(alone=True)) if handle is self._grammars else _then_alone(ask)
        except Died as death:
            handle.start()  # this grammar's tenant pays for the restart: the next grammar finds a running process
            raise UnusableGrammar(str(death)) from death
        answered: dict[str, Any] = json.loads(answer)
        if "error" in answered:
            raise UnusableGrammar(answered["error"])
        return answered

    # ------------------------------------------------------------------ masks

    def make(self, rows: list[AwaitedRow], dropped: Sequence[int] = (), *, forced: bool = False) -> MadeMasks:
        """Makes the masks of one plan, and finds the `forced` tokens. Never raises for a fault of a request.

        `dropped`: matchers that neither this nor a later call uses.
        """
        self._dropped.extend(dropped)
        made, indices = MadeMasks(plan_pb2.Masks()), range(len(rows))
        while True:
            try:
                self._make(indices, rows, forced, made)
            except DiedBefore:
                continue
            except Died:
                for index in indices:
                    self._make_alone(index, rows, forced, made)
            except MasksUnavailable as error:
                return self.free(rows, str(error))
            return made

    def free(self, rows: list[AwaitedRow], problem: str) -> MadeMasks:
        """Returns masks that allow every token; all rows fail as unavailable, without a fault of their own."""
        made = MadeMasks(plan_pb2.Masks(), unavailable=set(range(len(rows))))
        for index in range(len(rows)):
            self._fail(index, rows, problem, made)
        return made

    def _make(
        self, indices: Sequence[int], rows: list[AwaitedRow], forced: bool, made: MadeMasks, alone: bool = False
    ) -> None:
        """Adds these rows to `made`. Raises Died, having added nothing, and MasksUnavailable."""
        chosen = rows if len(indices) == len(rows) else [rows[index] for index in indices]
        outputs, problems = [row.output for row in chosen], dict[int, str]()
        if self._masks.running != self._open.generation or outputs != self._open.outputs:
            generation = self._masks.start()
            problems = self._open_lacking(dict(zip(indices, outputs, strict=True)), generation, alone)
            if problems:
                indices = [index for index in indices if index not in problems]
                chosen = [rows[index] for index in indices]
            self._open = OpenMatchers(generation, [row.output for row in chosen])
        if chosen:
            self._ask(indices, chosen, forced, made, alone)
        for index, problem in problems.items():
            self._fail(index, rows, problem, made)

    def _ask(
        self, indices: Sequence[int], chosen: list[AwaitedRow], forced: bool, made: MadeMasks, alone: bool
    ) -> None:
        """Requests the masks of these rows, which are those of `_open`, and copies them out of the shared memory."""
        handle, lineup, dropped = self._masks, self._open, self._dropped
        if dropped:
            self._dropped = []
        tokens = [row.tokens for row in chosen]
        drafts: Sequence[Sequence[int]] = [row.draft for row in chosen]
        if not any(drafts):
            drafts = ()
        ask = MaskAsk(lineup.ids, tokens, drafts, forced, dropped)
        handle.reserve(ask.num_positions * self._mask_bytes)
        body, numbers = ask.encode(), list[int]()

        def prepare() -> None:
            self._log_told()
            numbers.extend([row.row for row in chosen])
            self._packed.prepare(numbers)

        answer = MaskAnswer.decode(handle.ask(Channel.MASKS, lineup.generation, body, alone=alone, meanwhile=prepare))
        self._told.extend(zip(lineup.outputs, tokens, strict=True))
        if answer.forced:
            self._told.extend(zip(lineup.outputs, answer.forced, strict=True))
        places = first_places(len(chosen), drafts)
        if drafts:
            self._add_ahead(indices, drafts, places, answer.positions, made)
        self._packed.add(made.masks, numbers, handle.memory, places)
        if answer.failures:
            made.failures.extend((indices[place], why) for place, why in answer.failures)
        if answer.forced:
            made.forced.update((index, run) for index, run in zip(indices, answer.forced, strict=True) if run)

    def _log_told(self) -> None:
        """Updates the logs for the previous plan, while the process makes the masks of this one."""
        for output, tokens in self._told:
            output.log.fromlist(tokens)
        self._told.clear()

    def _add_ahead(
        self,
        indices: Sequence[int],
        drafts: Sequence[Sequence[int]],
        places: Sequence[int],
        positions: Sequence[int],
        made: MadeMasks,
    ) -> None:
        """Adds the masks after draft tokens."""
        size, memory = self._mask_bytes, self._masks.memory
        for index, draft, place, made_here in zip(indices, drafts, places, positions, strict=True):
            if draft:
                ahead = range(place + 1, place + made_here)
                made.ahead[index] = [memory[each * size : (each + 1) * size] for each in ahead]

    def _make_alone(self, index: int, rows: list[AwaitedRow], forced: bool, made: MadeMasks) -> None:
        """Makes the masks of one row in isolation: if the process dies, the fault is attributed to the row."""
        try:
            _patiently(lambda: self._make([index], rows, forced, made, alone=True))
        except Died as death:
            self._fail(index, rows, str(death), made)
        except MasksUnavailable as error:
            made.unavailable.add(index)
            self._fail(index, rows, str(error), made)

    def _open_lacking(self, outputs: dict[int, OutputState], generation: int, alone: bool) -> dict[int, str]:
        """Rebuilds the matchers that this process lacks from the tokens of their sequences; `outputs` is by index.

        Returns, by index, the reason why a matcher can't be built. Raises Died.
        """
        self._log_told()
        problems = {}
        for index, output in outputs.items():
            if output.generation == generation:
                continue
            body = json.dumps(open_request([output])).encode()
            answer = json.loads(self._masks.ask(Channel.GRAMMARS, generation, body, alone=alone))
            output.generation = generation
            if "error" in answer:
                problems[index] = answer["error"]
        return problems

    def _fail(self, index: int, rows: list[AwaitedRow], problem: str, made: MadeMasks) -> None:
        """Records the failure of a row's sequence, and gives its runner a mask that allows every token."""
        made.masks.rows.add(row=rows[index].row, bits=self._every_token)
        made.failures.append((index, problem))


def _then_alone(ask: Callable[[bool], T]) -> T:
    """Returns `ask(alone=False)`; if the process dies, which another request may have caused, asks in isolation.

    Raises Died.
    """
    try:
        return ask(False)
    except Died:
        return _patiently(lambda: ask(True))


def _patiently(ask: Callable[[], T]) -> T:
    """Returns `ask()`, which makes one request in isolation. Raises Died if the process dies of it.

    A death that may be chance counts from the second on: the process may have been killed from outside, or an earlier
    request may have used up its memory.
    """
    deaths = 0
    while True:
        try:
            return ask()
        except DiedBefore:
            continue
        except Died as death:
            deaths += 1
            if deaths == CHANCES or not death.may_be_chance:
                raise

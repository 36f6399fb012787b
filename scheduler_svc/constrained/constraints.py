"""The engine's constrained requests: grammars are compiled before they wait for a slot, masks made while they run.

One thread compiles, another makes masks, as a grammar may take a second and a mask must not. Both hand their outcomes
to the engine between two steps. A matcher knows only tokens, so that it is made again from them wherever a sequence
goes on: on another runner, or under a new scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import structlog
from llguidance import LLMatcher

from protos import plan_pb2
from scheduler_svc.background import Background
from scheduler_svc.constrained.compiler import GrammarCompiler
from scheduler_svc.constrained.grammar_text import UnusableGrammar
from scheduler_svc.constrained.masks import AwaitedRow, MadeMasks, MaskMaker, OutputMatcher
from scheduler_svc.sequence import End, FinishReason, Phase, Request, Sequence

if TYPE_CHECKING:
    from scheduler_svc.engine import Engine
    from scheduler_svc.roster.plan_line import PlannedStep

log = structlog.get_logger()


class Constraints:
    """One engine's. Called by the engine's thread."""

    def __init__(self, engine: Engine, threads: int) -> None:
        """`threads`: for the masks of one plan."""
        self._engine = engine
        self._threads = threads
        self.wake: Callable[[], None] = lambda: None
        """Ends the engine's wait; called by other threads."""
        self._compiling = Background(lambda: self.wake())
        self._masking = Background(lambda: self.wake())
        self._compiler: GrammarCompiler | None = None
        self._maker: MaskMaker | None = None
        self._made: list[tuple[int, int, plan_pb2.Masks]] = []

    def work_in(self, compiling: Background, masking: Background) -> None:
        """Takes these threads instead of its own; before the first request."""
        self._compiling, self._masking = compiling, masking

    def prepare(self, request: Request, then: Callable[[Request], None]) -> None:
        """Calls `then(request)` once its grammar is compiled and its sequences have their matchers.

        A request whose grammar can't be used ends instead; one that has ended meanwhile is forgotten.
        """
        compiler = self._compiler = self._compiler or GrammarCompiler(self._model)
        grammar, count = request.grammar, len(request.sequences)
        self._compiling.run(
            lambda: _compiled(compiler, grammar, count), lambda found: self._prepared(request, found, then)
        )

    def ask(self, session: int, step: PlannedStep) -> None:
        """The plan was sent: its masks are to be made."""
        maker = self._maker = self._maker or MaskMaker(self._model.vocab_size, self._threads)
        rows = [_awaited(row, sequence) for row, sequence in step.awaiting]
        sequences, number = [sequence for _, sequence in step.awaiting], step.number
        self._masking.run(lambda: _made(maker, rows), lambda made: self._take(session, number, sequences, made))

    @property
    def busy(self) -> bool:
        """A thread compiles or makes masks: `settle` will have something to take."""
        return self._compiling.busy or self._masking.busy

    def settle(self) -> None:
        """Takes what the threads have brought, between two steps."""
        self._compiling.collect()
        self._masking.collect()

    def send(self) -> None:
        """Sends the masks that are made."""
        for session, number, masks in self._made:
            self._engine.runners.send_masks(session, number, masks)
        self._made.clear()

    @property
    def _model(self) -> plan_pb2.Model:
        model = self._engine.pool.model
        if model is None:
            raise RuntimeError("a constrained request came before the first runner")
        return model

    def _prepared(self, request: Request, found: list[LLMatcher] | str, then: Callable[[Request], None]) -> None:
        if request.finished:
            return
        if isinstance(found, str):
            self._engine.finish_request(request, End(FinishReason.ERROR, message=f"constraint: {found}"))
            return
        stop_ids = np.array(sorted(request.stop_ids), np.int32)
        for sequence, matcher in zip(request.sequences, found, strict=True):
            if sequence.phase is not Phase.FINISHED:
                sequence.matcher = OutputMatcher(matcher, request.sampling.min_tokens, stop_ids)
                sequence.num_matched = 0
                self._engine.rank_anew(sequence)  # the policy may have changed meanwhile
        then(request)

    def _take(self, session: int, number: int, sequences: list[Sequence], made: MadeMasks) -> None:
        self._made.append((session, number, made.masks))
        for index, problem in made.failures:
            message = f"the output can't go on to match its constraint: {problem}"
            self._engine.finish(sequences[index], End(FinishReason.ERROR, message=message))


def _compiled(compiler: GrammarCompiler, grammar: str, count: int) -> list[LLMatcher] | str:
    """So many matchers at their beginning, or why there are none."""
    try:
        return [compiler.compile(grammar) for _ in range(count)]
    except UnusableGrammar as error:
        return str(error)
    except Exception as error:  # one request's data must not end the process
        log.exception("a grammar failed to compile")
        return f"{type(error).__name__}: {error}"


def _awaited(row: int, sequence: Sequence) -> AwaitedRow:
    """The row with all that its matcher was not told yet."""
    if sequence.matcher is None:
        raise RuntimeError(f"sequence {sequence.id} runs without its matcher")
    tokens = sequence.tokens[sequence.prompt_len + sequence.num_matched :].tolist()
    sequence.num_matched += len(tokens)
    return AwaitedRow(row, sequence.matcher, tokens)


def _made(maker: MaskMaker, rows: list[AwaitedRow]) -> MadeMasks:
    """The rows' masks; if making them fails as a whole, all that wait fail, and the runner goes on."""
    try:
        return maker.make(rows)
    except Exception as error:  # one plan's rows must not end the process
        log.exception("masks could not be made")
        problem = f"{type(error).__name__}: {error}"
        return MadeMasks(maker.free(rows), [(index, problem) for index in range(len(rows))])

"""Request handlers of a mask process: checks grammars, keeps one matcher per sequence, and makes masks.

Two threads use it, one for `grammar` and one for `masks`: a grammar may take a second, and a mask must not.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from roster_protos import plan_pb2
from scheduler_svc.constrained.columns import MaskAnswer, MaskAsk
from scheduler_svc.constrained.process.compiler import GrammarCompiler, grammar_text
from scheduler_svc.constrained.process.masks import MaskMaker, OutputMatcher
from scheduler_svc.constrained.source import UnusableGrammar

Memory = Callable[[int], npt.NDArray[np.uint32]]
"""Maps n to an array of the first n uint32 of the shared memory."""


class MaskServer:
    """Server of one model. Takes and returns the bodies of frames; masks go into `memory`."""

    def __init__(self, model: plan_pb2.Model, threads: int, memory: Memory, compiler: GrammarCompiler) -> None:
        """`threads` make the masks of one plan. `compiler` is this model's."""
        self._compiler = compiler
        self.maker = MaskMaker(model.vocab_size, threads)
        self._memory = memory
        self._outputs: dict[int, OutputMatcher] = {}
        self._ids, self._rows = array("q"), list[OutputMatcher]()  # those of the previous plan

    # ------------------------------------------------------------------ grammars

    def grammar(self, frame: bytes) -> bytes:
        """Answers {"check"} or {"open"}, both JSON; an answer {"error"} has the reason why a grammar can't be used."""
        asked = json.loads(frame)
        try:
            answer = self._check(**asked["check"]) if "check" in asked else self._open(**asked["open"])
        except UnusableGrammar as error:
            answer = {"error": str(error)}
        return json.dumps(answer).encode()

    def _check(self, kind: str, text: str, received: list[int]) -> dict[str, Any]:
        """Returns the grammar in llguidance's form, and how many of the received tokens begin a match."""
        grammar = grammar_text(kind, text)
        matcher = self._compiler.compile(grammar)
        taken = matcher.try_consume_tokens(received)
        if taken == len(received) and taken:
            matcher.compute_bitmask()
        return {"grammar": grammar, "taken": taken}

    def _open(
        self, grammar: str, ids: list[int], min_tokens: int, stop_ids: list[int], tokens: list[int]
    ) -> dict[str, Any]:
        """Opens matchers with these ids and advances each by `tokens`."""
        opened = {}
        for each in ids:
            output = OutputMatcher(self._compiler.compile(grammar), min_tokens, np.array(stop_ids, np.int32))
            if tokens and (problem := output.feed(tokens)):
                raise UnusableGrammar(problem)
            opened[each] = output
        self._outputs.update(opened)
        return {}

    # ------------------------------------------------------------------ masks

    def masks(self, frame: bytes) -> bytes:
        """Answers a MaskAsk with a MaskAnswer."""
        asked, outputs = MaskAsk.decode(frame), self._outputs
        for each in asked.dropped:
            outputs.pop(each, None)
        if asked.ids != self._ids or asked.dropped:
            self._ids, self._rows = asked.ids, [outputs[each] for each in asked.ids]
        rows, places = self._rows, asked.num_positions
        bits = self._memory(places * self.maker.words).reshape(places, self.maker.words)
        positions, failures = self.maker.make(rows, asked.tokens, bits, asked.drafts)
        answer = MaskAnswer(positions if asked.drafts else [], failures)
        if asked.forced and not asked.drafts:
            runs = self.maker.force(rows, bits, [index for index, _ in failures])
            answer.forced = runs if any(runs) else []
        return answer.encode()

"""Compiles grammars for one model's tokenizer, within limits, and remembers the latest. Runs in a mask process."""

from __future__ import annotations

import threading
from collections import OrderedDict

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from roster_protos import plan_pb2
from scheduler_svc.constrained.source import AS_COMPILED, UnusableGrammar, check_size

REMEMBERED = 64
"""Grammars that are kept compiled: applications send the same few schemas all day."""

MOST_CHARACTERS = 240
"""Of an error message; they quote the grammar."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # at 50,000 a millisecond
    max_grammar_size=100_000,  # symbols in productions
    max_lexer_states=50_000,  # at 1 to 2 KB
    step_lexer_fuel=200_000,  # at 14,000 a millisecond
    step_max_items=50_000,  # at 20,000 a millisecond
    verbose_errors=False,
)
"""What a grammar may cost: the first two when it is compiled, the others with each mask."""


class GrammarCompiler:
    """One model. May be called by several threads."""

    def __init__(self, model: plan_pb2.Model) -> None:
        self._model = model
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def prepare(self) -> None:
        """Builds what the vocabulary needs, which takes up to a second. Raises UnusableGrammar."""
        with self._lock:
            self._built_tokenizer()

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at its beginning, not shared with anybody.

        The first call takes up to a second for the vocabulary, later ones mostly milliseconds. Raises UnusableGrammar.
        """
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known.deep_copy()
            tokenizer = self._built_tokenizer()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first takes far longer than those after it, and no step waits for it here
        if matcher.is_error():
            raise UnusableGrammar(sentence(matcher.get_error()))
        with self._lock:
            self._compiled[grammar] = matcher.deep_copy()
            while len(self._compiled) > REMEMBERED:
                self._compiled.popitem(last=False)
        return matcher

    def _built_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            model = self._model
            if not model.eos_token_ids:
                raise UnusableGrammar("the model has no end-of-sequence token, so that no constrained text could end")
            try:
                self._tokenizer = LLTokenizer(
                    model.tokenizer.decode(), n_vocab=model.vocab_size, eos_token=list(model.eos_token_ids)
                )
            except ValueError as error:
                raise UnusableGrammar(f"the model's tokenizer allows no constraints: {sentence(str(error))}") from error
        return self._tokenizer


def sentence(error: str) -> str:
    """What `llguidance` says, in one line, not too long for a status."""
    line = " ".join(error.split())
    return line if len(line) <= MOST_CHARACTERS else line[:MOST_CHARACTERS] + "..."


ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it. Free whitespace has no end, and a small model may never find one."""


def grammar_text(kind: str, text: str) -> str:
    """The grammar of a constraint; `kind` is "json_schema", "regex", "grammar" (Lark, or GBNF) or AS_COMPILED.

    Raises UnusableGrammar for what is too long or not even of its kind; whether it can be used is told when compiled.
    """
    if kind == AS_COMPILED:
        return text
    check_size(text)
    try:
        if kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(text, defaults=ONE_LINE)  # type: ignore[arg-type]
        return grammar_from("regex" if kind == "regex" else "grammar", text)
    except ValueError as error:
        raise UnusableGrammar(f"it can't be read: {error}") from error

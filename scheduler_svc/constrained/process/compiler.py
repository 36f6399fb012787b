"""Compiles grammars for one model's tokenizer, within limits, and caches the latest. Runs in a mask process."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from roster_protos import plan_pb2
from scheduler_svc.constrained.source import AS_COMPILED, UnusableGrammar, check_size

REMEMBERED = 64
"""Number of compiled grammars in the cache: applications keep sending the same few schemas."""

MOST_CHARACTERS = 240
"""Maximum length of an error message: messages quote the grammar."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # at 50,000 a millisecond
    max_grammar_size=100_000,  # symbols in productions
    max_lexer_states=50_000,  # at 1 to 2 KB
    step_lexer_fuel=200_000,  # at 14,000 a millisecond
    step_max_items=50_000,  # at 20,000 a millisecond
    verbose_errors=False,
)
"""Limits on a grammar's cost: the first two apply when it is compiled, the others to each mask."""


class GrammarCompiler:
    """Grammar compiler of one model. Thread-safe."""

    def __init__(self, model: plan_pb2.Model) -> None:
        self._model = model
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def prepare(self) -> None:
        """Builds the tokenizer, which takes up to a second. Raises UnusableGrammar."""
        with self._lock:
            self._built_tokenizer()

    def compile(self, grammar: str) -> LLMatcher:
        """Returns an unshared matcher in its initial state. Raises UnusableGrammar.

        The first call takes up to a second for the vocabulary; later calls mostly take milliseconds.
        """
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known.deep_copy()
            tokenizer = self._built_tokenizer()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask takes far longer than later ones, and no step waits here
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
                raise UnusableGrammar("the model has no end-of-sequence token, so constrained output could never end")
            try:
                self._tokenizer = LLTokenizer(
                    with_spaces(model.tokenizer.decode()), n_vocab=model.vocab_size, eos_token=list(model.eos_token_ids)
                )
            except ValueError as error:
                raise UnusableGrammar(
                    f"the model's tokenizer does not support constraints: {sentence(str(error))}"
                ) from error
        return self._tokenizer


def with_spaces(tokenizer: str) -> str:
    """Returns a serialized tokenizer whose decoder replaces ▁ by a space in the way that `llguidance` knows.

    It takes the mark of a Metaspace decoder for a letter, and refuses such a decoder alone.
    """
    if '"Metaspace"' not in tokenizer:
        return tokenizer
    description = json.loads(tokenizer)
    decoder = description.get("decoder") or {}
    alone = [decoder, {"type": "ByteFallback"}, {"type": "Fuse"}]
    steps = decoder.get("decoders") or alone
    if not any(step.get("type") == "Metaspace" for step in steps):
        return tokenizer
    replaced = [_replace(step["replacement"]) if step["type"] == "Metaspace" else step for step in steps]
    return json.dumps({**description, "decoder": {"type": "Sequence", "decoders": replaced}}, ensure_ascii=False)


def _replace(mark: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": mark}, "content": " "}


def sentence(error: str) -> str:
    """Returns an error message of `llguidance` as one line, shortened to fit a gRPC status."""
    line = " ".join(error.split())
    return line if len(line) <= MOST_CHARACTERS else line[:MOST_CHARACTERS] + "..."


ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options for JSON as `json.dumps` writes it. Flexible whitespace is unbounded, and a small model may never end it."""


def grammar_text(kind: str, text: str) -> str:
    """Returns a constraint in llguidance's form.

    `kind` is "json_schema", "regex", "grammar" (Lark or GBNF) or AS_COMPILED. Raises UnusableGrammar if the text is
    empty, too long or can't be parsed as its kind; other faults show in `compile`.
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

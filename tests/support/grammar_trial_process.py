"""The process in which grammars are tried: `python -m tests.support.grammar_trial_process [raw]`; see grammar_trials.

A line of JSON on stdin gives `kind`, `text`, `probes`, `steps` and `seed`; a line on stdout answers with `refused`, or
with `accepted`, a Boolean for each probe. With `raw`, every schema reaches the library, whatever literals it has.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys

import numpy as np
from llguidance import LLMatcher

from runner_svc.backends.byte_tokenizer import IM_END_ID, NUM_TOKENS, byte_model
from scheduler_svc.constrained.process.compiler import GrammarCompiler, grammar_text
from scheduler_svc.constrained.schema.schema_literals import check_literals
from scheduler_svc.constrained.source import UnusableGrammar

MOST_BYTES = 3 << 30
MOST_S = 30.0


def walk(matcher: LLMatcher, steps: int, rng: random.Random) -> None:
    """Draws allowed tokens until the text ends or the matcher fails: lexers build states only along a text."""
    for _ in range(steps):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:NUM_TOKENS]
        allowed = np.flatnonzero(bits)
        if matcher.is_error() or not len(allowed):
            return
        token = int(allowed[rng.randrange(len(allowed))])
        if token == IM_END_ID or not matcher.consume_token(token):
            return


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Whether the grammar accepts the whole text."""
    copy, tokens = matcher.deep_copy(), list(text.encode())
    return copy.try_consume_tokens(tokens) == len(tokens) and bool(copy.is_accepting())


def main() -> None:
    """Serves until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library's own output must not mix with answers
    for limit, most in ((resource.RLIMIT_AS, MOST_BYTES), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (most, most))
    raw = sys.argv[1:] == ["raw"]
    compiler = GrammarCompiler(byte_model("hash", "HashModel", NUM_TOKENS, 2048))
    for line in sys.stdin:
        case = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, MOST_S)  # SIGALRM ends a process that has no handler for it
        try:
            if not raw:
                check_literals(case["kind"], case["text"])
            matcher = compiler.compile(grammar_text(case["kind"], case["text"]))
        except UnusableGrammar as error:
            answer: dict[str, object] = {"refused": str(error)}
        else:
            answer = {"accepted": [accepts(matcher, probe) for probe in case["probes"]]}
            walk(matcher, case["steps"], random.Random(case["seed"]))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""The eight requests of `roster demo`, with questions and answers of very different lengths."""

from __future__ import annotations

from dataclasses import dataclass

_REPORT = (
    "The lighthouse at the northern point was built in 1871, after three ships had run aground there in a single "
    "winter. Its first keeper, a retired carpenter, lived in it with his wife and their five children, grew potatoes "
    "in the lee of the wall, and wrote down the weather every morning for thirty-one years. The lamp burned whale oil, "
    "then paraffin, and from 1934 on it ran on electricity from a cable that storms tore out twice. In 1978 the last "
    "keeper left and a timer took over. Today the tower belongs to a small society, which opens it on Sundays, repairs "
    "the stairs with the money that visitors give, and has begun to read the old weather books into a computer, since "
    "nobody else measured the wind on that coast so early and so patiently."
)


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """A question and the maximum number of tokens in its answer."""

    question: str
    max_tokens: int


DEMO_REQUESTS = (
    DemoRequest("What is the capital of France?", 12),
    DemoRequest("Explain step by step how a rainbow forms, in detail.", 120),
    DemoRequest(f"Summarize this text in one sentence.\n\n{_REPORT}", 40),
    DemoRequest("Write a short story about a fox who learns to bake bread.", 90),
    DemoRequest("Say hello.", 8),
    DemoRequest("Why do cats purr? Give several reasons, each with an explanation.", 110),
    DemoRequest("Name a prime number between 10 and 20.", 16),
    DemoRequest("Describe the sea at night in two sentences.", 48),
)

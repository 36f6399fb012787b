"""The requests of a run: arrivals, lengths, and prompts that share the prefixes of the trace."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from roster_client.bench.load.lengths import Lengths
from roster_client.bench.load.prompts import PLAIN_WORDS, text_prompts, token_prompts, words_of_tokenizer
from roster_client.bench.load.workload import Arrivals, make_workload, random_trace, repeated
from scheduler_svc.simulator.trace import Trace, TraceError, TraceRequest

VOCAB = 1000


def rows(*times: float) -> Trace:
    return Trace("t", tuple(TraceRequest(time, 8, 4) for time in times))


def scheduled(trace: Trace, arrivals: Arrivals, seed: int = 0) -> list[float]:
    return [
        request.scheduled_s for request in make_workload(trace, arrivals, token_prompts(VOCAB, 0), seed=seed).requests
    ]


def test_arrivals_of_the_trace_begin_at_zero_and_scale() -> None:
    assert scheduled(rows(10, 11, 14), Arrivals()) == [0, 1, 4]
    assert scheduled(rows(10, 11, 14), Arrivals(scale=2)) == [0, 0.5, 2]
    assert scheduled(rows(10, 11, 14), Arrivals(at_once=True)) == [0, 0, 0]


def test_poisson_arrivals_have_their_rate_and_keep_order() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    times = scheduled(rows(*range(4000)), Arrivals(rate=5.0), seed)
    assert times == sorted(times)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert np.mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert np.std(gaps) == pytest.approx(0.2, rel=0.15), "exponential: its spread is its mean"
    assert scheduled(rows(0, 1, 2), Arrivals(rate=5.0), 1) == scheduled(rows(0, 1, 2), Arrivals(rate=5.0), 1)


def test_a_grid_of_arrival_times_and_jitter_are_noted() -> None:
    grid = rows(0, 0, 3, 6, 6, 9)
    (note,) = make_workload(grid, Arrivals(), token_prompts(VOCAB, 0)).notes
    assert "rounded to 3 s" in note
    jittered = make_workload(grid, Arrivals(jitter_s=3), token_prompts(VOCAB, 0))
    assert "U(0, 3) s" in jittered.notes[0] and "U(0, 3) s" in jittered.arrivals
    assert len({request.scheduled_s for request in jittered.requests}) == 6
    assert make_workload(rows(0, 0.5, 3, 6), Arrivals(), token_prompts(VOCAB, 0)).notes == ()


def test_contradicting_arrivals_are_refused() -> None:
    for arrivals in ({"rate": 1.0, "at_once": True}, {"rate": 1.0, "scale": 2.0}, {"at_once": True, "jitter_s": 3.0}):
        with pytest.raises(ValueError, match="not several"):
            Arrivals(**arrivals)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="choose one above 0"):
        Arrivals(rate=0)


def test_the_mean_rate_is_reported() -> None:
    assert make_workload(rows(0, 1, 2, 4), Arrivals(), token_prompts(VOCAB, 0)).rate == 0.75
    assert make_workload(rows(0, 1), Arrivals(at_once=True), token_prompts(VOCAB, 0)).rate is None


@pytest.mark.parametrize("jitter_s", [0.0, 5.0])
def test_a_trace_is_repeated(jitter_s: float) -> None:
    longer = repeated(rows(0, 1, 2), 7)
    times = scheduled(longer, Arrivals(jitter_s=jitter_s))
    assert len(times) == 7
    assert times == sorted(times)
    if not jitter_s:
        assert times == [0, 1, 2, 3, 4, 5, 6]
    hashed = Trace("t", (TraceRequest(0, 8, 4, (7,)),))
    assert len(repeated(hashed, 1).requests) == 1
    with pytest.raises(TraceError, match="can't be repeated"):
        repeated(hashed, 2)


@pytest.mark.parametrize(
    ("text", "mean", "low", "high"),
    [("128", 128, 128, 128), ("uniform:16-256", 136, 16, 256), ("exponential:100", 100, 1, 3000),
     ("lognormal:200,0.5", 226.6, 1, 5000)],
)  # fmt: skip
def test_lengths(text: str, mean: float, low: int, high: int) -> None:
    rng = random.Random(7)
    drawn = [Lengths.parse(text).draw(rng) for _ in range(5000)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.05)
    assert low <= min(drawn) and max(drawn) <= high


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "uniform:9-3", "lognormal:5", "exponential:0", "7:3"])
def test_invalid_distributions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a length distribution"):
        Lengths.parse(text)


def test_random_lengths_make_a_trace() -> None:
    trace = random_trace(Lengths.parse("uniform:4-9"), Lengths.parse("3"), 50, seed=1)
    workload = make_workload(trace, Arrivals(rate=2.0), token_prompts(VOCAB, 0))
    assert all(4 <= len(request.prompt) == request.prompt_tokens <= 9 for request in workload.requests)
    assert {request.output_tokens for request in workload.requests} == {3}
    assert len({request.request_id for request in workload.requests}) == 50


def shared(first: object, second: object) -> int:
    """Returns the length of the common prefix, in tokens or words."""
    pairs = zip(first, second, strict=False)  # type: ignore[call-overload]
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [token_prompts(VOCAB, 1), text_prompts(PLAIN_WORDS, 1)], ids=["tokens", "text"])
def test_equal_hashes_are_equal_prefixes_and_nothing_else_is(make: object) -> None:
    trace = Trace(
        "t",
        (
            TraceRequest(0, 100, 4, (5, 6)),
            TraceRequest(1, 128, 4, (5, 6)),
            TraceRequest(2, 128, 4, (5, 9)),
            TraceRequest(3, 128, 4),
            TraceRequest(4, 128, 4),
        ),
        hash_block_tokens=64,
    )
    prompts = [request.prompt for request in make_workload(trace, Arrivals(), make).requests]  # type: ignore[arg-type]
    parts = [prompt.split() if isinstance(prompt, str) else prompt.tolist() for prompt in prompts]
    assert [len(part) for part in parts] == [100, 128, 128, 128, 128]
    assert shared(parts[0], parts[1]) == 100
    assert 64 <= shared(parts[1], parts[2]) < 70, "the first of two blocks; further tokens may be equal by chance"
    assert shared(parts[3], parts[4]) < 6


def test_another_salt_shares_nothing() -> None:
    trace = Trace("t", (TraceRequest(0, 512, 4, (5,)), TraceRequest(1, 512, 4)))
    for index in range(2):
        prompts = [token_prompts(VOCAB, salt)(trace, index) for salt in (0, 1, 2)]
        assert all(shared(prompts[a].tolist(), prompts[b].tolist()) < 4 for a, b in ((0, 1), (1, 2), (0, 2)))  # type: ignore[union-attr]


def test_words_of_a_tokenizer_are_one_token_each(tmp_path: object) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = ["the", "of", "9", "x!", *[f"{a}{b}{c}" for a in letters for b in letters for c in "aeiou"]]
    tokenizer = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="9"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "tokenizer.json"))  # type: ignore[operator]
    words = words_of_tokenizer(tmp_path)  # type: ignore[arg-type]
    assert "the" in words and "9" not in words and "x!" not in words
    prompt = text_prompts(words, 3)(Trace("t", (TraceRequest(0, 77, 1),)), 0)
    assert isinstance(prompt, str) and len(tokenizer.encode(prompt).ids) == 77
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        words_of_tokenizer(tmp_path / "nothing")  # type: ignore[operator]

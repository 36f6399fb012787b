"""Checks the engine's log-probabilities.

Each token comes with its own. Each prompt position to be scored comes once and in order, before the first token.
"""

from __future__ import annotations

import numpy as np

from roster_protos import engine_pb2, plan_pb2
from runner_svc.backends.byte_tokenizer import NUM_TOKENS
from runner_svc.backends.hash_tokens import expected_logprobs, only_logprobs


def assert_scored(
    row: plan_pb2.RowLogprobs, tokens: list[int], position: int, top: int, constrained: bool = False
) -> None:
    """Checks the row against a hash backend's log-probabilities of these tokens, the first one at `position`.

    If `constrained`, a token may also be the only one that its mask allowed.
    """
    expected = [expected_logprobs(token, position + index, top, NUM_TOKENS) for index, token in enumerate(tokens)]
    ids = np.frombuffer(row.top_ids, "<i4").reshape(len(tokens), -1).tolist() if tokens else []
    given = np.frombuffer(row.values, "<f4").tolist(), ids
    if constrained:
        for index, (token, value, top_ids) in enumerate(zip(tokens, *given, strict=True)):
            certain = only_logprobs(token, top)
            if (value, top_ids) == certain[:2]:
                expected[index] = certain
    assert np.array_equal(given[0], np.array([value for value, _, _ in expected], "<f4"))
    assert given[1] == [ids for _, ids, _ in expected]


class ScoredStream:
    """One request as a worker follows it; `submit` is as first sent."""

    def __init__(self, submit: engine_pb2.Submit, first_id: int, lengths: list[int]) -> None:
        """`lengths`: number of known tokens of each choice, prompt included."""
        self._sampling = submit.sampling
        self._constrained = bool(submit.grammar)
        self._prompt = np.frombuffer(submit.prompt, "<i4").tolist()
        self._lengths = {first_id + index: length for index, length in enumerate(lengths)}
        self._next = 1

    @classmethod
    def attached(cls, submit: engine_pb2.Submit, attached: engine_pb2.Attached) -> ScoredStream:
        """Makes a stream from the answer to Attach, all of which is checked."""
        prompt_len = len(submit.prompt) // 4
        lengths = [prompt_len + len(record.tokens) // 4 for record in attached.choices]
        stream = cls(submit, attached.choices[0].sequence_id, lengths)
        if attached.HasField("prompt_logprobs"):
            stream.take_prompt(attached.prompt_logprobs)
        if submit.sampling.HasField("logprobs"):
            for record in attached.choices:
                tokens = np.frombuffer(record.tokens, "<i4").tolist()[attached.num_received :]
                assert_scored(
                    record.logprobs,
                    tokens,
                    prompt_len + attached.num_received,
                    submit.sampling.logprobs if tokens else 0,
                    bool(submit.grammar),
                )
        return stream

    def take(self, sequence_id: int, token: int, row: plan_pb2.RowLogprobs | None) -> None:
        """Takes a sequence's next token."""
        position = self._lengths[sequence_id]
        self._lengths[sequence_id] += 1
        if self._sampling.HasField("prompt_logprobs"):
            assert self._next == len(self._prompt), "a token came before its prompt was scored"
        assert (row is not None) == self._sampling.HasField("logprobs")
        if row is not None:
            assert_scored(row, [token], position, self._sampling.logprobs, self._constrained)

    def take_prompt(self, row: plan_pb2.RowLogprobs) -> None:
        """Takes log-probabilities of some of the prompt's positions."""
        count = len(row.values) // 4
        assert row.first_position == self._next and count, "a gap or a repetition"
        assert_scored(row, self._prompt[self._next : self._next + count], self._next, self._sampling.prompt_logprobs)
        self._next += count

"""Collects a stream of GenerateResponse messages and checks the guarantees of every stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from roster_protos import inference_pb2 as pb


@dataclass
class Gathered:
    """What a stream has delivered, per choice."""

    request_id: str = ""
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    sampled: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    top_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finishes: dict[int, pb.Finish] = field(default_factory=dict)
    first_indexes: dict[int, int] = field(default_factory=dict)
    prompt: pb.PromptInfo | None = None
    usage: pb.Usage | None = None
    messages: int = 0

    def add(self, response: pb.GenerateResponse) -> None:
        """Takes the next message; fails on a gap, a repetition or a message after the end."""
        assert self.usage is None, "a message came after the usage"
        assert bool(response.request_id) == (self.messages == 0), "the first message, and no other, must have the id"
        self.request_id = self.request_id or response.request_id
        if response.HasField("prompt"):
            assert self.prompt is None and not self.tokens
            self.prompt = response.prompt
        self.messages += 1
        assert len({delta.index for delta in response.deltas}) == len(response.deltas)
        for delta in response.deltas:
            self._add_delta(delta)
        for finish in response.finishes:
            assert finish.index not in self.finishes, "a choice finished twice"
            self.finishes[finish.index] = finish
            delivered = self.first_indexes.get(finish.index, finish.num_tokens) + len(self.tokens[finish.index])
            assert finish.num_tokens == delivered
        if response.HasField("usage"):
            self.usage = response.usage

    def _add_delta(self, delta: pb.Delta) -> None:
        index = delta.index
        assert index not in self.finishes, "a delta came after its choice's finish"
        assert delta.token_ids
        first = self.first_indexes.setdefault(index, delta.first_index)
        assert delta.first_index == first + len(self.tokens[index]), "a gap or a repetition"
        self.tokens[index] += delta.token_ids
        self.texts[index] += delta.text
        if delta.HasField("logprobs"):
            assert len(delta.logprobs.sampled) == len(delta.token_ids)
            assert len(delta.logprobs.top_token_ids) == len(delta.token_ids) * delta.logprobs.top
            self.sampled[index] += delta.logprobs.sampled
            self.top_ids[index] += delta.logprobs.top_token_ids


async def gather(stream: AsyncIterable[pb.GenerateResponse]) -> Gathered:
    """Gathers a whole stream, which must end with its usage."""
    gathered = Gathered()
    async for response in stream:
        gathered.add(response)
    assert gathered.usage is not None, "the stream ended without its usage"
    return gathered


def request(text: str, max_tokens: int, **fields: object) -> pb.GenerateRequest:
    """Returns a plain request."""
    made = pb.GenerateRequest(prompt=pb.Prompt(text=text), **fields)
    made.stop.max_tokens = max_tokens
    return made


def echo(text: str, max_tokens: int) -> list[int]:
    """Returns the fake engine's answer: the prompt, repeated."""
    tokens = list(text.encode())
    return [tokens[place % len(tokens)] for place in range(max_tokens)]


def random_text(generator: object, length: int) -> str:
    """Returns a text of characters of one to four bytes."""
    return "".join(generator.choice("abc xyzäß漢字かな🎉🙂") for _ in range(length))  # type: ignore[attr-defined]

"""Drives a Session stream in tests: sends actions, unpacks the columns, and keeps what each tag received."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc

from roster_protos import inference_pb2 as pb
from roster_protos import inference_pb2_grpc


@dataclass
class TagState:
    """What a tag has received since its last request began."""

    accepted: str = ""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, bytes] = field(default_factory=dict)
    sampled: dict[int, list[float]] = field(default_factory=dict)
    finishes: dict[int, pb.Finish] = field(default_factory=dict)
    refused: pb.Status | None = None
    usage: pb.Usage | None = None
    prompt: pb.PromptInfo | None = None
    first: dict[int, int] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether the tag is free again."""
        return self.refused is not None or self.usage is not None


class SessionClient:
    """One session; a task reads its responses."""

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        self.call = stub.Session()
        self.tags: dict[int, TagState] = {}
        self.messages = 0
        self._changed = asyncio.Event()
        self.reading = asyncio.create_task(self._pump())

    async def generate(self, tag: int, request: pb.GenerateRequest) -> None:
        """Starts a request under a tag."""
        self.tags[tag] = TagState()
        await self.call.write(pb.SessionRequest(tag=tag, generate=request))

    async def attach(self, tag: int, request: pb.AttachRequest) -> None:
        """Attaches to a request under a tag."""
        self.tags[tag] = TagState()
        await self.call.write(pb.SessionRequest(tag=tag, attach=request))

    async def until(self, *tags: int) -> None:
        """Returns once these tags are free; raises the session's error if it fails."""
        async with asyncio.timeout(20):
            while not all(self.tags[tag].over for tag in tags):
                self._changed.clear()
                waiting = asyncio.create_task(self._changed.wait())
                await asyncio.wait({waiting, self.reading}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if self.reading.done():
                    await self.reading

    async def _pump(self) -> None:
        while (response := await self.call.read()) is not grpc.aio.EOF:
            self.messages += 1
            self._rows(response)
            for event in response.events:
                self._event(event)
            self._changed.set()

    def _rows(self, response: pb.SessionResponse) -> None:
        rows = len(response.tags)
        indexes = response.indexes or [0] * rows
        counts = response.token_counts or [1] * rows
        assert len(indexes) == len(counts) == len(response.first_indexes) == len(response.text_lengths) == rows
        assert sum(counts) == len(response.token_ids) and sum(response.text_lengths) == len(response.text)
        logprobs = {entry.row: entry.logprobs for entry in response.logprobs}
        token = byte = 0
        for row, tag in enumerate(response.tags):
            state, index = self.tags[tag], indexes[row]
            assert not state.over and index not in state.finishes
            tokens = state.tokens.setdefault(index, [])
            first = state.first.setdefault(index, response.first_indexes[row])
            assert response.first_indexes[row] == first + len(tokens)
            tokens += response.token_ids[token : token + counts[row]]
            text = response.text[byte : byte + response.text_lengths[row]]
            text.decode()
            state.texts[index] = state.texts.get(index, b"") + text
            if row in logprobs:
                assert len(logprobs[row].sampled) == counts[row]
                state.sampled.setdefault(index, []).extend(logprobs[row].sampled)
            token += counts[row]
            byte += response.text_lengths[row]

    def _event(self, event: pb.SessionEvent) -> None:
        state = self.tags[event.tag]
        assert not state.over
        kind = event.WhichOneof("event")
        if kind == "finish":
            assert event.finish.index not in state.finishes
            state.finishes[event.finish.index] = event.finish
        else:
            assert not getattr(state, kind)
            setattr(state, kind, getattr(event, kind))

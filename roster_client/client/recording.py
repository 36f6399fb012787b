"""A recorded stream: a request whose prompt and seed are fixed, and what was answered, with log-probabilities.

The file is one JSON object:

| key | value |
|---|---|
| record | 1 |
| model, numerics | GetModelResponse's when it was recorded |
| request | the GenerateRequest as JSON, with the prompt as token ids |
| choices | of each choice: token_ids, logprobs (numbers of float32, exactly) and top, pairs of id and logprob |

`difference` says where another answer to the same request parts from it.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from roster_client.client.events import Completion, FinishReason, TokenLogprobs
from roster_protos import inference_pb2 as pb

VERSION = 1
TOP = 20
"""Likeliest tokens asked for when a record is verified, to say how likely a token that differs is."""
_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class RecordedChoice:
    """One answer."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Recording:
    """A request and its answers."""

    model: str
    numerics: str
    request: pb.GenerateRequest
    choices: list[RecordedChoice]

    @classmethod
    def of(cls, request: pb.GenerateRequest, completion: Completion, model: pb.GetModelResponse) -> Recording:
        """Returns that of a request made by `recordable`. Raises ValueError for an answer that is not whole."""
        if completion.usage is None or completion.started is None:
            raise ValueError("the answer is not whole, so it is not recorded")
        for choice in completion.choices:
            if choice.finish is not None and choice.finish.reason not in _WHOLE:
                reason = choice.finish.reason.name.lower()
                raise ValueError(f"choice {choice.index} ended by {reason}, not by itself, so it is not recorded")
        kept = pb.GenerateRequest()
        kept.CopyFrom(request)
        kept.request_id = ""
        kept.prompt.token_ids.ids[:] = completion.started.prompt_token_ids
        choices = [RecordedChoice(choice.token_ids, choice.logprobs) for choice in completion.choices]
        return cls(model.name, completion.usage.numerics, kept, choices)

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Reads a file. Raises ValueError if it is not a record."""
        try:
            raw = json.loads(path.read_text("utf-8"))
            if raw["record"] != VERSION:
                raise ValueError(f"{path} is a record of version {raw['record']}: version {VERSION} can be read")
            request = json_format.ParseDict(raw["request"], pb.GenerateRequest())
            choices = [
                RecordedChoice(
                    choice["token_ids"],
                    [
                        TokenLogprobs(value, tuple((token, likely) for token, likely in top))
                        for value, top in zip(choice["logprobs"], choice["top"], strict=True)
                    ],
                )
                for choice in raw["choices"]
            ]
            if any(len(choice.token_ids) != len(choice.logprobs) for choice in choices):
                raise ValueError(
                    f"{path} has tokens without log-probabilities: record it with roster generate --record"
                )
            return cls(raw["model"], raw["numerics"], request, choices)
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError, json_format.ParseError) as error:
            raise ValueError(f"{path} is not a record of roster generate --record: {error}") from error

    def write(self, path: Path) -> None:
        """Writes the file."""
        record: dict[str, Any] = {
            "record": VERSION,
            "model": self.model,
            "numerics": self.numerics,
            "request": json_format.MessageToDict(self.request, preserving_proto_field_name=True),
            "choices": [
                {
                    "token_ids": choice.token_ids,
                    "logprobs": [score.sampled for score in choice.logprobs],
                    "top": [[list(pair) for pair in score.top] for score in choice.logprobs],
                }
                for choice in self.choices
            ],
        }
        path.write_text(json.dumps(record) + "\n", "utf-8")

    def again(self) -> pb.GenerateRequest:
        """Returns the request, to be sent once more, for as long as it takes."""
        request = pb.GenerateRequest()
        request.CopyFrom(self.request)
        request.ClearField("timeout_ms")
        request.output.logprobs = TOP
        return request


def recordable(request: pb.GenerateRequest) -> None:
    """Fixes the seed of a request, and asks for what a record needs."""
    if not request.sampling.HasField("seed"):
        request.sampling.seed = secrets.randbits(32)
    if not request.output.HasField("logprobs"):
        request.output.logprobs = 0
    request.output.prompt_token_ids = True


def difference(recorded: RecordedChoice, got: RecordedChoice) -> str:
    """Returns a sentence about the first token that differs, and by how much; "" if all are equal in every bit."""
    pairs = zip(recorded.token_ids, recorded.logprobs, got.token_ids, got.logprobs, strict=False)
    largest, place = 0.0, None
    for index, (token, score, own, own_score) in enumerate(pairs):
        if token != own:
            likely = dict(own_score.top).get(token)
            of_recorded = f"{likely:.6g} of {token} there" if likely is not None else f"{token} is not among {TOP}"
            return (
                f"token {index} was {token} and is {own}: log-probability {own_score.sampled:.6g}, {of_recorded}, "
                f"{score.sampled:.6g} when recorded" + _before(largest, place)
            )
        if score.sampled != own_score.sampled:
            place = index if place is None else place
            largest = max(largest, abs(score.sampled - own_score.sampled))
    if len(recorded.token_ids) != len(got.token_ids):
        return f"it had {len(recorded.token_ids)} tokens and has {len(got.token_ids)}" + _before(largest, place)
    if place is not None:
        return "the tokens are equal" + _before(largest, place)
    return ""


def _before(largest: float, place: int | None) -> str:
    return "" if place is None else f"; log-probabilities differ from token {place} on, by up to {largest:.3g}"

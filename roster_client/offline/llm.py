"""`LLM`: a model for scripts and notebooks, served by both services in the background.

from roster_client import LLM

with LLM("smollm2") as llm:
    for answer in llm.generate(["Why is the sky blue?", "Name a prime number."], max_tokens=64):
        print(answer.text)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast

from roster_client.client.events import Completion
from roster_client.client.requests import Message, Options, Prompt, build_request
from roster_client.offline.background_services import BackgroundServices
from roster_client.offline.bulk_client import MOST_IN_FLIGHT
from roster_client.offline.own_services import READY_TIMEOUT_S, Settings, log_for
from roster_client.offline.progress import BulkProgress
from roster_protos import inference_pb2 as pb

UPDATE_S = 0.25


class LLM:
    """A model that both services serve on this machine, for the process that created it.

    They start in the constructor, on free loopback ports, and end with `close`, at the end of a `with`, when the
    interpreter exits, or when the process is killed. A running event loop, as in a notebook, does not matter. Methods
    may be called from several threads.
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        log: str | Path | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
        **settings: Any,
    ) -> None:
        """Starts the services and waits until they are ready.

        `model`: a folder, a .gguf file, a hub id or smollm2. `log`: the file for the services' output; None: a
        temporary one, which is removed at the end unless a service failed. `ready_timeout_s`: seconds to load the
        model, without progress. `settings`: settings of either service by name (`device="cpu"`, `slots=64`); others
        come from ROSTER_* variables, except addresses, TLS and tokens.

        Raises TypeError for an unknown setting, and ServicesFailedError, which names the log, if a service ends.
        """
        named = {name: value for name, value in settings.items() if value is not None}
        self._services = BackgroundServices(
            Settings({"model": str(model), **named}), log_for(log), ready_timeout_s, MOST_IN_FLIGHT
        )
        self._end = weakref.finalize(self, self._services.close)  # also when the interpreter exits

    @property
    def model(self) -> pb.GetModelResponse:
        """The served model: name, context length, chat template, ..."""
        return self._services.model

    @property
    def address(self) -> str:
        """Address of the gRPC API, for any other client."""
        return self._services.endpoints.listen

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        raw: bool = False,
        each: Sequence[Options] | None = None,
        progress: bool = False,
        **options: Unpack[Options],
    ) -> list[Completion]:
        """Answers prompts, all at once, and returns the answers in the order of the prompts.

        A prompt is text, token ids, or chat messages. Text is a user's message, rendered with the model's chat
        template if it has one; with `raw`, the model continues it. `options`: those of `requests.Options`, for all
        prompts; `each`: further ones, a mapping for each prompt. `progress`: show a bar on standard error.

        Raises RosterError if a prompt is refused (the message says which of several), and then cancels the others;
        ServicesFailedError if a service ends; RuntimeError after `close`. Check `finish_reason`: an answer may be cut
        short.
        """
        requests = _requests(prompts, raw, each, options)
        done = _Done()
        work = self._services.start(self._services.bulk.ask_all(requests, done.add))
        try:
            if progress:
                self._show_progress(work, len(requests), done)
            return work.result()
        except BaseException:
            work.cancel()
            raise

    def close(self) -> None:
        """Ends both services; has no effect the second time."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _show_progress(self, work: Future[list[Completion]], total: int, done: _Done) -> None:
        bulk = self._services.bulk
        before = bulk.tokens_received
        with BulkProgress(total) as bar:
            while True:
                try:
                    work.result(UPDATE_S)
                    return
                except TimeoutError:
                    bar.update(done.requests, bulk.tokens_received - before)


def _requests(
    prompts: Prompt | Iterable[Prompt], raw: bool, each: Sequence[Options] | None, options: Options
) -> list[pb.GenerateRequest]:
    """Returns a message for each prompt. Raises TypeError and ValueError."""
    one_by_one = _one_by_one(prompts)
    own: Sequence[Options] = each if each is not None else [{}] * len(one_by_one)
    if len(own) != len(one_by_one):
        raise ValueError(f"each has options for {len(own)} prompts, but there are {len(one_by_one)}")
    if "request_id" in options and len(one_by_one) > 1:
        raise TypeError("request_id belongs to one prompt: give it in `each`")
    return [build_request(prompt, {**options, **mine}, raw=raw) for prompt, mine in zip(one_by_one, own, strict=True)]


@dataclass(slots=True)
class _Done:
    """Number of requests answered so far."""

    requests: int = 0

    def add(self) -> None:
        self.requests += 1


def _one_by_one(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Returns the prompts, also where one stands alone: text, token ids or messages."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [cast(Prompt, prompts)]
    items: list[Any] = list(prompts)
    return [items] if items and isinstance(items[0], int | Message | Mapping) else items

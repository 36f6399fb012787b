"""The model that this worker serves: its latest state from the engine, and its tokenizer, built in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.front.base.service_refusals import draining, model_unusable, no_model
from scheduler_svc.front.text.tokenizer import ModelText

log = structlog.get_logger(__name__)


class ServedModel:
    """Applies ModelState messages. A tokenizer, which takes up to a second to build, is built in a thread."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called on the event loop after each state has been applied."""
        self._on_change = on_change
        self._announced = engine_pb2.ModelState()
        self._update: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._text: ModelText | None = None
        self._unusable: str | None = None
        self.state = engine_pb2.ModelState()

    @property
    def ready(self) -> bool:
        """Whether requests are accepted and served now."""
        return self._text is not None and self.state.ready and not self.state.draining

    @property
    def model(self) -> plan_pb2.Model:
        """The model of the tokenizer in use. Raises Refusal (UNAVAILABLE) while there is none."""
        self.text()
        return self.state.model

    def text(self) -> ModelText:
        """Returns the model's text. Raises Refusal while there is none."""
        if self._unusable is not None:
            raise model_unusable(self._unusable)
        if self._text is None:
            raise no_model()
        return self._text

    def text_for_new(self) -> ModelText:
        """Returns the model's text for a new request. Raises Refusal while there is none or the service drains."""
        if self.state.draining:
            raise draining()
        return self.text()

    def announce(self, state: engine_pb2.ModelState) -> None:
        """Applies a state of the engine. Of the states that arrive while a tokenizer is built, only the last counts."""
        self._announced = state
        if self._update is None or self._update.done():
            self._update = asyncio.get_running_loop().create_task(self._catch_up())

    async def _catch_up(self) -> None:
        while self.state is not self._announced:
            state = self._announced
            if state.HasField("model") and (self._text is None or state.model != self.state.model):
                await self._build(state.model)
            self.state = state
            self._on_change()

    async def _build(self, model: plan_pb2.Model) -> None:
        try:
            text = await asyncio.to_thread(ModelText, model)
            self._checking = asyncio.get_running_loop().create_task(_check_template(text))  # not awaited
            if self._text is not None:
                self._text.close()
            self._text, self._unusable = text, None
            formats = {"weight_formats": model.weight_formats} if model.weight_formats else {}
            sizes = {"vocab_size": model.vocab_size, "context_length": model.context_length}
            log.info("model", name=model.name, **sizes, **formats)
        except Exception as error:
            self._text = None
            self._unusable = str(error)
            log.error("the runner's model cannot be served", name=model.name, error=str(error))


async def _check_template(text: ModelText) -> None:
    """Compiles the chat template before the first chat needs it, and logs an error if it can't be used."""
    if problem := await asyncio.to_thread(text.check_template):
        log.error("chats are refused", name=text.model.name, reason=problem)

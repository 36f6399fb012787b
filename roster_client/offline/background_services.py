"""The services and a client for them on an event loop in a thread, for callers with a loop of their own, or none."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from roster_client.client.async_client import RosterClient
from roster_client.offline.bulk_client import BulkClient
from roster_client.offline.own_services import Settings, failed, own_services
from roster_client.offline.service_log import ServiceLog
from roster_client.serve.stack import Endpoints, ServiceDiedError
from roster_protos import inference_pb2 as pb

T = TypeVar("T")
_CLOSED = "the services are closed: make another LLM"


class BackgroundServices:
    """Both services, running from the constructor until `close`. Its methods are those of the caller's thread."""

    model: pb.GetModelResponse
    endpoints: Endpoints
    client: RosterClient
    bulk: BulkClient
    _death: asyncio.Task[ServiceDiedError]

    def __init__(self, settings: Settings, log: ServiceLog, ready_timeout_s: float, most: int) -> None:
        """Waits until the services are ready. Raises ServicesFailedError."""
        self._log = log
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._ready: Future[None] = Future()
        self._main: asyncio.Task[None] | None = None
        run = self._run(settings, ready_timeout_s, most)
        # A daemon, because other threads are awaited before the exit handler that ends this one.
        self._thread = threading.Thread(target=self._serve, args=(run,), name="roster", daemon=True)
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop, which fails with ServicesFailedError if a service ends meanwhile.

        Raises RuntimeError after `close`; a coroutine that runs then fails with it.
        """
        if self._closing.is_set() or not self._thread.is_alive():
            work.close()
            raise RuntimeError(_CLOSED)
        return asyncio.run_coroutine_threadsafe(self._unless_death(work), self._loop)

    def close(self) -> None:
        """Ends the services and the thread; has no effect the second time, or in a process forked from this one."""
        if os.getpid() != self._pid:
            return
        if self._thread.is_alive():
            with suppress(RuntimeError):  # the loop is closed already: the services could not start
                self._loop.call_soon_threadsafe(self._end)
            if threading.current_thread() is not self._thread:  # the garbage collector may run in any
                self._thread.join()
        self._log.close()

    def _end(self) -> None:
        self._closing.set()
        if not self._ready.done() and self._main is not None:
            self._main.cancel()

    def _serve(self, run: Coroutine[Any, Any, None]) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(_on_exception)
        try:
            self._main = self._loop.create_task(run)
            self._loop.run_until_complete(self._main)
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _run(self, settings: Settings, ready_timeout_s: float, most: int) -> None:
        async with own_services(settings, self._log, ready_timeout_s) as (stack, model):
            self.endpoints, self.model = stack.endpoints, model
            self.client = RosterClient(stack.endpoints.listen, reconnect_s=0)
            async with self.client, BulkClient(self.client, most=most) as self.bulk:
                self._death = asyncio.create_task(stack.wait_death())
                self._ready.set_result(None)
                await self._closing.wait()
                self._death.cancel()

    async def _unless_death(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self._death], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                if self._death.cancelled():
                    raise RuntimeError(_CLOSED)
                raise failed(self._death.result(), self._log)
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])


def _on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Reports an exception in a callback, except grpc.aio's about another loop of the process that has been closed.

    All loops get the events of all calls and pass them on, those of a call that its loop abandoned too.
    """
    if isinstance(context.get("exception"), RuntimeError) and "PollerCompletionQueue" in repr(context.get("handle")):
        return
    loop.default_exception_handler(context)

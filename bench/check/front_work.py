"""A front worker's work between the engine's frames and gRPC: everything except the sockets, on a virtual clock.

The real `InferenceService` runs, with the pacer that merges deltas. A stand-in engine samples a token for each sequence
every 5 ms of virtual time; messages are encoded and then dropped instead of being handed to gRPC.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from bench.check.virtual_loop import VirtualLoop
from bench.check.work import Advance, Work
from roster_protos import engine_pb2, inference_pb2
from runner_svc.backends.byte_tokenizer import byte_model
from scheduler_svc.front.request.preparation import Preparer
from scheduler_svc.front.rpc.inference_service import InferenceService
from scheduler_svc.front.rpc.pacing import MessagePacer
from scheduler_svc.front.stream.engine_client import EngineClient
from scheduler_svc.front.text.served_model import ServedModel

STREAMS = 256
STEP_S = 0.005
FLUSH_S = 0.03
PROMPT = tuple(range(65, 97))
FOREVER = 100_000


class StandInEngine(EngineClient):
    """Engine client without a socket: answers commands itself; `step` gives every sequence a token."""

    def __init__(self) -> None:
        super().__init__("", 0, lambda state: None)
        self._submitted: list[engine_pb2.Submit] = []
        self._left: dict[int, int] = {}  # sequence id -> tokens until its end
        self._next_id = 1
        self._steps = 0

    def send(self, command: engine_pb2.Command) -> None:
        """Accepts submitted requests and ignores other commands."""
        if command.HasField("submit"):
            self._submitted.append(command.submit)

    def step(self) -> None:
        """Delivers the frame of one engine step to the worker, decoded from its bytes."""
        for submit in self._submitted:
            accepted = engine_pb2.Accepted(handle=submit.handle, first_sequence_id=self._next_id)
            self._dispatch(_decoded(engine_pb2.FromEngine(accepted=accepted)))
            self._left[self._next_id] = submit.max_tokens
            self._next_id += 1
        self._submitted.clear()
        if not self._left:
            return
        self._steps += 1
        ids = list(self._left)
        tokens = array("i", (97 + (self._steps + number) % 26 for number in ids))
        step = engine_pb2.Step(sequence_ids=array("Q", ids).tobytes(), tokens=tokens.tobytes())
        for number in ids:
            self._left[number] -= 1
            if not self._left[number]:
                del self._left[number]
                step.ends.add(sequence_id=number, reason=inference_pb2.FINISH_REASON_LENGTH)
        self._dispatch(_decoded(engine_pb2.FromEngine(step=step)))


def _decoded(message: engine_pb2.FromEngine) -> engine_pb2.FromEngine:
    return engine_pb2.FromEngine.FromString(message.SerializeToString())


@dataclass(slots=True)
class Call:
    """gRPC call without a connection: reads the given messages, then blocks."""

    requests: list[inference_pb2.SessionRequest] = field(default_factory=list)

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None

    async def read(self) -> Any:
        if self.requests:
            return self.requests.pop()
        await asyncio.get_running_loop().create_future()

    async def write(self, response: Message) -> None:
        response.SerializeToString()


Client = Callable[[InferenceService, int], Any]
"""Maps (service, client number) to a coroutine that keeps the service busy."""


def request(max_tokens: int) -> inference_pb2.GenerateRequest:
    """Returns a request with a prompt of 32 tokens."""
    message = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=PROMPT)))
    message.stop.max_tokens = max_tokens
    return message


async def generate(service: InferenceService, number: int, max_tokens: int) -> None:
    """Sends requests one after another, each as a call of Generate."""
    while True:
        await service.Generate(request(max_tokens), cast(grpc.aio.ServicerContext, Call()))


async def session(service: InferenceService, number: int) -> None:
    """Sends all requests on one Session."""
    actions = [inference_pb2.SessionRequest(tag=tag, generate=request(FOREVER)) for tag in range(STREAMS)]
    await service.Session(cast(Any, None), cast(grpc.aio.ServicerContext, Call(actions)))


def served(client: Client, count: int) -> Advance:
    """Sets up `count` clients of a worker; a unit is one engine step and the worker's handling of it."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    engine = StandInEngine()
    model = ServedModel(lambda: None)
    tasks: set[asyncio.Task[Any]] = set()

    async def start() -> None:
        description = byte_model("check", "Check", 512, 1 << 20)
        description.ClearField("chat_template")
        model.announce(engine_pb2.ModelState(model=description, ready=True, pool_tokens=1 << 40))
        while not model.ready:
            await asyncio.sleep(STEP_S)
        service = InferenceService(engine, model, Preparer(model), MessagePacer(FLUSH_S, 1))
        tasks.update(loop.create_task(client(service, number)) for number in range(count))

    async def run(steps: int) -> None:
        for _ in range(steps):
            engine.step()
            await asyncio.sleep(STEP_S)
        for task in tasks:
            if task.done():
                task.result()  # a client never ends by itself

    loop.run_until_complete(start())
    return lambda steps: loop.run_until_complete(run(steps))


FRONT_WORK = (
    Work(
        "front, 256 Generate",
        "step",
        partial(served, partial(generate, max_tokens=FOREVER), STREAMS),
        warm_up=24,
        counted=24,
    ),
    Work("front, Session of 256", "step", partial(served, session, 1), warm_up=24, counted=24),
    Work(
        "front, requests of 8 tokens",
        "step",
        partial(served, partial(generate, max_tokens=8), 32),
        warm_up=24,
        counted=48,
    ),
)

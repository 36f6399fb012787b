"""The clients of `bench.frontend`, in one process: each starts its next request when its last one has ended.

For each line on stdin, the process writes one line of JSON to stdout: messages and tokens received so far. The first
answer waits until every client has started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import grpc
import uvloop

from roster_protos import inference_pb2 as pb
from roster_protos import inference_pb2_grpc

LONG_MS = 3_600_000


class Clients:
    """All clients and their counts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.tokens = 0
        self.messages = 0
        self.started = 0

    def request(self, turn: int) -> pb.GenerateRequest:
        """Returns a request with 32 prompt tokens. First turns differ in length, so that not all end in one step."""
        most = self._arguments.max_tokens
        max_tokens = most if turn >= self._arguments.clients else 1 + most * (turn + 1) // self._arguments.clients
        request = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=range(65, 97))))
        request.stop.max_tokens = max_tokens
        return request

    def stub(self) -> inference_pb2_grpc.InferenceServiceStub:
        """Returns a stub on a new connection."""
        options = (("grpc.use_local_subchannel_pool", 1),)
        return inference_pb2_grpc.InferenceServiceStub(grpc.aio.insecure_channel(self._arguments.address, options))

    async def generate(self, number: int) -> None:
        """Runs one client of Generate."""
        stub = self.stub()
        turn = number
        while True:
            async for response in stub.Generate(self.request(turn), wait_for_ready=True):
                self.messages += 1
                self.started += response.request_id != "" and turn == number
                for delta in response.deltas:
                    self.tokens += len(delta.token_ids)
            turn += self._arguments.clients

    async def session(self, number: int) -> None:
        """Runs one Session that keeps its share of the requests running."""
        call = self.stub().Session(wait_for_ready=True)
        share = range(number, self._arguments.clients, self._arguments.sessions)
        for tag in share:
            await call.write(pb.SessionRequest(tag=tag, generate=self.request(tag)))
        self.started += len(share)
        while True:
            response = await call.read()
            self.messages += 1
            self.tokens += len(response.token_ids)
            for event in response.events:
                if event.HasField("usage"):
                    again = self.request(self._arguments.clients)
                    await call.write(pb.SessionRequest(tag=event.tag, generate=again))
                elif event.HasField("refused"):
                    raise RuntimeError(event.refused.message)

    async def silent(self, number: int) -> None:
        """Keeps one request running that has no listener."""
        stub = self.stub()
        while True:
            request = self.request(self._arguments.clients)
            request.stop.ClearField("max_tokens")
            request.on_disconnect, request.keep_ms = pb.ON_DISCONNECT_KEEP, LONG_MS
            call = stub.Generate(request, wait_for_ready=True)
            await call.read()
            call.cancel()
            self.started += 1
            await asyncio.sleep(LONG_MS)

    async def run(self) -> None:
        """Waits for the model, then serves stdin until it ends."""
        stub = self.stub()
        while True:
            try:
                await stub.GetModel(pb.GetModelRequest(), wait_for_ready=True)
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
        kind = {"generate": self.generate, "session": self.session, "silent": self.silent}[self._arguments.load]
        count = self._arguments.sessions if self._arguments.load == "session" else self._arguments.clients
        tasks = [asyncio.create_task(kind(number)) for number in range(count)]
        answering = asyncio.create_task(self._answer())
        done, _ = await asyncio.wait([answering, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _answer(self) -> None:
        while await asyncio.to_thread(sys.stdin.readline):
            while self.started < self._arguments.clients:
                await asyncio.sleep(0.01)
            print(json.dumps({"tokens": self.tokens, "messages": self.messages}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("load", choices=("generate", "session", "silent"))
    parser.add_argument("--address", required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--sessions", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    uvloop.run(Clients(parser.parse_args()).run())


if __name__ == "__main__":
    main()

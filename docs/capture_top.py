"""Writes docs/images/top.svg: a frame of `roster top` at a service that answers eleven chats of three tenants.

PYTHONPATH=. python docs/capture_top.py                    # SmolLM2 on the CPU
PYTHONPATH=. python docs/capture_top.py --device hash      # without a model
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path

from roster_client.admin import AdminClient
from roster_client.client import RosterClient
from roster_client.events import Delta
from roster_client.requests import Message
from roster_client.stack import Endpoints, Stack

PICTURE = Path(__file__).parent / "images" / "top.svg"
TENANTS = ("acme", "beta", "gamma")
QUESTIONS = (
    "Explain step by step how a rainbow forms.",
    "Write a short story about a fox who learns to bake bread.",
    "Why do cats purr? Give several reasons.",
    "Describe the sea at night.",
    "How does a bicycle stay upright?",
    "What did people eat in ancient Rome?",
    "Write a poem about autumn leaves.",
    "How do planes fly?",
    "Name ten uses of a paper clip.",
    "What is a prime number?",
    "Tell me about lighthouses.",
)
SLOTS = 6
FEWEST_TOKENS = 60
"""Tokens of the first answer at which the frame is taken."""


async def capture(runner: dict[str, object]) -> None:
    """Starts both services, sends the questions, and takes the frame while they are answered."""
    stack = Stack(
        Endpoints.free(), scheduler={"policy": "fair"}, runner={**runner, "runner_id": "runner", "slots": SLOTS}
    )
    async with stack:
        await stack.wait_ready(600)
        started = asyncio.Event()
        answers = [
            asyncio.create_task(_answer(stack.endpoints.listen, number, question, started))
            for number, question in enumerate(QUESTIONS)
        ]
        await started.wait()
        command = ["top", "--once", "--interval", "8", "--svg", str(PICTURE), "--admin", stack.endpoints.admin_listen]
        await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "roster_client.cli", *command],
            env=os.environ | {"COLUMNS": "110"},
            check=True,
        )
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        async with AdminClient(stack.endpoints.admin_listen) as admin:
            async for _ in admin.drain(0):
                pass


async def _answer(target: str, number: int, question: str, started: asyncio.Event) -> None:
    async with RosterClient(target, tenant=TENANTS[number % 3]) as client:
        stream = client.generate(
            [Message("user", question)], max_tokens=100 + 20 * number, ignore_eos=True, request_id=f"chat-{number:02}"
        )
        num_tokens = 0
        async for event in stream:
            if isinstance(event, Delta):
                num_tokens += len(event.token_ids)
            if num_tokens >= FEWEST_TOKENS:
                started.set()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where the runner computes: cpu, cuda, hash")
    parser.add_argument("--step-ms", default=100, type=int, help="milliseconds that a step of hash takes")
    arguments = parser.parse_args()
    hash_runner = {"device": "hash", "step_ms": arguments.step_ms}
    asyncio.run(capture(hash_runner if arguments.device == "hash" else {"device": arguments.device}))


if __name__ == "__main__":
    main()

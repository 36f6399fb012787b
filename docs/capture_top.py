"""Writes docs/images/top.svg: a frame of `roster top` while a service answers eleven chats of three tenants.

PYTHONPATH=. python docs/capture_top.py                    # SmolLM2 on the CPU
PYTHONPATH=. python docs/capture_top.py --device hash      # without a model
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from roster_client.client import RosterClient
from roster_client.client.admin import AdminClient
from roster_client.client.requests import Message
from roster_client.serve.stack import Endpoints, Stack

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
FEWEST_TOKENS = 40
"""Tokens of the shortest answer; each further one has 25 more."""
INTERVAL_S = 8
"""Seconds that the frame's rates cover, from the end of the first answer."""


async def capture(runner: dict[str, object]) -> None:
    """Starts both services, sends the questions, and captures the frame while they are answered."""
    stack = Stack(
        Endpoints.free(), scheduler={"policy": "fair"}, runner={**runner, "runner_id": "runner", "slots": SLOTS}
    )
    async with stack:
        await stack.wait_ready(600)
        one_ended = asyncio.Event()
        answers = [
            asyncio.create_task(_answer(stack.endpoints.listen, number, question, one_ended))
            for number, question in enumerate(QUESTIONS)
        ]
        await one_ended.wait()
        command = ["top", "--once", "--interval", str(INTERVAL_S), "--svg", str(PICTURE)]
        command += ["--admin", stack.endpoints.admin_listen]
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


async def _answer(target: str, number: int, question: str, ended: asyncio.Event) -> None:
    async with RosterClient(target, tenant=TENANTS[number % 3]) as client:
        max_tokens = FEWEST_TOKENS + 25 * number
        prompt, request_id = [Message("user", question)], f"chat-{number:02}"
        await client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, request_id=request_id).completion()
        ended.set()


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where the runner computes: cpu, cuda, hash")
    parser.add_argument("--step-ms", default=100, type=int, help="milliseconds that a step of hash takes")
    arguments = parser.parse_args()
    hash_runner = {"device": "hash", "test_backend": json.dumps({"step_ms": arguments.step_ms})}
    asyncio.run(capture(hash_runner if arguments.device == "hash" else {"device": arguments.device}))


if __name__ == "__main__":
    main()

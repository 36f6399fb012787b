"""What forced tokens save: SmolLM2 fills in typical JSON schemas through the real services, with and without them."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roster_client.client import RosterClient
from roster_client.client.admin import AdminClient
from roster_client.client.requests import Message
from tests.support.json_schemas import Schema
from tests.support.processes import RosterProcesses

READY_S = 600.0
MOST_TOKENS = 300


def _object(properties: dict[str, Any]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_WORD, _LINE = {"type": "string", "maxLength": 12}, {"type": "string", "maxLength": 60}
_SCHEMAS: dict[str, tuple[str, Schema]] = {
    "contact": (
        "Extract the contact: Mary Jones, 41, lives in Leeds. Her address is mary@jones.example, she is an editor.",
        _object(
            {
                "name": {"type": "string", "maxLength": 30},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "email": {"type": "string", "maxLength": 30},
                "is_active": {"type": "boolean"},
                "roles": {"type": "array", "items": {"enum": ["admin", "editor", "viewer"]}, "maxItems": 2},
            }
        ),
    ),
    "tool call": (
        "What is the weather in Berlin tomorrow, in degrees Celsius? Call the function.",
        _object(
            {
                "name": {"const": "get_weather_forecast"},
                "arguments": _object(
                    {"location": _WORD, "unit": {"enum": ["celsius", "fahrenheit"]}, "days_ahead": {"enum": [0, 1, 2]}}
                ),
            }
        ),
    ),
    "verdict": (
        "Is this review positive or negative? 'The room was clean and the staff was kind.' Give a short reason.",
        _object({"sentiment": {"enum": ["positive", "negative", "neutral"]}, "reason": _LINE}),
    ),
    "invoice": (
        "Write down the invoice: number INV-2041, 3 chairs at 45.50 EUR each, dated 6 May 2024.",
        _object(
            {
                "invoice_number": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
                "date": {"type": "string", "format": "date"},
                "currency": {"enum": ["EUR", "USD"]},
                "line_items": {
                    "type": "array",
                    "items": _object(
                        {
                            "description": _WORD,
                            "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                            "unit_price": {"type": "number", "minimum": 0, "maximum": 999},
                        }
                    ),
                    "minItems": 1,
                    "maxItems": 2,
                },
            }
        ),
    ),
}


@dataclass
class _Measured:
    """One kind of service: seconds of each round, and counts over all of them."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    rows: int = 0
    forced: int = 0
    answers: list[list[int]] = field(default_factory=list)


async def _round(service: RosterProcesses, rows: int, name: str, seed: int, measured: _Measured) -> None:
    """Asks for `rows` answers of one schema at once."""
    prompt, schema = _SCHEMAS[name]
    async with AdminClient(service.admin_address) as admin, RosterClient(service.address) as client:
        before = (await admin.get_status()).totals

        async def answer(number: int) -> list[int]:
            sampling: dict[str, Any] = {"temperature": 0.7, "seed": 1000 * seed + number, "max_tokens": MOST_TOKENS}
            completion = await client.generate([Message("user", prompt)], json_schema=schema, **sampling).completion()
            return list(completion.choices[0].token_ids)

        began = time.perf_counter()
        answers = await asyncio.gather(*[answer(number) for number in range(rows)])
        measured.seconds.append(time.perf_counter() - began)
        after = (await admin.get_status()).totals
    measured.answers += answers
    measured.tokens += sum(map(len, answers))
    measured.rows += after.decode_rows - before.decode_rows + rows  # the first token comes with the prompt
    measured.forced += after.forced_tokens - before.forced_tokens


def run_forced(model: str, rows: int, rounds: int, threads: int) -> dict[str, Any]:
    """Returns what was measured by schema; pairs are without forced tokens and with them."""
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        services = {}
        for kind in (False, True):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            runner = {"model": model, "device": "cpu", "slots": rows, "threads": threads, "kv_tokens": 8192}
            running = RosterProcesses(folder, scheduler={"forced_tokens": kind}, runner=runner, ready_s=READY_S)
            services[kind] = stack.enter_context(running)
        for name in _SCHEMAS:
            made = {kind: _Measured() for kind in services}
            for service in services.values():
                asyncio.run(_round(service, rows, name, 0, _Measured()))  # compiles the grammar
            for seed in range(1, rounds + 1):
                for kind, service in services.items():
                    asyncio.run(_round(service, rows, name, seed, made[kind]))
            off, on = made[False], made[True]
            times = [statistics.median(each.seconds) for each in (off, on)]
            gains = [without / with_them for without, with_them in zip(off.seconds, on.seconds, strict=True)]
            result[name] = {
                "tokens": on.tokens,
                "forced": on.forced,
                "tokens_per_row": [round(each.tokens / each.rows, 2) for each in (off, on)],
                "seconds": [round(seconds, 2) for seconds in times],
                "gain": round(statistics.median(gains), 2),
                "equal_answers": sum(a == b for a, b in zip(off.answers, on.answers, strict=True)),
                "answers": len(on.answers),
            }
            print(f"{name:10} {result[name]}", flush=True)
    return result

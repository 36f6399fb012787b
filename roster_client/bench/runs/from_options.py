"""Converts the options of `roster bench`. All functions raise ValueError with a message that says what to change."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from roster_client.bench.load.grpc_target import Calls
from roster_client.bench.load.lengths import Lengths
from roster_client.bench.load.workload import random_trace
from roster_client.bench.runs.connection import Connection
from roster_client.bench.runs.options import RunOptions
from roster_client.options.addresses import DEFAULT_ADMIN, DEFAULT_SERVER
from roster_client.options.connection import credentials
from scheduler_svc.simulator.trace import Trace, read_trace


def connection_from(options: RunOptions) -> Connection:
    """Returns the system's connection; the default server's admin API is the local one unless another is given."""
    try:
        calls = Calls(options.calls)
    except ValueError:
        raise ValueError(f"--calls must be `session` or `generate`, not {options.calls!r}") from None
    extra_body = _json_object(options.extra_body)
    if options.no_speculate and options.openai:
        raise ValueError("--no-speculate needs a Roster server: OpenAI's API has no such field; give --server instead")
    local = DEFAULT_ADMIN if options.server == DEFAULT_SERVER and not options.openai else ""
    return Connection(
        server=options.server,
        openai=options.openai,
        admin=local if options.admin is None else options.admin,
        name=options.name,
        card=options.card,
        model=options.model,
        calls=calls,
        sessions=options.sessions,
        chat=options.chat,
        api_key=options.api_key,
        tokenizer=options.tokenizer,
        ignore_eos=not options.natural_ends,
        speculate=False if options.no_speculate else None,
        extra_body=extra_body,
        credentials=credentials(),
    )


def trace_from(options: RunOptions) -> Trace:
    """Returns the whole trace with divided lengths and assigned tenants; a sweep may need more than --requests."""
    trace = _undivided_trace(options).divided(options.prompt_divisor, options.output_divisor)
    if options.tenants == 1:
        return trace
    dealt = (replace(row, tenant=f"tenant-{index % options.tenants}") for index, row in enumerate(trace.requests))
    return replace(trace, requests=tuple(dealt))


def settings_from(options: RunOptions) -> dict[str, Any]:
    """Returns the workload's settings for a report, as far as they differ from the defaults."""
    names = ("prompt_divisor", "output_divisor", "tenants")
    return {name: value for name in names if (value := getattr(options, name)) != 1}


def sweep_rates_from(text: str) -> list[float]:
    """Returns the rates of --sweep, in requests per second; [] for auto."""
    if text == "auto":
        return []
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or min(rates) <= 0:
        raise ValueError(f"--sweep must be rates above 0 separated by commas, or auto; not {text!r}")
    return rates


def _undivided_trace(options: RunOptions) -> Trace:
    path, prompt, output = options.trace, options.prompt, options.output
    if (path is None) == (prompt is None and output is None):
        raise ValueError("pass either --trace, or --prompt and --output")
    if path is not None:
        return read_trace(path)
    if prompt is None or output is None:
        raise ValueError("without --trace, both --prompt and --output are required")
    return random_trace(Lengths.parse(prompt), Lengths.parse(output), options.requests, options.seed)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--extra-body must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError('--extra-body must be a JSON object, for example {"top_k": 1}')
    return value

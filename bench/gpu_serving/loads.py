"""The loads of `bench.gpu_serving`, each with the scheduler's settings, as the command line names them."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bench.common.traces import CONVERSATIONS
from bench.gpu_serving.service import Scheduling, parameters

PROMPT_CAP = 4096
DECODE_PROMPT, DECODE_OUTPUT, PROFILED_OUTPUT = 512, 512, 1536
OWN = "own"
"""Policy of an all-at-once load: that of the Poisson arrivals."""


@dataclass(frozen=True, slots=True)
class Load:
    """One load; `rate` 0 means all at once, `batch` is the number of rows of a decode load."""

    name: str
    scheduling: Scheduling
    requests: int
    rate: float = 0.0
    batch: int | None = None
    profiled: bool = False
    speculate: bool = True
    drafts_right: float | None = None
    """Share of right drafts, if what drafts knows the texts."""
    decode_output: int = DECODE_OUTPUT

    def client_flags(self, vocab_size: int, sessions: int) -> list[str]:
        """Returns the flags of `bench.gpu_serving.client`."""
        flags = [f"--requests={self.requests}", f"--rate={self.rate}", f"--vocab-size={vocab_size}"]
        flags += [] if self.speculate else ["--no-speculate"]
        if self.batch is None:
            return [*flags, f"--sessions={sessions}", f"--trace={CONVERSATIONS.name}", f"--prompt={PROMPT_CAP}"]
        output = PROFILED_OUTPUT if self.profiled else self.decode_output  # the profiler takes long to start
        return [*flags, f"--prompt={DECODE_PROMPT}", f"--output={output}"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name loads and the scheduler's settings."""
    parser.add_argument(
        "--offline", nargs="*", default=[], metavar="POLICY:STEP_TOKENS[,NAME=VALUE...]", help=f"or {OWN!r}"
    )
    parser.add_argument("--requests", type=int, default=512, help="requests of the all-at-once load")
    parser.add_argument("--online", nargs="*", default=[], metavar="RATE[:REQUESTS[:STEP_TOKENS]][,NAME=VALUE...]")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of arrivals without REQUESTS")
    parser.add_argument("--decode", type=int, nargs="*", default=[], metavar="BATCH")
    parser.add_argument("--decode-output", type=int, default=DECODE_OUTPUT, help="tokens of each answer of --decode")
    parser.add_argument(
        "--policy", help="policy under Poisson arrivals, fcfs if a load has STEP_TOKENS; decode loads use fcfs"
    )
    parser.add_argument(
        "--policy-parameters", default="{}", help="the policy's parameters besides step_tokens, as JSON"
    )
    parser.add_argument("--no-speculate", dest="speculate", action="store_false", help="requests forbid drafts")
    parser.add_argument(
        "--drafts-right",
        type=float,
        metavar="SHARE",
        help="what drafts on a GPU knows the texts and errs; needs --runner-flag draft=ngram",
    )
    parser.add_argument("--depth", type=int, help="plans in flight; default: by the scheduler's profile")
    parser.add_argument("--scheduler-flag", action="append", default=[], metavar="--NAME=VALUE")


def loads_of(arguments: argparse.Namespace) -> list[Load]:
    """Returns the loads that the command line names, variant by variant. Raises ValueError for one without a name."""
    variants = [_variant(arguments, variant) for variant in arguments.variant] or [(arguments, "")]
    return [
        replace(
            load,
            speculate=changed.speculate,
            drafts_right=changed.drafts_right,
            decode_output=changed.decode_output,
        )
        for changed, prefix in variants
        for load in _loads(changed, prefix)
    ]


def _variant(arguments: argparse.Namespace, text: str) -> tuple[argparse.Namespace, str]:
    """Returns the arguments as changed by a variant, and its name."""
    name, colon, flags = text.partition(":")
    if not colon:
        raise ValueError(f"the variant {text!r} has no name: write 'NAME: --FLAG ...'")
    parser = argparse.ArgumentParser(prog=name, add_help=False, allow_abbrev=False)
    add_options(parser)
    changed, others = parser.parse_known_args(shlex.split(flags), argparse.Namespace(**vars(arguments)))
    changed.scheduler_flag = [*changed.scheduler_flag, *others]
    return changed, f"{name.strip()}: "


def _loads(arguments: argparse.Namespace, prefix: str) -> Iterator[Load]:
    flags = ("--no-prefix-sharing", *arguments.scheduler_flag)
    given = json.loads(arguments.policy_parameters)
    for spec in arguments.online:
        fields, changes = split_spec(spec)
        rate, requests, step_tokens = [*fields, "", ""][:3]
        policy = arguments.policy or ("fcfs" if step_tokens else None)
        values = parameters(**(given | ({"step_tokens": int(step_tokens)} if step_tokens else {})))
        online = Scheduling(policy, values, arguments.depth, flags)
        number = int(requests) if requests else round(float(rate) * arguments.seconds)
        step = [f"{step_tokens} a step"] if step_tokens else []
        name = ", ".join([f"{prefix}{rate}/s", *step, *spec.split(",")[1:]])
        yield Load(name, online.changed(changes), number, float(rate))
    for spec in arguments.offline:
        yield _offline(spec, arguments, prefix, flags)
    decoding = Scheduling("fcfs", parameters(), arguments.depth, flags)
    for batch in arguments.decode:
        yield Load(f"{prefix}decode {batch}", decoding, batch, batch=batch)
        if arguments.profile:
            yield Load(f"{prefix}decode {batch}, profiled", decoding, batch, batch=batch, profiled=True)


def _offline(spec: str, arguments: argparse.Namespace, prefix: str, flags: tuple[str, ...]) -> Load:
    if spec == OWN:
        own = Scheduling(arguments.policy, arguments.policy_parameters, arguments.depth, flags)
        return Load(f"{prefix}offline", own, arguments.requests)
    (policy, step_tokens), changes = split_spec(spec)
    # By output alone: the requests that are left at the end determine the time.
    given = {"prompt_weight": 0.0} if policy == "ljf" else {}
    at_once = Scheduling(policy, parameters(step_tokens=int(step_tokens), **given), arguments.depth, flags)
    name = ", ".join([f"{prefix}offline", policy, f"{step_tokens} a step", *spec.split(",")[1:]])
    return Load(name, at_once.changed(changes), arguments.requests)


def split_spec(spec: str) -> tuple[list[str], dict[str, Any]]:
    """Splits a load into its fields and settings: "8:160:1024,depth=3" is (["8", "160", "1024"], {"depth": 3}).

    A value is JSON, or text if it does not parse. Raises ValueError for a setting without a value.
    """
    fields, *changes = spec.split(",")
    settings: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"{change!r} of the load {spec!r} has no value: write NAME=VALUE")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return fields.split(":"), settings

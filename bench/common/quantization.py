"""Options of benchmarks that quantize random weights."""

from __future__ import annotations

import argparse
from typing import Any

from runner_svc.settings.runner_settings import RunnerSettings

FORMATS = ("none", "fp8", "fp8-block", "int4")
KV_CACHES = ("auto", "fp8_e4m3")
_DEFAULTS = {"quantization": "none", "quantize_head": False, "kv_cache_dtype": "auto"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options, named as the runner's settings."""
    parser.add_argument("--quantization", choices=FORMATS, default="none", help="format of the layers' matrices")
    parser.add_argument("--quantize-head", action="store_true", help="the head in FP8")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHES, default="auto")


def runner_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the runner's settings that differ from their defaults, by name."""
    return {name: value for name, off in _DEFAULTS.items() if (value := getattr(arguments, name)) != off}


def command_flags(arguments: argparse.Namespace) -> list[str]:
    """Returns the options that were given, for another command with `add_options`."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in runner_flags(arguments).items()}
    return [name if value is True else f"{name}={value}" for name, value in flags.items()]


def peer_flags(arguments: argparse.Namespace) -> list[str]:
    """Returns vLLM's flags for the same. Raises ValueError for what it does not quantize while loading."""
    if arguments.quantization not in ("none", "fp8") or arguments.quantize_head:
        raise ValueError("vLLM quantizes random weights with --quantization fp8 alone: leave its loads out")
    flags = [f"--quantization={arguments.quantization}"] if arguments.quantization != "none" else []
    return [*flags, *(["--kv-cache-dtype=fp8"] if arguments.kv_cache_dtype != "auto" else [])]


assert set(_DEFAULTS) <= set(RunnerSettings.model_fields)

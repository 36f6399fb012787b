"""The extras of the package: which modules each brings, and a sentence when they are missing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

MODULES = {
    "scheduler": (
        "grpc_reflection",
        "jinja2",
        "llguidance",
        "numpy",
        "prometheus_client",
        "tokenizers",
        "uvloop",
        "zmq",
    ),
    "runner": ("accelerate", "gguf", "numpy", "safetensors", "torch", "transformers", "zmq"),
    "openai": ("smg_grpc_proto",),
    "cuda": ("cupy",),
    "ray": ("ray",),
    "tracing": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"),
    "sentencepiece": ("sentencepiece",),
    "bench": ("aiohttp", "matplotlib", "numpy", "tokenizers", "uvloop"),
    "plot": ("matplotlib",),
    "parquet": ("pyarrow",),
}
"""Modules that an extra must bring, for those extras that a command can miss."""

RUNNER_ALWAYS = ("numpy", "zmq")
"""Modules that a runner needs on any device; those of real models are checked when the device is chosen."""

TEST_DEVICES = ("hash", "null")
"""Values of the runner's setting `device` that are test backends: they need neither torch nor a model."""


def missing(modules: tuple[str, ...]) -> list[str]:
    """Returns the modules that are not installed."""
    return [name for name in modules if not _is_installed(name)]


def lacks(extra: str, modules: tuple[str, ...] | None = None) -> str:
    """Returns a sentence that names the extra to install, or "" if its modules (by default all) are installed."""
    return lacks_of({extra: MODULES[extra] if modules is None else modules})


def lacks_of(extras: Mapping[str, tuple[str, ...]]) -> str:
    """Returns a sentence for the extras of which modules are missing, or "" if all are there."""
    absent = {extra: names for extra, modules in extras.items() if (names := missing(modules))}
    modules = sorted({name for names in absent.values() for name in names})
    return install(",".join(absent), f"missing {', '.join(modules)}") if absent else ""


def services_lack(device: str) -> str:
    """Returns a sentence for the extras that both services together lack, or "" if they lack none.

    `device`: the runner's setting.
    """
    runner = RUNNER_ALWAYS if device in TEST_DEVICES else MODULES["runner"]
    return lacks_of({"scheduler": MODULES["scheduler"], "runner": runner})


def install(extra: str, why: object) -> str:
    """Returns the sentence for an extra without which a command can't run."""
    return f"not installed completely ({why}): run pip install 'roster-serve[{extra}]'"


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # a parent package is missing, or the module is blocked
        return False

"""Time of one kernel on one case, and its references."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Measurement:
    """Time of a case; `rate` is in `unit`, `ceiling` names the measured limit of that unit (see `ceilings`)."""

    kernel: str
    case: str
    microseconds: float
    rate: float
    unit: str
    ceiling: str


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference for a case on another H200: FlashAttention 3 as shipped with vLLM 0.25.0, and a prototype for this
    shape.

    Decode is in microseconds, prefill in TFLOP/s.
    """

    fa3: float
    bar: float


ATTENTION_REFERENCES: dict[tuple[str, str], Reference] = {
    ("decode", "1 x 1024"): Reference(10.9, 6.7),
    ("decode", "1 x 8192"): Reference(18.6, 14),
    ("decode", "8 x 1024"): Reference(17.5, 13.3),
    ("decode", "8 x 8192"): Reference(77.2, 73),
    ("decode", "64 x 1024"): Reference(80.8, 71.5),
    ("decode", "64 x 4096"): Reference(258, 254),
    ("decode", "256 x 1024"): Reference(280, 259),
    ("decode", "256 x 2048"): Reference(514, 499),
    ("decode", "64 mixed"): Reference(97, 76),
    ("decode", "256 mixed"): Reference(247, 241),
    ("prefill", "1 x 2048"): Reference(446, 502),
    ("prefill", "1 x 8192"): Reference(640, 662),
    ("prefill", "512 on 8192"): Reference(568, 574),
    ("prefill", "2048 on 16384"): Reference(660, 665),
    ("prefill", "16 x 512"): Reference(268, 375),
    ("prefill", "4 x 2048"): Reference(498, 562),
}
"""References for 32 query and 8 key-value heads of 128 elements, bfloat16, blocks of 16 tokens."""

_REFERENCED = "32+8 heads of 128"


def reference_of(measurement: Measurement) -> Reference | None:
    """Returns the reference of a case, None if there is none."""
    kind, _, shape = measurement.kernel.partition(", ")
    return ATTENTION_REFERENCES.get((kind, measurement.case)) if shape == _REFERENCED else None


def row(measurement: Measurement, ceilings: dict[str, float]) -> str:
    """Returns a line of the table."""
    reference = reference_of(measurement)
    unit = "TFLOP/s" if measurement.unit == "TFLOP/s" else "µs"
    beside = f"  FA3 {reference.fa3:5.4g}, bar {reference.bar:5.4g} {unit}" if reference else ""
    share = measurement.rate / ceilings[measurement.ceiling]
    return (
        f"{measurement.kernel:44} {measurement.case:40} {measurement.microseconds:8.2f} µs "
        f"{measurement.rate:7.2f} {measurement.unit:7} {share:5.0%} of {measurement.ceiling:6}{beside}"
    )


def as_json(measurement: Measurement, ceilings: dict[str, float]) -> dict[str, Any]:
    """Returns the numbers of the line, ready for JSON."""
    reference = reference_of(measurement)
    return {
        **asdict(measurement),
        "share": measurement.rate / ceilings[measurement.ceiling],
        **({"fa3": reference.fa3, "bar": reference.bar} if reference else {}),
    }

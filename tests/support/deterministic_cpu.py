"""Whether a runner can be deterministic here: the checks at its start decide, whatever the CPU's maker is.

The fixture `deterministic_cpu` of tests/conftest.py skips a test with their sentence where they refuse.
"""

from __future__ import annotations

from functools import cache

import pytest

from roster_common.setting_sources import UnusableSettings
from runner_svc.arithmetic.instruction_set import cpu_flags, pin, widest


def pin_without_avx512() -> None:
    """Pins the instruction set of this process, as a runner does, on a CPU where MKL's products need it.

    With AVX-512 they do not, and other tests then run with what a runner has that is not deterministic.
    """
    if widest(cpu_flags()) == "AVX2":
        pin()


@cache
def refusal() -> str:
    """Returns why the checks refuse a tiny model in this process, as a sentence; "" if they do not. Imports torch."""
    from runner_svc.arithmetic.check import check_functions
    from runner_svc.arithmetic.known_numbers import known_numbers
    from runner_svc.arithmetic.products import canonical_product
    from runner_svc.attention.canonical_check import checked_units
    from runner_svc.backends.determinism import instruction_set

    if not instruction_set():
        return "the CPU has neither AVX2 nor AVX-512"
    try:
        check_functions([64])
        canonical_product(known_numbers(64, 48), None)
        checked_units(4, 2, 16, 16)
    except UnusableSettings as error:
        return str(error)
    return ""


def skip_where_refused() -> None:
    """Skips the test with the sentence of the checks where they refuse.

    A machine whose bits are stored was not refused before: there it fails.
    """
    if sentence := refusal():
        from tests.support.bit_probes import STORED, library_bits

        (pytest.fail if library_bits() in STORED else pytest.skip)(sentence)

"""What NVIDIA's management library (NVML) says of the driver and of a card; "" where it is missing or does not say."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NAME = "libnvidia-ml.so.1"


def driver_version() -> str:
    """Returns the driver's version, such as "580.159.03"."""
    try:
        text = ctypes.create_string_buffer(96)
        with _opened() as library:
            failed = library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
        return "" if failed else text.value.decode()
    except (OSError, AttributeError, UnicodeDecodeError):
        return ""


def power_limit(bus_id: str) -> str:
    """Returns the power that the card at a PCI address, such as "0000:19:00.0", may draw, such as "700 W"."""
    try:
        handle, milliwatts = ctypes.c_void_p(), ctypes.c_uint()
        with _opened() as library:
            failed = library.nvmlDeviceGetHandleByPciBusId_v2(
                bus_id.encode(), ctypes.byref(handle)
            ) or library.nvmlDeviceGetEnforcedPowerLimit(handle, ctypes.byref(milliwatts))
        return "" if failed else f"{milliwatts.value / 1000:.0f} W"
    except (OSError, AttributeError):
        return ""


@contextmanager
def _opened() -> Iterator[Any]:
    """Opens the library. Raises OSError without one."""
    library = ctypes.CDLL(_NAME)
    if library.nvmlInit_v2():
        raise OSError(f"{_NAME} finds no driver")
    try:
        yield library
    finally:
        library.nvmlShutdown()

"""The arguments of tensor maps, with a fake driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import pytest

from runner_svc.cuda import tensor_map
from runner_svc.cuda.tensor_map import TensorMapError, bytes_map, heads_map

ADDRESS = 0x7F0000001000


@dataclass
class Driver:
    """Records the arguments of cuTensorMapEncodeTiled and fills the map with a byte."""

    status: int = 0
    calls: list[dict[str, object]] = field(default_factory=list)

    def cuTensorMapEncodeTiled(self, target, dtype, rank, address, sizes, strides, box, steps, *flags) -> int:
        assert target.value % 64 == 0 and rank == 3 and list(steps) == [1, 1, 1]
        ctypes.memset(target, 7, 128)
        self.calls.append(
            {
                "dtype": dtype,
                "address": address.value,
                "sizes": list(sizes),
                "strides": list(strides),
                "box": list(box),
                "swizzle": flags[1],
            }
        )
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    imitation = Driver()
    monkeypatch.setattr(tensor_map, "_driver", lambda: imitation)
    return imitation


@pytest.mark.parametrize(
    ("head_dim", "box", "sizes", "strides"),
    [
        (64, (16, 1), [64, 999, 8], [5000, 128]),
        (128, (128, 2), [64, 999, 16], [5000, 128]),
        (256, (128, 4), [64, 999, 32], [5000, 128]),
        (96, (16, 1), [96, 999, 8], [5000, 192]),  # the second 64 columns of a copy end in zeros
    ],
)
def test_heads_of_16_bits(
    head_dim: int, box: tuple[int, int], sizes: list[int], strides: list[int], driver: Driver
) -> None:
    assert heads_map(ADDRESS, 8, head_dim, 999, 2500, box) == b"\x07" * 128
    (call,) = driver.calls
    assert (call["address"], call["sizes"], call["strides"]) == (ADDRESS, sizes, strides)
    assert call["box"] == [64, *box]
    assert (call["dtype"], call["swizzle"]) == (1, 3)  # 16 bits, 128 bytes


def test_heads_of_8_bits(driver: Driver) -> None:
    bytes_map(ADDRESS, 8, 96, 999, 16)
    (call,) = driver.calls
    assert (call["sizes"], call["strides"], call["box"]) == ([96, 999, 8], [768, 96], [96, 16, 1])
    assert (call["dtype"], call["swizzle"]) == (0, 0)


def test_a_refusal_of_the_driver_is_reported(driver: Driver) -> None:
    driver.status = 1
    with pytest.raises(TensorMapError, match=r"sizes \(64, 10, 4\).* error 1"):
        heads_map(ADDRESS, 4, 64, 10, 256, (16, 1))

"""Looks whether functions of rows have the same bits here whatever they are computed with; see `functions`.

A check can show a fault, not the absence of one. It compares as integers: elements alone and in long tensors, at other
places, between strides, and with one thread and with as many as the runner has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from roster_common.setting_sources import UnusableSettings
from runner_svc.arithmetic import functions
from runner_svc.arithmetic.known_numbers import known_numbers, same_bits

_LONG = 70_001
"""Elements of the long tensor: more than two threads' shares, and odd."""
_PLACES = ((0, 1), (1, 7), (5, 50), (13, 999), (2, 4095))

ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": lambda x: (x + 3).log_(),
    "log1p": lambda x: (x + 2.5).log1p_(),
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sin": lambda x: (x * 100).sin_(),
    "cos": lambda x: (x * 100).cos_(),
    "sqrt": lambda x: (x + 3).sqrt_(),
    "sigmoid": functions.sigmoid,
    **functions.ACTIVATIONS,
}
BY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "row_sum": functions.row_sum,
    "softmax": functions.softmax,
    "log_softmax": functions.log_softmax,
    "rms_norm": lambda x: functions.rms_norm(x, x.new_full(x.shape[-1:], 1.5), 1e-5),
    "layer_norm": lambda x: functions.layer_norm(x, None, None, 1e-5),
}


def check_functions(widths: Iterable[int]) -> bytes:
    """Returns a digest of the functions' bits. `widths`: of the model's rows.

    Raises UnusableSettings, naming a function whose bits depend on more than a row.
    """
    digest = hashlib.blake2b(digest_size=16)
    x = known_numbers(_LONG)
    for name, function in ELEMENTWISE.items():
        whole = function(x)
        digest.update(whole[:4096].numpy().tobytes())
        for _ in thread_counts():
            _require(name, whole, function(x))
            _require(name, whole[1::2], function(x[1::2]))
            _require(name, whole[:70_000].view(70, -1)[:, :50], function(x[:70_000].view(70, -1)[:, :50]))
            for begin, count in _PLACES:
                _require(name, whole[begin : begin + count], function(x[begin : begin + count].clone()))
    for width in sorted(set(widths)):
        rows = known_numbers(67 if width <= functions.MOST_SUMMED else 3, width)
        for name, function in BY_ROW.items():
            whole = function(rows)
            digest.update(whole[-1].numpy().tobytes())
            for _ in thread_counts():
                _require(name, whole, function(rows))
                _require(name, whole, function(rows.repeat_interleave(2, dim=-1)[:, ::2]))
                for begin, end in ((0, 1), (1, 3), (2, 3)):
                    _require(name, whole[begin:end], function(rows[begin:end]))
    return digest.digest()


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_counts() -> Iterator[int]:
    """Yields 1 and the number of threads of this process, with as many threads in use."""
    for number in sorted({1, torch.get_num_threads()}):
        with _threads(number):
            yield number


def _require(name: str, wanted: Tensor, got: Tensor) -> None:
    if not same_bits(wanted, got):
        raise UnusableSettings(
            f"deterministic is true, but on this CPU the bits of {name} depend on the place of a number: set "
            "deterministic to false"
        )

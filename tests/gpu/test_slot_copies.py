"""Copies of a step to the device and of its result back, and updates of the slots there, against numpy."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.support.slot_copies import WORDS, check_copy, check_scatter

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.copy import CopyWords  # imports CuPy
from runner_svc.cuda.scatter import ScatterSegments

DEVICE = torch.device("cuda")


def words(where: str, count: int) -> torch.Tensor:
    """Returns int32 zeros on the device or in page-locked memory."""
    if where == "device":
        return torch.zeros(count, dtype=torch.int32, device=DEVICE)
    return torch.zeros(count, dtype=torch.int32, pin_memory=True)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("way", [("host", "device"), ("device", "host"), ("device", "device")], ids=" to ".join)
@pytest.mark.parametrize("num_words", WORDS)
def test_copy_words(num_words: int, way: tuple[str, str], overlap: bool) -> None:
    source, target = (words(where, num_words + 12) for where in way)
    copy = CopyWords(overlap=overlap)
    check_copy(copy, source, target, num_words, stream(), torch.cuda.synchronize)
    check_copy(copy, source[4:], target[8:], num_words - 4 or 4, stream(), torch.cuda.synchronize)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_copy_waits_for_the_one_before(overlap: bool) -> None:
    copy, count = CopyWords(overlap=overlap), WORDS[-1]
    chain = [words("device", count) for _ in range(8)]
    chain[0].random_()
    for source, target in pairwise(chain):
        copy(stream(), source, target, count)
    torch.cuda.synchronize()
    assert torch.equal(chain[0], chain[-1])


@pytest.mark.parametrize(("num_admitted", "num_appended"), [(1, 0), (0, 1), (3, 2), (0, 40), (40, 40)])
def test_scatter_segments(num_admitted: int, num_appended: int) -> None:
    check_scatter(ScatterSegments(), DEVICE, num_admitted, num_appended, stream(), torch.cuda.synchronize)

"""Trials of products with 4-bit matrices: the text that each of them changes is in the kernels, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.products.int4_trials import KINDS
from runner_svc.cuda.sources import kernel_folder


@pytest.mark.parametrize("kind", KINDS)
def test_changes_are_of_text_that_is_there(kind: str) -> None:
    for name, changes in KINDS[kind].trials.items():
        for change in changes:
            text = Path(kernel_folder(), change.header).read_text("utf-8")
            assert text.count(change.old) == 1, (name, change.old)

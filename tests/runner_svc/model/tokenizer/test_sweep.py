"""Each fact about a tokenizer, in each file that may hold it: equal to transformers, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_svc.front.text import tokenizer as front_tokenizer
from tests.support.tokenizer_folders import KINDS, facts, write_folder
from tests.support.tokenizer_trials import InProcess, compare


def test_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_tokenizer, "TemplateRenderer", InProcess)
    import os, time
    only = os.environ.get("KIND", "")
    out = open(f"/tmp/qb/sweep-{only}.txt", "w")
    start = time.time()
    for kind in KINDS:
        if only and kind != only: continue
        for number, (name, fact) in enumerate(facts().items()):
            folder = write_folder(kind, tmp_path / f"{kind}{number}")
            fact.change(folder)
            outcome = compare(folder)
            print(kind, "|", name, "|", outcome.served_there, "|", outcome.refusal[:400], "|", len(outcome.differences), outcome.differences[:2], file=out, flush=True)
    print(time.time() - start, file=out)

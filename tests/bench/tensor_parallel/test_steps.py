"""Steps of several ranks, as the command times them: on the CPU's launchers, with ranks in threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.steps import decoding
from bench.tensor_parallel import steps
from runner_svc.group.forming import Group, store_in
from runner_svc.interface.ranks import Shard
from tests.support.host_backend import host_backend
from tests.support.ranks import together
from tests.support.thoroughness import FULL
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

CHOSEN = {"all_reduce": steps.ONE_SHOT, "quantization": "none", "kv_cache_dtype": "auto", "layers": None}


@pytest.mark.skipif(not FULL, reason="takes 10 s")
def test_all_ranks_decode_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny")
    for module in (decoding, steps):
        monkeypatch.setattr(module, "PROMPT", 32)
    monkeypatch.setattr(decoding, "MAX_STEP_TOKENS", 64)
    monkeypatch.setattr(steps, "FIRST", 2)
    monkeypatch.setattr(steps, "LAST", 18)
    monkeypatch.setattr(steps, "ALL_SHAPES", {"tiny": {"vocab_size": NUM_TOKENS}})
    monkeypatch.setattr(steps, "write_folder", lambda *_: None)

    def loaded(_: Path, batches: list[int], chosen: dict[str, Any], group: Group) -> Any:
        options = steps.options_of(batches, chosen)
        sizes = {"num_slots": options.num_slots, "block_size": options.block_size, "max_step_tokens": 64}
        backend = host_backend(folder, num_blocks=options.num_blocks, ranks=group, **sizes)
        group.form()
        backend.regroup()
        return backend

    monkeypatch.setattr(steps, "loaded", loaded)

    def run(shard: Shard) -> list[dict[str, Any]]:
        return steps.measure(Group(shard, store_in(tmp_path, 2)), "tiny", [1, 3], CHOSEN)

    first, second = together(2, run)
    assert [line["batch"] for line in first] == [line["batch"] for line in second] == [1, 3]
    assert [line["way"] for line in first] == [line["way"] for line in second]
    assert all(line["step_ms"] > 0 and line["prefill_tokens_per_s"] > 0 for line in first)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_floors_are_of_a_ranks_part(size: int) -> None:
    alone = steps.floors("llama-3.1-8b", 1, 8, CHOSEN, 4.2, 0.3)
    found = steps.floors("llama-3.1-8b", size, 8, CHOSEN, 4.2, 0.3)
    assert found["floor_ms"] == pytest.approx(alone["floor_ms"] / size, rel=0.01)
    # 65 sums of 8 rows of 4,096 numbers of 2 bytes in a ring, and the logits of 8 rows in float32
    moved = 2 * 65 * 8 * 4096 * 2 + 8 * 128_256 * 4
    assert found["exchange_floor_ms"] == pytest.approx((size - 1) / size * moved / 0.3e9)

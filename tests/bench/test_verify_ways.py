"""The steps whose ways `bench.steps.verify_ways` times."""

from __future__ import annotations

from pathlib import Path

import torch

from bench.steps.verify_ways import prepare, shape_of
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.drafted_steps import VerifyShape
from runner_svc.gpu.drafts.drafting_backend import DraftingCudaBackend
from tests.support.host_backend import host_backend
from tests.support.tiny_models import make_tiny_model


def test_rows_verify_at_the_ends_of_their_contexts(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny")
    sizes = {"num_slots": 3, "block_size": 8, "max_step_tokens": 32, "num_blocks": 40}
    backend = host_backend(folder, drafts=DraftOptions("ngram", 3), **sizes)
    assert isinstance(backend, DraftingCudaBackend)
    shape = shape_of("3x4")
    assert shape == VerifyShape(3, 4)
    with torch.inference_mode():
        prepare(backend, shape)
        steps, slots = backend._steps, backend._slots
        known = int(slots.counters[0])
        assert known > 40
        ways = steps.verify_variants(backend._device.current_stream, shape)
        assert backend.verify_graphs.variant(shape).name in [way.name for way in ways]
        for way in ways:
            steps.logits.fill_(torch.nan)
            way.launch()
            _, positions, places = steps._inputs[:, :12].view(3, 3, 4)
            assert positions.tolist() == [[known - 1 + place for place in range(4)]] * 3
            assert len(set(places.flatten().tolist())) == 12 and int(places.min()) >= 8  # none in the dummy block
            assert steps.logits[:12].isfinite().all()

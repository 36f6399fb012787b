"""The baseline without a server: transformers `generate` on left-padded batches, in order of arrival.

A batch takes what waits, up to its size, as soon as the one before has ended, and runs until its longest request is
done; only the tokens that were asked for count. A request's first token counts at the step that sampled it, as if the
batch were streamed: kinder to the baseline than handing out whole batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from bench.measurement import Served
from bench.workload import BenchRequest

PAD_ID = 0


class PaddedGenerate:
    """A model in float32 on the CPU, with as many threads as torch is set to."""

    def __init__(self, folder: Path, batch_size: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._batch_size = batch_size

    def run(self, requests: Sequence[BenchRequest]) -> list[Served]:
        """Serves the requests in real time and returns what came of each, in order."""
        served: list[Served] = []
        start = time.monotonic()
        while len(served) < len(requests):
            waiting = requests[len(served) : len(served) + self._batch_size]
            time.sleep(max(0.0, waiting[0].arrival_s - (time.monotonic() - start)))
            now = time.monotonic() - start
            batch = [request for request in waiting if request.arrival_s <= now]
            steps = [moment - start for moment in self._generate(batch)]
            served += [
                Served(request.arrival_s, steps[0], steps[request.output_tokens - 1], request.output_tokens)
                for request in batch
            ]
        return served

    def _generate(self, batch: Sequence[BenchRequest]) -> list[float]:
        """The monotonic time of each step of a batch, which runs as long as its longest request."""
        width = max(len(request.prompt) for request in batch)
        longest = max(request.output_tokens for request in batch)
        ids = torch.full((len(batch), width), PAD_ID)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        clock = _StepClock()
        self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=PAD_ID,
            streamer=clock,
        )
        return clock.times


class _StepClock(BaseStreamer):
    """Notes when each step's tokens came; `generate` puts the prompt first."""

    def __init__(self) -> None:
        self._prompt_seen = False
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.monotonic())
        self._prompt_seen = True

    def end(self) -> None:
        pass

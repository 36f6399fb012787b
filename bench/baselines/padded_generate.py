"""Baseline without a server: transformers `generate` on left-padded batches, in order of arrival.

When a batch ends, the next one takes the waiting requests, up to the batch size, and runs until its longest request is
done; only the requested tokens count. A token counts at the step that sampled it, as if the batch were streamed; this
favors the baseline over delivering whole batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from bench.baselines.workload_file import token_ids
from roster_client.bench.load.workload import LoadRequest
from roster_client.bench.records.record import RequestRecord, Status

PAD_ID = 0


class PaddedGenerate:
    """Model with batches of at most `batch_size` rows."""

    def __init__(self, model: PreTrainedModel, batch_size: int) -> None:
        self._model = model
        self._batch_size = batch_size

    def run(self, requests: Sequence[LoadRequest]) -> list[RequestRecord]:
        """Serves the requests in order of arrival, in real time; returns their records in the same order."""
        served: list[RequestRecord] = []
        start = time.monotonic()
        while len(served) < len(requests):
            waiting = requests[len(served) : len(served) + self._batch_size]
            time.sleep(max(0.0, waiting[0].scheduled_s - (time.monotonic() - start)))
            now = time.monotonic() - start
            batch = [request for request in waiting if request.scheduled_s <= now]
            steps = tuple(moment - start for moment in self._generate(batch))
            served += [_record(request, steps) for request in batch]
        return served

    def _generate(self, batch: Sequence[LoadRequest]) -> list[float]:
        """Runs a batch until its longest request is done; returns the monotonic time of each step."""
        width = max(request.prompt_tokens for request in batch)
        longest = max(request.output_tokens for request in batch)
        ids = torch.full((len(batch), width), PAD_ID)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - request.prompt_tokens :] = torch.from_numpy(token_ids(request))
            mask[row, width - request.prompt_tokens :] = 1
        clock = _StepClock()
        self._model.generate(
            ids.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            do_sample=False,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=PAD_ID,
            streamer=clock,
        )
        return clock.times


def _record(request: LoadRequest, steps: tuple[float, ...]) -> RequestRecord:
    """Returns the request's record from the times of its batch's steps."""
    return RequestRecord(
        request_id=request.request_id,
        scheduled_s=request.scheduled_s,
        sent_s=request.scheduled_s,
        status=Status.OK,
        wanted_tokens=request.output_tokens,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        message_s=steps[: request.output_tokens],
        message_tokens=(1,) * request.output_tokens,
        tenant=request.tenant,
        ttft_target_s=request.ttft_target_s,
        itl_target_s=request.itl_target_s,
    )


class _StepClock(BaseStreamer):
    """Records the time of each step's tokens; `generate` passes the prompt first."""

    def __init__(self) -> None:
        self._prompt_seen = False
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.monotonic())
        self._prompt_seen = True

    def end(self) -> None:
        pass

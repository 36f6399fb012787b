"""transformers' own continuous batching (`ContinuousBatchingManager`): paged attention, prompts packed beside decoding
rows, requests join and leave at every step.

Attention is `sdpa` on a CPU; on a GPU the library switches to flash attention where that is installed. A token's time
is the one that the library notes when it has sampled it (`record_timestamps`), not when a reader got it: kind to the
baseline.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig, PreTrainedModel

from bench.baselines.workload_file import token_ids
from roster_client.bench.record import RequestRecord, Status
from roster_client.bench.workload import LoadRequest

NO_STOP_TOKEN = -1
PAD_ID = 0
RESULT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """What one step and the cache may hold: the same numbers as Roster's runner is given."""

    slots: int
    step_tokens: int
    kv_tokens: int
    block_size: int = 16

    def config(self) -> ContinuousBatchingConfig:
        """As the library calls them; pages were called blocks in its older versions."""
        known = {field.name for field in fields(ContinuousBatchingConfig)}
        page = "page_size" if "page_size" in known else "block_size"
        values: dict[str, Any] = {
            page: self.block_size,
            "num_blocks": self.kv_tokens // self.block_size,
            "max_batch_tokens": self.step_tokens,
        }
        if "max_requests_per_batch" in known:
            values["max_requests_per_batch"] = self.slots
        return ContinuousBatchingConfig(**values)


class ContinuousBatching:
    """A manager that runs in a thread of this process until `close`."""

    def __init__(self, model: PreTrainedModel, sizes: BatchSizes) -> None:
        greedy = GenerationConfig(do_sample=False, eos_token_id=NO_STOP_TOKEN, pad_token_id=PAD_ID)
        self._manager: ContinuousBatchingManager = model.init_continuous_batching(
            generation_config=greedy, continuous_batching_config=sizes.config()
        )
        self._manager.start()

    def close(self) -> None:
        """Ends the manager's thread."""
        self._manager.stop(block=True)

    def run(self, requests: Sequence[LoadRequest]) -> list[RequestRecord]:
        """Sends each request at its time and returns what came of each, in their order.

        Raises RuntimeError when the manager's thread has ended.
        """
        start = time.perf_counter()
        sent_s: dict[str, float] = {}
        for request in requests:
            time.sleep(max(0.0, request.scheduled_s - (time.perf_counter() - start)))
            sent_s[request.request_id] = time.perf_counter() - start
            self._manager.add_request(
                token_ids(request).tolist(),
                request_id=request.request_id,
                max_new_tokens=request.output_tokens,
                record_timestamps=True,
                eos_token_id=NO_STOP_TOKEN,
            )
        outputs: dict[str, Any] = {}
        while len(outputs) < len(requests):
            output = self._manager.get_result(timeout=RESULT_TIMEOUT_S)
            if output is not None:
                outputs[output.request_id] = output
            elif not self._manager.is_running():
                raise RuntimeError("transformers' continuous batching has ended: its log says why")
        return [
            _record(request, sent_s[request.request_id], outputs[request.request_id], start) for request in requests
        ]


def _record(request: LoadRequest, sent_s: float, output: Any, start: float) -> RequestRecord:
    """What the library says of a request; `start` on its clock, which is `time.perf_counter`."""
    tokens = len(output.generated_tokens)
    served = not output.error and tokens == request.output_tokens
    return RequestRecord(
        request_id=request.request_id,
        scheduled_s=request.scheduled_s,
        sent_s=sent_s,
        status=Status.OK if served else Status.FAILED,
        wanted_tokens=request.output_tokens,
        prompt_tokens=request.prompt_tokens,
        output_tokens=tokens,
        message_s=tuple(moment - start for moment in output.timestamps or ()),
        message_tokens=(1,) * tokens,
        tenant=request.tenant,
        ttft_target_s=request.ttft_target_s,
        itl_target_s=request.itl_target_s,
        error=output.error or ("" if served else f"{tokens} tokens came"),
    )


@contextmanager
def continuous_batching(model: PreTrainedModel, sizes: BatchSizes) -> Iterator[ContinuousBatching]:
    """A manager for the length of a `with` block."""
    system = ContinuousBatching(model, sizes)
    try:
        yield system
    finally:
        system.close()

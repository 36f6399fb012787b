"""transformers' own continuous batching (`ContinuousBatchingManager`): paged attention, prompts packed with decoding
rows, requests join and leave at every step.

Attention is `sdpa`. On a GPU the library uses flash attention, but only if it is installed locally; otherwise the
library would look for a kernel on a hub. A token's time is the one that the library records when it has sampled the
token (`record_timestamps`), not the time at which a reader receives it; this favors the baseline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig, PreTrainedModel

from bench.baselines.workload_file import token_ids
from roster_client.bench.load.workload import LoadRequest
from roster_client.bench.records.record import RequestRecord, Status

NO_STOP_TOKEN = -1
PAD_ID = 0
RESULT_TIMEOUT_S = 1.0
CANCEL_TIMEOUT_S = 10.0
FLASH_PACKAGES = ("flash_attn", "flash_attn_interface")


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Limits of one step and of the cache, equal to those of Roster's runner."""

    slots: int
    step_tokens: int
    kv_tokens: int
    block_size: int = 16
    """Tokens per page of the cache; the library's default is 256."""

    def config(self) -> ContinuousBatchingConfig:
        """Returns the library's configuration without sizes that it lacks; older versions call pages blocks."""
        known = {field.name for field in fields(ContinuousBatchingConfig)}
        page = "page_size" if "page_size" in known else "block_size"
        values: dict[str, Any] = {
            page: self.block_size,
            "num_blocks": self.kv_tokens // self.block_size,
            "max_batch_tokens": self.step_tokens,
            "max_requests_per_batch": self.slots,
            "auto_switch_to_flash": any(map(find_spec, FLASH_PACKAGES)),
        }
        return ContinuousBatchingConfig(**{name: value for name, value in values.items() if name in known})


class ContinuousBatching:
    """Manager that runs in a thread of this process until `close`."""

    def __init__(self, model: PreTrainedModel, sizes: BatchSizes) -> None:
        greedy = GenerationConfig(do_sample=False, eos_token_id=NO_STOP_TOKEN, pad_token_id=PAD_ID)
        self._manager: ContinuousBatchingManager = model.init_continuous_batching(
            generation_config=greedy, continuous_batching_config=sizes.config()
        )
        self._manager.start()

    def close(self) -> None:
        """Ends the manager's thread."""
        self._manager.stop(block=True)

    def run(self, requests: Sequence[LoadRequest], end_s: float | None = None) -> list[RequestRecord]:
        """Sends each request at its time and returns their records, in the same order.

        `end_s`: seconds after the start at which unfinished requests are cancelled (None: never). Requests due later
        are neither sent nor listed. Raises RuntimeError if the manager's thread has ended.
        """
        start = time.perf_counter()
        end = math.inf if end_s is None else start + end_s
        sent_s: dict[str, float] = {}
        for request in requests:
            if start + request.scheduled_s >= end:
                break
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
        while len(outputs) < len(sent_s) and (left_s := end - time.perf_counter()) > 0:
            output = self._manager.get_result(timeout=min(RESULT_TIMEOUT_S, left_s))
            if output is not None:
                outputs[output.request_id] = output
            elif not self._manager.is_running():
                raise RuntimeError("transformers' continuous batching has ended; see its log for the reason")
        given_up = self._give_up(sent_s.keys(), outputs)
        records = []
        for request in requests[: len(sent_s)]:
            name = request.request_id
            came = _came_of(request, outputs.get(name), given_up.get(name, ()))
            records.append(_record(request, sent_s[name], start, *came))
        return records

    def _give_up(self, sent: Set[str], outputs: dict[str, Any]) -> dict[str, tuple[float, ...]]:
        """Cancels unfinished requests, waits until they are gone and returns the times of their tokens.

        `outputs`: those of finished requests; requests that finish meanwhile are added.
        """
        if len(outputs) == len(sent) or self._manager.batch_processor is None:
            return {}
        scheduler = self._manager.batch_processor.scheduler
        # A request that ends from here on is in these copies or in the outputs; another thread changes the originals.
        states = scheduler.waiting_requests.copy() | scheduler.active_requests.copy()
        times = {name: tuple(state.timestamps or ()) for name, state in states.items()}
        while (output := self._manager.get_result(timeout=0.01)) is not None:
            outputs[output.request_id] = output
        for name in sent - outputs.keys():
            self._manager.cancel_request(name)
        patience = time.perf_counter() + CANCEL_TIMEOUT_S
        while scheduler.has_pending_requests() and time.perf_counter() < patience:
            time.sleep(0.01)
        while self._manager.get_result(timeout=0.01) is not None:
            pass  # it ended after all, but already counts as given up
        return times


def _came_of(
    request: LoadRequest, output: Any | None, given_up: Sequence[float]
) -> tuple[Sequence[float], Status, str]:
    """Returns (token times, status, error) from the library's output of a request that has ended."""
    if output is None:
        return given_up, Status.TIMEOUT, "cancelled at the end of the run"
    tokens = len(output.generated_tokens)
    error = output.error or ("" if tokens == request.output_tokens else f"{tokens} tokens came")
    return (output.timestamps or ())[:tokens], Status.FAILED if error else Status.OK, error


def _record(
    request: LoadRequest, sent_s: float, start: float, times: Sequence[float], status: Status, error: str
) -> RequestRecord:
    """Returns the record; `times` and `start` are on the library's clock, which is `time.perf_counter`."""
    return RequestRecord(
        request_id=request.request_id,
        scheduled_s=request.scheduled_s,
        sent_s=sent_s,
        status=status,
        wanted_tokens=request.output_tokens,
        prompt_tokens=request.prompt_tokens,
        output_tokens=len(times),
        message_s=tuple(moment - start for moment in times),
        message_tokens=(1,) * len(times),
        tenant=request.tenant,
        ttft_target_s=request.ttft_target_s,
        itl_target_s=request.itl_target_s,
        error=error,
    )


@contextmanager
def continuous_batching(model: PreTrainedModel, sizes: BatchSizes) -> Iterator[ContinuousBatching]:
    """Runs a manager for the duration of a `with` block."""
    system = ContinuousBatching(model, sizes)
    try:
        yield system
    finally:
        system.close()

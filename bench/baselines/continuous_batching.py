"""transformers' own continuous batching (`ContinuousBatchingManager`): paged attention, prompts packed beside decoding
rows, requests join and leave at every step.

Attention is `sdpa`; on a GPU the library switches to flash attention, but only where that is installed here: it would
look for a kernel on a hub else. A token's time is the one that the library notes when it has sampled it
(`record_timestamps`), not when a reader got it: kind to the baseline.
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
    """What one step and the cache may hold: the same numbers as Roster's runner is given."""

    slots: int
    step_tokens: int
    kv_tokens: int
    block_size: int = 16
    """Tokens of a page of the cache; the library's own choice is 256."""

    def config(self) -> ContinuousBatchingConfig:
        """As the library calls them, as far as it knows them: pages were called blocks in its older versions."""
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

    def run(self, requests: Sequence[LoadRequest], end_s: float | None = None) -> list[RequestRecord]:
        """Sends each request at its time and returns what came of each, in their order.

        `end_s`: seconds after the start at which all that is left is given up; what would leave later is not sent, nor
        listed; None: never. Raises RuntimeError when the manager's thread has ended.
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
                raise RuntimeError("transformers' continuous batching has ended: its log says why")
        given_up = self._give_up(sent_s.keys(), outputs)
        records = []
        for request in requests[: len(sent_s)]:
            name = request.request_id
            came = _came_of(request, outputs.get(name), given_up.get(name, ()))
            records.append(_record(request, sent_s[name], start, *came))
        return records

    def _give_up(self, sent: Set[str], outputs: dict[str, Any]) -> dict[str, tuple[float, ...]]:
        """Cancels who has not ended and waits until they are gone; the times of the tokens that they had.

        `outputs`: of those who have ended; more may join them.
        """
        if len(outputs) == len(sent) or self._manager.batch_processor is None:
            return {}
        scheduler = self._manager.batch_processor.scheduler
        # Who ends from here on is in these or among the outputs; another thread changes the originals.
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
            pass  # ended after all: given up here already
        return times


def _came_of(
    request: LoadRequest, output: Any | None, given_up: Sequence[float]
) -> tuple[Sequence[float], Status, str]:
    """(times of its tokens, how it ended, what went wrong), by what the library says of a request that has ended."""
    if output is None:
        return given_up, Status.TIMEOUT, "given up at the end of the run"
    tokens = len(output.generated_tokens)
    error = output.error or ("" if tokens == request.output_tokens else f"{tokens} tokens came")
    return (output.timestamps or ())[:tokens], Status.FAILED if error else Status.OK, error


def _record(
    request: LoadRequest, sent_s: float, start: float, times: Sequence[float], status: Status, error: str
) -> RequestRecord:
    """`times` and `start` on the library's clock, which is `time.perf_counter`."""
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
    """A manager for the length of a `with` block."""
    system = ContinuousBatching(model, sizes)
    try:
        yield system
    finally:
        system.close()

"""Records the messages between this commit's scheduler and runner: `python -m tests.support.record_frames VERSION`.

The conversations are written to tests/link_frames/VERSION, with the schema and the clients' outputs. Run it once, at
the commit whose frames are wanted. `tests/scheduler_svc/link/test_link_frames.py` checks every later commit against
them.

| file | conversation |
| --- | --- |
| requests | requests of every class share few slots and blocks; a ping; the runner leaves |
| constrained | constrained sequences whose scheduler dies half way; the next one resumes from the snapshot |
| columns | handwritten plans with every column, a missing plan, an expired term, a fault |
| rejection | a runner that is rejected |
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from typing import Any

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.execution.runner import Runner
from runner_svc.link.plan_socket import PlanSocket, Rejected
from scheduler_svc.constrained.process.compiler import grammar_text
from scheduler_svc.plan.plan_draft import pack
from tests.support.constraints import CONSTRAINTS
from tests.support.fake_scheduler import FakeScheduler
from tests.support.in_process import Submitted
from tests.support.linked_stack import LinkedStack
from tests.support.plans import AWAIT, SAMPLE, admission, masks, plan, sampling
from tests.support.recorded_frames import FOLDER, SCHEMA, Frame, write_frames

EOS_PROBABILITY = 1 / 24
STOPS = pack([IM_END_ID])
PLANS_BEFORE_DEATH = 6


def backend() -> HashBackend:
    """Returns a backend of four slots and few blocks: some requests wait, and some are preempted."""
    return HashBackend(
        num_slots=4,
        block_size=4,
        num_blocks=28,
        max_step_tokens=16,
        context_length=128,
        eos_probability=EOS_PROBABILITY,
    )


def submit_requests(stack: LinkedStack) -> list[Submitted]:
    """Submits a request of every class without a constraint."""
    penalties = plan_pb2.Sampling(
        temperature=0, top_p=1, top_k=3, min_p=0.125, repetition_penalty=1.25, presence_penalty=0.5,
        frequency_penalty=-0.5, bias_ids=pack([7, 9]), bias_values=b"\0\0\x80\x3f" * 2, min_tokens=4, stop_ids=STOPS,
    )  # fmt: skip
    scored = plan_pb2.Sampling(
        temperature=1, top_p=0.5, repetition_penalty=1, stop_ids=STOPS, logprobs=2, prompt_logprobs=1
    )
    plain = plan_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1, stop_ids=STOPS)
    return [
        stack.submit([1, 2, 3, 4, 5], 24, sampling=penalties, seed=1),
        stack.submit([4, 3, 2, 1] * 9, 20, sampling=scored, seed=2, tenant="t", priority=3),
        stack.submit([9, 8, 7] * 5, 30, sampling=plain, seed=3, n=2, timeout_ms=600_000, keep_ms=7000),
        stack.submit([6] * 12, 40, sampling=plain, seed=1 << 60, cache_salt="s", ttft_target_ms=90, itl_target_ms=9),
        stack.submit([6] * 12, 5, sampling=plan_pb2.Sampling(top_p=1, repetition_penalty=1), seed=5),
    ]


def submit_constrained(stack: LinkedStack) -> list[Submitted]:
    """Submits three constrained requests and an unconstrained one.

    One constrained request has received tokens, another log-probabilities.
    """
    greedy = plan_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1, stop_ids=STOPS)
    drawn = plan_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1, stop_ids=STOPS, min_tokens=2)
    scored = plan_pb2.Sampling(temperature=1, top_p=1, repetition_penalty=1, stop_ids=STOPS, logprobs=1)
    return [
        stack.submit([1, 2, 3], 40, sampling=greedy, seed=1, grammar=grammar_text(*CONSTRAINTS[0])),
        stack.submit(
            [5, 6, 7, 8, 9], 20, sampling=drawn, seed=2, grammar=grammar_text(*CONSTRAINTS[1]), tenant="t",
            received=pack(list(b"ba")),
        ),
        stack.submit([8] * 7, 30, sampling=drawn, seed=3),
        stack.submit([7] * 4, 16, sampling=scored, seed=4, grammar=grammar_text(*CONSTRAINTS[0])),
    ]  # fmt: skip


class RecordedRunner:
    """A runner of this commit in a thread; each of its frames is recorded."""

    def __init__(self, endpoint: str) -> None:
        self.frames: list[Frame] = []
        self.rejection = ""
        self._link = PlanSocket(Runner(backend(), "recorded"), endpoint)
        connection = self._link._connection
        send, messages = connection.send, connection.messages

        def keep_sent(data: bytes) -> bool:
            sent = send(data)
            if sent:
                self.frames.append(Frame(True, data))
            return sent

        def keep_received() -> Any:
            for data in messages():
                self.frames.append(Frame(False, data))
                yield data

        connection.send, connection.messages = keep_sent, keep_received  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._link.run()
        except Rejected as rejection:
            self.rejection = str(rejection)

    def leave(self) -> None:
        """Ends the runner as SIGTERM does."""
        self._link.stop()
        self.join()

    def join(self) -> None:
        """Waits for the thread's end."""
        self._thread.join()


def outputs(requests: list[Submitted]) -> list[list[dict[str, Any]]]:
    """Returns the clients' tokens and finish reasons, by request and choice."""
    return [[{"tokens": s.tokens, "reason": s.end.reason} for s in request.streams if s.end] for request in requests]


def ended(requests: list[Submitted]) -> bool:
    """Whether every stream has ended."""
    return all(request.streams and all(stream.end for stream in request.streams) for request in requests)


def record_requests() -> tuple[list[Frame], list[Any]]:
    stack = LinkedStack()
    runner = RecordedRunner(stack.endpoint)
    stack.step_until(lambda: stack.engine.pool.schedulers)
    requests = submit_requests(stack)
    stack.step_until(lambda: ended(requests))
    stack.now_s += 1.5
    stack.step_until(lambda: any(f.from_runner and f.to_scheduler.HasField("pong") for f in list(runner.frames)))
    threading.Thread(target=runner.leave).start()
    stack.step_until(lambda: not stack.engine.pool.schedulers)
    runner.join()
    stack.close()
    return runner.frames, outputs(requests)


def record_constrained() -> tuple[list[Frame], list[Any]]:
    stack = LinkedStack()
    runner = RecordedRunner(stack.endpoint)
    stack.step_until(lambda: stack.engine.pool.schedulers)
    requests = submit_constrained(stack)
    stack.step_until(lambda: stack.engine.requests.totals.plans >= PLANS_BEFORE_DEATH)
    stack.restart_scheduler()
    stack.take_over()
    stack.step_until(lambda: ended(requests))
    runner.leave()
    stack.close()
    return runner.frames, outputs(requests)


def hand_made_plans() -> list[plan_pb2.Plan]:
    """Returns plans that use every column and every flag."""
    scored = sampling(temperature=1.0, logprobs=2, prompt_logprobs=1)
    return [
        plan(
            admissions=[
                admission(0, [1, 2, 3, 4, 5], [1, 2], sampling=scored, seed=9, sample_index=1, context=b"opaque"),
                admission(1, [6, 7], [3], sampling=sampling(bias_ids=[1], bias_values=[2.0], stop_ids=[3])),
            ],
            extents=[(0, 0, 5, SAMPLE), (1, 0, 1, 0)],
        ),
        plan(
            releases=[1],
            admissions=[admission(1, [1, 2, 3, 4, 8, 8], [4, 5], num_computed=4, prompt_len=5)],
            appends=[(1, 2, 6)],
            copies=[(1, 4)],
            extents=[(0, 5, 1, SAMPLE), (1, 4, 2, AWAIT)],
        ),
        plan(extents=[(0, 6, 1, SAMPLE)]),
    ]


def record_columns() -> tuple[list[Frame], list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        scheduler = FakeScheduler(f"ipc://{folder}/link", session=11)
        runner = RecordedRunner(scheduler.endpoint)
        scheduler.expect("hello")
        scheduler.send(welcome=plan_pb2.Welcome(term=1_800_000_000_000_000_000))
        first, second, third = hand_made_plans()
        scheduler.send(number=1, plan=first)
        scheduler.expect("result")
        scheduler.send(number=3, plan=third)
        scheduler.expect("event")
        scheduler.send(number=2, plan=second)
        scheduler.send(number=2, masks=masks(backend().model.vocab_size, {1: [5, 70, 200]}))
        scheduler.expect("result")
        scheduler.send(number=3, plan=third)
        scheduler.expect("result")
        scheduler.send(snapshot_request=plan_pb2.SnapshotRequest())
        scheduler.expect("snapshot")
        scheduler.send(number=1, ping=plan_pb2.Ping(last_plan=3))
        scheduler.expect("pong")
        scheduler.send(session=12, welcome=plan_pb2.Welcome(term=1_700_000_000_000_000_000))
        scheduler.expect("event")
        scheduler.send(number=4, plan=plan(extents=[(2, 0, 1, SAMPLE)]))
        scheduler.expect("event")
        runner.leave()
        scheduler.close()
    return runner.frames, []


def record_rejection() -> tuple[list[Frame], list[Any]]:
    stack = LinkedStack()
    stack.engine.pool.unfit = lambda hello: "it serves another model"  # type: ignore[method-assign]
    runner = RecordedRunner(stack.endpoint)
    stack.step_until(lambda: runner.rejection)
    runner.join()
    stack.close()
    return runner.frames, []


SCENES = {
    "requests": record_requests,
    "constrained": record_constrained,
    "columns": record_columns,
    "rejection": record_rejection,
}


def main() -> None:
    """Records every conversation into the version's folder."""
    folder = FOLDER / sys.argv[1]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCHEMA).write_bytes(plan_pb2.DESCRIPTOR.serialized_pb)
    results = {}
    for name, record in SCENES.items():
        frames, results[name] = record()
        write_frames(folder / f"{name}.frames", frames)
        print(f"{name}: {len(frames)} frames, {sum(len(frame.data) for frame in frames)} bytes")
    (folder / "outputs.json").write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()

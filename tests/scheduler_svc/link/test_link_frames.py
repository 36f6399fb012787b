"""Scheduler and runner are upgraded one at a time: the current version of each works with an earlier one.

The earlier frames are in tests/link_frames, recorded by `tests/support/record_frames.py` at the commit in their name. A
newer field of the link is sent only to a peer that has named its feature.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from roster_common.link_protocol import OURS
from roster_protos import plan_pb2
from runner_svc.execution.runner import Runner
from runner_svc.link.plan_socket import PlanSocket
from tests.support.fake_scheduler import FakeScheduler
from tests.support.in_process import Submitted
from tests.support.linked_stack import LinkedStack
from tests.support.record_frames import backend, ended, submit_constrained, submit_requests
from tests.support.recorded_frames import FOLDER, VERSIONS, Frame, RecordedSchema, read_frames
from tests.support.replayed_runner import ReplayedRunner

ROOT = Path(__file__).parents[3]
LEAST_REPLAYED = 8
NEW_IN_HELLO = {f"ToScheduler.hello.{number}" for number in (12, 13, 14, 16, 17, 26, 27, 28, 29, 31)}
"""Sent before the peer is known; an older scheduler drops it."""


@pytest.fixture(params=VERSIONS)
def folder(request: pytest.FixtureRequest) -> Path:
    return FOLDER / str(request.param)


@pytest.fixture
def schema(folder: Path) -> RecordedSchema:
    return RecordedSchema(folder.name)


@pytest.fixture
def stack() -> Iterator[LinkedStack]:
    stack = LinkedStack()
    yield stack
    stack.close()


def sessions(frames: list[Frame]) -> list[list[Frame]]:
    """Returns the frames of each session, from its Hello on."""
    parts: list[list[Frame]] = []
    for frame in frames:
        if frame.from_runner and frame.to_scheduler.HasField("hello"):
            parts.append([])
        parts[-1].append(frame)
    return parts


def expected(folder: Path, scene: str) -> list[list[list[int]]]:
    outputs = json.loads((folder / "outputs.json").read_text())[scene]
    return [[choice["tokens"] for choice in request] for request in outputs]


def got(requests: list[Submitted]) -> list[list[list[int]]]:
    return [[stream.tokens for stream in request.streams] for request in requests]


def test_the_recordings_hold_every_kind_of_message(folder: Path) -> None:
    frames = [frame for path in folder.glob("*.frames") for frame in read_frames(path)]
    heard = {frame.to_scheduler.WhichOneof("body") for frame in frames if frame.from_runner}
    said = {frame.to_runner.WhichOneof("body") for frame in frames if not frame.from_runner}
    assert heard == {"hello", "result", "event", "snapshot", "pong"}
    assert said == {"welcome", "plan", "masks", "ping", "snapshot_request", "rejection"}
    events = {frame.to_scheduler.event.WhichOneof("kind") for frame in frames if frame.from_runner}
    assert events == {None, "resend_from", "fault", "draining", "fenced"}
    schema = RecordedSchema(folder.name)
    assert not any(schema.unknown("ToScheduler" if f.from_runner else "ToRunner", f.data) for f in frames)
    columns = {field.name for f in frames if not f.from_runner for field, _ in f.to_runner.plan.ListFields()}
    assert columns >= {
        "releases", "admissions", "append_slots", "append_indexes", "append_blocks", "copy_sources", "copy_targets",
        "extent_slots", "extent_starts", "extent_counts", "extent_flags",
    }  # fmt: skip


def test_every_field_since_then_belongs_to_a_feature_that_plan_proto_names(schema: RecordedSchema) -> None:
    text = (ROOT / "protos" / "plan.proto").read_text("utf-8")
    table = dict(re.findall(r'^//   "(\w+)" +(.+)$', text, re.MULTILINE))
    assert set(table) == OURS
    featured = {field for fields in table.values() for field in fields.split(", ")}
    hello = {"Hello.term_id", "Hello.features", "Hello.fingerprints", "Hello.longest_context", "Hello.cache_groups"}
    hello |= {"Hello.max_drafts", "Hello.drafter", "Hello.max_sampled", "Hello.has_experts", "Hello.ranks"}
    hello |= {"Hello.epoch", "Hello.lost_rank"}
    hello |= {"Hello.num_host_blocks", "Hello.block_bytes", "Hello.load_block_ns", "Hello.offload_block_ns"}
    hello |= {"Hello.naming_secret", "Hello.kv_format", "Hello.role", "Hello.move_*"}
    hello |= {"Hello.step_costs", *(f"StepCost.{name}" for name in plan_pb2.StepCost.DESCRIPTOR.fields_by_name)}
    other = hello | {"Model.decoder", "Model.weight_formats", "Model.numerics", "Welcome.features"}
    new = schema.fields_since()
    assert {field for field in new if not any(fnmatchcase(field, pattern) for pattern in featured | other)} == set()


def test_todays_scheduler_goes_on_with_an_earlier_runners_results(
    folder: Path, schema: RecordedSchema, stack: LinkedStack
) -> None:
    frames = read_frames(folder / "requests.frames")
    runner = ReplayedRunner(stack.endpoint, Runner(backend()), frames, schema)
    stack.step_until(lambda: stack.engine.pool.schedulers, runner.turn)
    requests = submit_requests(stack)
    stack.step_until(lambda: ended(requests), runner.turn)
    assert got(requests) == expected(folder, "requests")
    assert runner.replayed >= LEAST_REPLAYED
    stack.now_s += 1.5
    stack.step_until(lambda: "ping" in runner.heard, runner.turn)
    runner.say("event")
    stack.step_until(lambda: not stack.engine.pool.schedulers, runner.turn)
    runner.close()


def test_todays_scheduler_recovers_from_an_earlier_ones_snapshot(
    folder: Path, schema: RecordedSchema, stack: LinkedStack
) -> None:
    """Includes constrained sequences: their matchers are rebuilt from the snapshot."""
    before, after = sessions(read_frames(folder / "constrained.frames"))
    runner = Runner(backend())
    execute(runner, before)
    requests = submit_constrained(stack)
    stack.front.commands.clear()
    replayed = ReplayedRunner(stack.endpoint, runner, after, schema)
    stack.take_over(replayed.turn)
    stack.step_until(lambda: ended(requests), replayed.turn)
    assert got(requests) == expected(folder, "constrained")
    assert stack.engine.requests.totals.requests == 0, "one was sent again: the snapshot held them all"
    replayed.close()


def execute(runner: Runner, frames: list[Frame]) -> None:
    """Executes a session; a plan whose masks never arrived has computed what needs none."""
    runner.reset()
    masks = {m.number: m.masks for f in frames if not f.from_runner and (m := f.to_runner).HasField("masks")}
    for frame in frames:
        if not frame.from_runner and (message := frame.to_runner).HasField("plan"):
            launched = runner.launch(message.number, message.plan)
            if message.number in masks:
                launched.mask(masks[message.number])
            launched.abandon() if launched.awaits_masks else launched.wait()


def test_todays_scheduler_turns_an_earlier_runner_away(
    folder: Path, schema: RecordedSchema, stack: LinkedStack
) -> None:
    hello = read_frames(folder / "rejection.frames")[0].to_scheduler
    hello.hello.protocol_version = 0
    frame = Frame(True, hello.SerializeToString())
    runner = ReplayedRunner(stack.endpoint, Runner(backend()), [frame], schema)
    stack.step_until(lambda: "rejection" in runner.heard, runner.turn)
    runner.close()


@pytest.mark.parametrize("scene", ["requests", "constrained", "columns"])
def test_todays_runner_executes_an_earlier_schedulers_frames(
    folder: Path, schema: RecordedSchema, scene: str, tmp_path: Path
) -> None:
    """It answers each frame as the earlier runner did, with no field that was unknown then."""
    parts = sessions(read_frames(folder / f"{scene}.frames"))
    scheduler = FakeScheduler(f"ipc://{tmp_path}/link")
    link = PlanSocket(Runner(backend(), "recorded"), scheduler.endpoint)
    thread = threading.Thread(target=link.run)
    thread.start()
    try:
        for index, frames in enumerate(parts):
            if index and scene == "constrained":  # the scheduler dies once everything it sent has arrived
                scheduler.send(session=parts[0][-1].to_runner.session, ping=plan_pb2.Ping())
                scheduler.expect("pong")
                scheduler.close()
                scheduler = FakeScheduler(scheduler.endpoint)
            for frame in frames:
                if not frame.from_runner:
                    scheduler.send_frame(frame.data)
                elif not frame.to_scheduler.event.draining:
                    answer = hear(scheduler, frame.to_scheduler, schema)
                    made, recorded = comparable(answer, schema), comparable(frame.data, schema)
                    for entry, former in zip(made.result.logprobs, recorded.result.logprobs, strict=True):
                        if entry.values == bytes(4):  # the only token of its mask: test backends made up other values
                            former.values, former.top_values = entry.values, entry.top_values
                    assert made == recorded
    finally:
        link.stop()
        thread.join()
        scheduler.close()


def hear(scheduler: FakeScheduler, wanted: plan_pb2.ToScheduler, schema: RecordedSchema) -> bytes:
    answer = scheduler.expect(str(wanted.WhichOneof("body")))
    while answer.HasField("hello") and answer.session != wanted.session:
        answer = scheduler.expect("hello")
    frame = answer.SerializeToString()
    new = set(schema.unknown("ToScheduler", frame))
    assert new <= (NEW_IN_HELLO if answer.HasField("hello") else set())
    return frame


def comparable(frame: bytes, schema: RecordedSchema) -> Any:
    """Returns the message as that version reads it, without times."""
    message: Any = schema.parse("ToScheduler", frame)
    message.result.ClearField("timings")
    message.DiscardUnknownFields()
    return message

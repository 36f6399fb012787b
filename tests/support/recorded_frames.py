"""Recorded frames of the link, in files: what a peer of that version sends, byte for byte.

A file is a sequence of records: one byte (1: sent by the runner, 0: by the scheduler), the length as little-endian
uint32, the frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from roster_protos import plan_pb2

FOLDER = Path(__file__).parents[1] / "link_frames"
VERSIONS = sorted(path.name for path in FOLDER.iterdir()) if FOLDER.is_dir() else []
SCHEMA = "plan.descriptor"
"""File with the FileDescriptorProto of that version's plan.proto."""
_HEAD = struct.Struct("<BI")


@dataclass(frozen=True, slots=True)
class Frame:
    """One ZeroMQ frame."""

    from_runner: bool
    data: bytes

    @property
    def to_scheduler(self) -> plan_pb2.ToScheduler:
        """Message sent by the runner."""
        assert self.from_runner
        return plan_pb2.ToScheduler.FromString(self.data)

    @property
    def to_runner(self) -> plan_pb2.ToRunner:
        """Message sent by the scheduler."""
        assert not self.from_runner
        return plan_pb2.ToRunner.FromString(self.data)


def write_frames(path: Path, frames: Iterable[Frame]) -> None:
    """Writes a conversation to a file."""
    path.write_bytes(b"".join(_HEAD.pack(frame.from_runner, len(frame.data)) + frame.data for frame in frames))


def read_frames(path: Path) -> list[Frame]:
    """Reads a conversation from a file."""
    data, at, frames = path.read_bytes(), 0, []
    while at < len(data):
        from_runner, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        frames.append(Frame(bool(from_runner), data[at : at + length]))
        at += length
    return frames


class RecordedSchema:
    """The messages of plan.proto in a version."""

    def __init__(self, version: str) -> None:
        pool = descriptor_pool.DescriptorPool()
        file = descriptor_pb2.FileDescriptorProto.FromString((FOLDER / version / SCHEMA).read_bytes())
        pool.Add(file)
        self._fields = {f"{message.name}.{field.name}" for message in file.message_type for field in message.field}
        self._classes = {
            name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"roster.plan.v1.{name}"))
            for name in ("ToRunner", "ToScheduler")
        }

    def parse(self, name: str, frame: bytes) -> Message:
        """Parses a frame as a `name` (ToRunner, ToScheduler) of the version."""
        return self._classes[name].FromString(frame)

    def fields_since(self) -> set[str]:
        """Returns the fields of today's messages, as `Message.field`, that the version does not have."""
        today = plan_pb2.DESCRIPTOR.message_types_by_name.values()
        return {f"{message.name}.{field.name}" for message in today for field in message.fields} - self._fields

    def unknown(self, name: str, frame: bytes) -> list[str]:
        """Returns the paths of the fields that the version does not know."""
        return list(_unknown(self.parse(name, frame), name))


def _unknown(message: Message, path: str) -> Iterable[str]:
    yield from (f"{path}.{field.field_number}" for field in UnknownFieldSet(message))
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for one in [value] if isinstance(value, Message) else value:
            yield from _unknown(one, f"{path}.{field.name}")

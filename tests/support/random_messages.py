"""Hostile protobufs: random fields of any message type, valid messages with corrupted fields, changed bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

_FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-45, 1e38, -1e38, float("inf"), float("-inf"), float("nan"), 100.0, 1e-3)
_TEXTS = (
    "", "a", "hello", "\x00", "é", "🙂", "‮", "\ue000", "<|im_end|>", "<s>", "{{ 1 }}", "\n", " ", "x" * 300,
    "ab" * 5000, "\ufffd", "user", "system",
)  # fmt: skip
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def random_message(rng: random.Random, kind: type[M], density: float = 0.3) -> M:
    """Sets every field with probability `density` to a hostile or small value."""
    message = kind()
    _fill(rng, message, density, depth=0)
    return message


def spoilt(rng: random.Random, message: M, changes: int = 2) -> M:
    """Returns a copy in which some fields, at any depth, are replaced or cleared."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(changes):
        _spoil(rng, copy)
    return copy


def flipped(rng: random.Random, data: bytes) -> bytes:
    """Changes, inserts or duplicates some bytes, or cuts off the end."""
    found = bytearray(data or b"\x0a")
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(found))
        way = rng.randrange(4)
        if way == 0:
            found[place] = rng.randrange(256)
        elif way == 1:
            found.insert(place, rng.randrange(256))
        elif way == 2:
            found[place:place] = found[place : place + rng.randrange(1, 9)]
        elif place:
            del found[place:]
    return bytes(found)


def _spoil(rng: random.Random, message: Message) -> None:
    field = rng.choice(message.DESCRIPTOR.fields)
    below = [getattr(message, f.name) for f, _ in message.ListFields() if _is_message(f) and not f.is_repeated]
    if below and rng.random() < 0.6:
        _spoil(rng, rng.choice(below))
    elif rng.random() < 0.2:
        message.ClearField(field.name)
    else:
        message.ClearField(field.name)
        _set(rng, message, field, density=0.3, depth=2)


def _fill(rng: random.Random, message: Message, density: float, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if rng.random() < density:
            _set(rng, message, field, density, depth)


def _set(rng: random.Random, message: Message, field: FieldDescriptor, density: float, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entries = getattr(message, field.name)
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        for _ in range(_count(rng)):
            entries[_scalar(rng, key)] = _scalar(rng, value)
    elif field.is_repeated:
        values = getattr(message, field.name)
        for _ in range(min(_count(rng), 20 if _is_message(field) else 3000)):
            if _is_message(field):
                _fill(rng, values.add(), density, depth + 1)
            else:
                values.append(_scalar(rng, field))
    elif _is_message(field):
        getattr(message, field.name).SetInParent()
        if depth < 6:
            _fill(rng, getattr(message, field.name), density, depth + 1)
    else:
        setattr(message, field.name, _scalar(rng, field))


def _count(rng: random.Random) -> int:
    return rng.choice((0, 1, 1, 1, 2, 2, 3, 3, 8, 64, 65)) if rng.random() < 0.95 else 1025


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind in _RANGES:
        least, most = _RANGES[kind]
        near: Sequence[int] = (0, 1, 2, 64, 255, 259, 300, 4096, most, most - 1, least, rng.randrange(512))
        return rng.choice([value for value in near if least <= value <= most])
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((*[value.number for value in field.enum_type.values], 77, -1))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 3, 4, 8, 64)))
    return rng.choice(_TEXTS)


def _is_message(field: FieldDescriptor) -> bool:
    return field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE

"""The architecture that a GGUF file names."""

from __future__ import annotations

import struct
from pathlib import Path

_MAGIC = b"GGUF"
_KEY = b"general.architecture"
_STRING = 8
_HEAD_BYTES = 4 + 4 + 8 + 8
_LONGEST_NAME = 100


def gguf_architecture(file: Path) -> str:
    """Returns general.architecture, or "" when the file does not begin with it, as llama.cpp's converters write it.

    Raises OSError.
    """
    with file.open("rb") as opened:
        head = opened.read(_HEAD_BYTES + 8 + len(_KEY) + 4 + 8 + _LONGEST_NAME)
    key_at = _HEAD_BYTES + 8
    value_at = key_at + len(_KEY)
    if not head.startswith(_MAGIC) or head[key_at:value_at] != _KEY or len(head) < value_at + 12:
        return ""
    kind, length = struct.unpack_from("<IQ", head, value_at)
    if kind != _STRING or length > _LONGEST_NAME:
        return ""
    return head[value_at + 12 : value_at + 12 + length].decode("utf-8", "replace")

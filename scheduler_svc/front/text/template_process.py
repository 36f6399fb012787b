"""Process that runs a chat template: `python -m scheduler_svc.front.text.template_process`.

A template is a program that came with a model. Jinja's sandbox keeps it from forbidden objects, but not from an endless
loop or from `"x" * 10**10`, which may be a single instruction that no thread can interrupt. It therefore runs in a
process that the kernel limits. A timer of processor time, which does not advance while the process is paused, ends it
with SIGPROF. A limit on address space makes large allocations fail. The parent then starts another process.

Frames on stdin and stdout are JSON, prefixed by its length in 4 bytes, big-endian. The first frame is `{source,
special_tokens, limit_s, most_characters}`, each later one `{messages, add_generation_prompt}`. Each is answered by
`{text}` or `{error}`.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

from scheduler_svc.front.text.chat_template import ChatTemplate, ChatTemplateError

MOST_BYTES = 512 << 20
"""Limit of this process's address space; the interpreter itself uses about 100 MB of it."""

LENGTH = struct.Struct(">I")


def write_frame(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Writes one frame. Raises BrokenPipeError if the reader is gone."""
    body = json.dumps(message).encode()
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """Reads one frame. Returns None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


def main() -> None:
    """Renders chats until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # signals reach a whole process group; only the end of stdin counts
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for limit, most in ((resource.RLIMIT_AS, MOST_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (most, most))
    template: ChatTemplate | None = None
    limit_s, most_characters = 1.0, 0
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        if "source" in frame:
            limit_s, most_characters = frame["limit_s"], frame["most_characters"]
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # SIGPROF ends a process that has no handler for it
        try:
            if "source" in frame:
                template = ChatTemplate(frame["source"], frame["special_tokens"])
                answer = {"text": ""}
            else:
                answer = _render(template, frame, most_characters)
        except ChatTemplateError as error:
            answer = {"error": str(error)}
        except (MemoryError, RecursionError) as error:
            answer = {"error": f"the model's chat template is too big: {type(error).__name__}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(sys.stdout.buffer, answer)


def _render(template: ChatTemplate | None, frame: dict[str, Any], most_characters: int) -> dict[str, str]:
    if template is None:
        raise ChatTemplateError("no template was set; send a frame with `source` first")
    text = template.render(frame["messages"], frame["add_generation_prompt"])
    if len(text) > most_characters:
        raise ChatTemplateError(
            f"the model's chat template renders these messages to {len(text)} characters: too many; shorten them"
        )
    return {"text": text}


if __name__ == "__main__":
    main()

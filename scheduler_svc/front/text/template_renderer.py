"""Renders chats in a separate process (see template_process), and rejects a template that exceeds its limits.

Rendering blocks for up to `LIMIT_S`, or longer where cores are scarce, so it must not be called on the event loop. It
renders one chat at a time: a well-behaved template takes a fraction of a millisecond.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

from scheduler_svc.front.text.chat_template import ChatTemplateError, TemplateUnusable
from scheduler_svc.front.text.template_process import LENGTH, write_frame

LIMIT_S = 2.0
"""Limit of processor time for one chat, in seconds."""

START_S = 30.0
"""Additional seconds for the process to start where cores are scarce."""

GRACE_S = 4.0
"""Additional seconds for the process to get its processor time and to end itself."""

TICK_S = 0.1
"""Waiting is counted in ticks of this many seconds. A pause of this process counts as one tick, so no wait expires."""

STRIKES = 3
"""Consecutive chats that exceed the limits after which a template is no longer used."""

_INHERITED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


class _Died(Exception):
    """The process ended or did not answer while it rendered a chat. The message gives the reason."""


class TemplateRenderer:
    """A model's chat template in its own process. Thread-safe.

    `most_characters`: longest rendered text; a longer one is refused.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], most_characters: int, limit_s: float = LIMIT_S
    ) -> None:
        self._setup = {
            "source": source,
            "special_tokens": dict(special_tokens),
            "limit_s": limit_s,
            "most_characters": most_characters,
        }
        self._limit_s = limit_s
        # A character takes 12 bytes of JSON at most.
        self._most_bytes = 12 * most_characters + 65536
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._strikes = 0
        self._unusable = ""

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """Returns the text of the prompt. Each message has `role` and `content`. Raises ChatTemplateError."""
        frame = {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        with self._lock:
            self._start()
            try:
                answer = self._ask(frame, self._limit_s)
            except _Died as death:
                self._end()
                self._strikes += 1
                if self._strikes == STRIKES:
                    self._unusable = f"the model's chat template exceeded its limits {STRIKES} times and is disabled"
                raise ChatTemplateError(f"the model's chat template cannot render these messages: {death}") from None
            self._strikes = 0
        if "error" in answer:
            raise ChatTemplateError(answer["error"])
        text: str = answer["text"]
        return text

    def check(self) -> None:
        """Compiles the template. Raises TemplateUnusable."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """Ends the process; the next chat starts another."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        """Starts the process and compiles the template, if not yet done. Raises TemplateUnusable, then and later."""
        if self._unusable:
            raise TemplateUnusable(self._unusable)
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scheduler_svc.front.text.template_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in _INHERITED if name in os.environ},
        )
        self._finalizer = weakref.finalize(self, _kill, self._process)
        try:
            problem = self._ask(self._setup, self._limit_s + START_S).get("error", "")
        except _Died as death:
            problem = f"the model's chat template does not compile: {death}"
        if problem:
            self._end()
            self._unusable = problem
            raise TemplateUnusable(problem)

    def _ask(self, frame: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Returns the process's answer. Raises _Died if the process ends itself at its limit, or fails to do so."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("the template process is not running; call _start first")
        try:
            write_frame(process.stdin, frame)  # type: ignore[arg-type]
            body = self._receive(process.stdout, seconds + GRACE_S)
        except BrokenPipeError:
            body = None
        if body is not None:
            answer: dict[str, Any] = json.loads(body)
            return answer
        status = process.wait()
        if status == -signal.SIGPROF:
            raise _Died(f"it takes longer than {self._limit_s:g} s")
        raise _Died(f"its process ended with status {status}, perhaps out of memory")

    def _receive(self, stream: IO[bytes], seconds: float) -> bytes | None:
        """Returns the body of one frame, None at the end of the stream. Raises _Died if it is late or too long."""
        head = _read(stream, LENGTH.size, seconds)
        if head is None:
            return None
        (length,) = LENGTH.unpack(head)
        if length > self._most_bytes:
            raise _Died("its process sent an invalid answer")
        return _read(stream, length, seconds)

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _read(stream: IO[bytes], length: int, seconds: float) -> bytes | None:
    """Reads `length` bytes; returns None if the stream ends first. Raises _Died after `seconds` of waiting."""
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    parts: list[bytes] = []
    waited_s = 0.0
    while length:
        if not poller.poll(TICK_S * 1000):
            waited_s += TICK_S
            if waited_s > seconds:
                raise _Died("it does not answer")
            continue
        part = os.read(stream.fileno(), length)
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # from flushing buffered data
                stream.close()
    process.wait()

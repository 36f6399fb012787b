"""Renders chats in a process of their own (see template_process), and gives a template up that breaks its limits.

Blocks for `LIMIT_S` or, where cores are scarce, some more, so it must not be called on the event loop. One chat at a
time: rendering takes a fraction of a millisecond where the template is an honest one.
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
"""Processor time for one chat."""

START_S = 30.0
"""Time for the process to come up, where cores are scarce."""

GRACE_S = 4.0
"""Beyond that, for the process to get so much of a processor, and to end itself."""

TICK_S = 0.1
"""Waiting is counted in these, a gap as one: a pause of this process ends nothing."""

STRIKES = 3
"""A template that broke its limits so often in a row gets no more chances."""

_INHERITED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


class _Died(Exception):
    """The process ended, or did not answer, over a chat; the text says why."""


class TemplateRenderer:
    """A model's chat template. `most_characters`: a longer text than this is refused. Safe to share between threads."""

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

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """The prompt's text; each message has `role` and `content`. Raises ChatTemplateError."""
        frame = {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        with self._lock:
            self._start()
            try:
                answer = self._ask(frame, self._limit_s)
            except _Died as death:
                self._end()
                self._strikes += 1
                if self._strikes == STRIKES:
                    self._unusable = f"the model's chat template broke its limits {STRIKES} times and is not used"
                raise ChatTemplateError(f"the model's chat template can not render these messages: {death}") from None
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
        """Raises TemplateUnusable, from then on always."""
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
        """The process's answer. It ends itself at its limit; it is given up here if it does not even do that."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("the template's process was not started")
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
        raise _Died(f"its process ended with status {status}, for lack of memory perhaps")

    def _receive(self, stream: IO[bytes], seconds: float) -> bytes | None:
        """One frame's body; None at the end of the stream. Raises _Died when it is late or absurdly long."""
        head = _read(stream, LENGTH.size, seconds)
        if head is None:
            return None
        (length,) = LENGTH.unpack(head)
        if length > self._most_bytes:
            raise _Died("its process answers nonsense")
        return _read(stream, length, seconds)

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _read(stream: IO[bytes], length: int, seconds: float) -> bytes | None:
    """That many bytes; None if the stream ends before. Raises _Died when they don't come in so many seconds."""
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
            with contextlib.suppress(BrokenPipeError):  # what was still buffered for it
                stream.close()
    process.wait()

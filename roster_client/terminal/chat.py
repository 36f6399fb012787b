"""`roster chat`: a conversation in the terminal with streamed answers; every message is sent with the history."""

from __future__ import annotations

import sys
from collections.abc import Callable
from secrets import token_hex

from rich.console import Console
from rich.markup import escape

from roster_client.client.errors import InvalidRequestError, OverloadedError
from roster_client.client.events import Delta, Finish, FinishReason
from roster_client.client.requests import Message, Options
from roster_client.client.sync_client import SyncRosterClient
from roster_client.terminal.text import without_controls

HELP = "/clear starts a new conversation, /system TEXT also sets its system message, /exit (or Ctrl-D) exits."


class ChatSession:
    """One conversation: its messages, and the handling of the user's lines."""

    def __init__(self, client: SyncRosterClient, console: Console, options: Options, system: str = "") -> None:
        self._client = client
        self._console = console
        self._options = options
        self._system = system
        self._conversation_id = ""
        self.messages: list[Message] = []
        self.clear()

    def clear(self) -> None:
        """Removes all messages except the system message: a new conversation begins."""
        self._conversation_id = token_hex(8)
        self.messages = [Message("system", self._system)] if self._system else []

    def run(self, read_line: Callable[[], str]) -> None:
        """Reads lines until EOF or /exit. A refused message is reported and removed; other errors end the chat."""
        while True:
            try:
                line = read_line().strip()
            except EOFError:
                return
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._say(line)

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name == "/clear":
            self.clear()
        elif name == "/system":
            self._system = argument.strip()
            self.clear()
        else:
            self._console.print(HELP, style="dim", highlight=False)

    def _say(self, line: str) -> None:
        self.messages.append(Message("user", line))
        try:
            answer = self._stream_answer()
        except (InvalidRequestError, OverloadedError) as error:
            self.messages.pop()
            self._console.print(f"[red]{escape(str(error))}[/]", highlight=False)
            return
        self.messages.append(Message("assistant", answer))

    def _stream_answer(self) -> str:
        """Prints the answer as it arrives and returns it; Ctrl-C stops it, and the part so far is kept."""
        answer, note = "", ""
        options: Options = {"conversation_id": self._conversation_id, **self._options}
        with self._client.chat(self.messages, **options) as stream:
            try:
                for event in stream:
                    if isinstance(event, Delta):
                        answer += event.text
                        sys.stdout.write(without_controls(event.text))
                        sys.stdout.flush()
                    elif isinstance(event, Finish) and event.reason is not FinishReason.STOP:
                        note = f"[ended: {event.reason.name.lower()}{': ' + event.message if event.message else ''}]"
            except KeyboardInterrupt:
                note = "[cut]"
        sys.stdout.write("\n")
        if note:
            self._console.print(escape(note), style="dim", highlight=False)
        return answer

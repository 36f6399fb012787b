"""Texts of single tokens, which OpenAI's log-probabilities have beside each number."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

from roster_client.client.async_client import RosterClient
from roster_client.client.errors import UnavailableError

CALLS = 32
ANCHOR = "a"
PATIENCE_S = 60.0
PAUSE_S = 0.5


class TokenTexts:
    """Asks the server for the texts of tokens and keeps them, special tokens included.

    A tokenizer may drop the space before a text's first token, so each token is decoded behind another one.
    """

    def __init__(self, client: RosterClient) -> None:
        self._client = client
        self._calls = asyncio.Semaphore(CALLS)
        self._texts: dict[int, str] = {}
        self._anchor: tuple[int, str] | None = None

    async def of(self, tokens: Iterable[int]) -> Mapping[int, str]:
        """Returns the texts of these tokens, among others; bytes that are no whole character are U+FFFD.

        Raises RosterError.
        """
        missing = set(tokens) - self._texts.keys()
        if missing and self._anchor is None:
            token = (await self._client.tokenize(ANCHOR))[-1]
            self._anchor = token, await self._detokenize([token])
        await asyncio.gather(*[self._ask(token) for token in missing])
        return self._texts

    async def _ask(self, token: int) -> None:
        assert self._anchor is not None
        before, prefix = self._anchor
        both = await self._detokenize([before, token])
        alone = both.removeprefix(prefix) if both.startswith(prefix) else await self._detokenize([token])
        self._texts[token] = alone

    async def _detokenize(self, ids: list[int]) -> str:
        began = time.monotonic()
        async with self._calls:
            while True:
                try:
                    return await self._client.detokenize(ids, skip_special_tokens=False)
                except UnavailableError:
                    if time.monotonic() - began > PATIENCE_S:
                        raise
                    await asyncio.sleep(PAUSE_S)

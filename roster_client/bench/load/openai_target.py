"""An OpenAI-compatible endpoint under load: streamed completions or chat over aiohttp, chosen for its speed.

Tokens are counted by the server: per message if it sends usage with each (`continuous_usage_stats`, which vLLM supports
and others ignore), otherwise per request by the last message (`include_usage`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from roster_client.bench.load.target import Answer, RequestFailed, Take
from roster_client.bench.load.workload import LoadRequest
from roster_client.bench.records.record import Status

_REFUSALS = (400, 401, 403, 404, 413, 422, 429)
_TIMEOUTS = (408, 504)
_LINE_BYTES = 1 << 20


class OpenAITarget:
    """An endpoint; `base_url` ends in /v1, and `extra_body` is merged into every request."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        chat: bool = False,
        api_key: str = "",
        ignore_eos: bool = True,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._chat = chat
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._extra = {"ignore_eos": True} if ignore_eos else {}
        self._extra |= extra_body or {}
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """URL to which requests are posted."""
        return f"{self._base_url}/{'chat/completions' if self._chat else 'completions'}"

    def prepare(self, request: LoadRequest) -> bytes:
        """Returns the body: greedy, with the wanted `max_tokens`. Token ids are sent as such, if the endpoint can."""
        prompt = request.prompt if isinstance(request.prompt, str) else request.prompt.tolist()
        body = {
            "model": self._model,
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **self._extra,
        }
        body |= {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        return json.dumps(body).encode()

    async def serve(self, prepared: bytes, take: Take) -> Answer:
        """Posts the body and reads its stream to the end. Raises RequestFailed."""
        headers = self._headers | {"Content-Type": "application/json"}
        try:
            async with self._connected.post(self.url, data=prepared, headers=headers) as response:
                if response.status != 200:
                    raise RequestFailed(_status_of(response.status), await _complaint(response))
                return await _read(_events(response), take)
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:  # ValueError, KeyError: no valid chunks
            raise RequestFailed(Status.FAILED, f"{type(error).__name__}: {error}") from None

    @property
    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the target in an `async with`")
        return self._session

    async def __aenter__(self) -> Self:
        # No limit on connections: a client that waits for a free connection is no longer open-loop.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_LINE_BYTES,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connected.close()
        self._session = None


async def served_model(base_url: str, api_key: str = "") -> str:
    """Returns the first model that the endpoint lists. Raises ValueError if it lists none or does not answer."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    url = f"{base_url.rstrip('/')}/models"
    try:
        async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as response:
            models = (await response.json(content_type=None))["data"]
            return str(models[0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{url} does not list its models ({error}): name one with --model") from None


async def _read(events: AsyncIterator[dict[str, Any]], take: Take) -> Answer:
    """Reads a stream of chunks. A message without a count counts as one token; the answer has the server's total."""
    taken = 0
    usage: dict[str, Any] = {}
    async for event in events:
        if error := event.get("error"):
            raise RequestFailed(Status.FAILED, str(error.get("message", error) if isinstance(error, dict) else error))
        usage = event.get("usage") or usage
        if _has_text(event):
            count = int((event.get("usage") or {}).get("completion_tokens") or taken + 1)
            take(max(1, count - taken))
            taken = max(taken + 1, count)
    if not usage:
        raise RequestFailed(Status.FAILED, "the stream ended without usage: its tokens can't be counted")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(int(usage["prompt_tokens"]), int(usage["completion_tokens"]), details.get("cached_tokens"))


def _has_text(event: Mapping[str, Any]) -> bool:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            return True
    return False


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON objects of a stream of server-sent events until [DONE]. Raises ValueError for anything else."""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is not a JSON object: {data[:100]!r}")
        yield event


async def _complaint(response: aiohttp.ClientResponse) -> str:
    return f"HTTP {response.status}: {(await response.text())[:300].strip()}"


def _status_of(code: int) -> Status:
    if code in _REFUSALS:
        return Status.REFUSED
    return Status.TIMEOUT if code in _TIMEOUTS else Status.FAILED

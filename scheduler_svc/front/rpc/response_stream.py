"""Writes one request's output to its client as GenerateResponse messages, for Generate and Attach."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from roster_protos import inference_pb2
from scheduler_svc.front.rpc.pacing import FlushGate
from scheduler_svc.front.stream.request_stream import RequestStream


async def write_responses(
    stream: RequestStream, gate: FlushGate, write: Callable[[inference_pb2.GenerateResponse], Awaitable[None]]
) -> None:
    """Writes messages up to and including the usage. Raises Refusal if the stream fails as a whole.

    However it ends, it disconnects the stream from the engine. While `write` waits for a slow reader, tokens accumulate
    in the stream, bounded by the request's token limit.
    """
    announced = False
    try:
        while True:
            await gate.wait()
            stream.raise_failure()
            response = _next_response(stream, announced)
            if response is None:
                continue
            announced = True
            await write(response)
            if response.HasField("usage"):
                return
    finally:
        stream.disconnect()


def _next_response(stream: RequestStream, announced: bool) -> inference_pb2.GenerateResponse | None:
    """Returns all pending output as one message, None if there is none."""
    response = inference_pb2.GenerateResponse()
    filled = False
    for choice in stream.choices:
        piece = choice.take_piece()
        if piece is not None:
            filled = True
            delta = response.deltas.add(
                index=choice.index, first_index=piece.first_index, token_ids=piece.tokens, text=piece.text
            )
            if choice.logprobs is not None:
                delta.logprobs.CopyFrom(choice.logprobs.take_rows(len(piece.tokens)))
        if choice.finish_pending:
            filled = True
            response.finishes.append(choice.take_finish())
    if not announced:
        if stream.prompt_pending and not filled:
            return None  # the first message carries the prompt
        filled = True
        response.request_id = stream.request_id
        prompt = stream.take_prompt(force=True)
        if prompt is not None:
            response.prompt.CopyFrom(prompt)
    usage = stream.take_usage()
    if usage is not None:
        response.usage.CopyFrom(usage)
    return response if filled or usage is not None else None

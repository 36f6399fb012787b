"""Comparison of two clients: what its proxy records, which requests count, and the resulting rows."""

from __future__ import annotations

import asyncio

import pytest

from bench.client_agreement.clients import Answered
from bench.client_agreement.comparison import BAR, OURS, THEIRS, Side, compared, overlapping
from bench.client_agreement.witness import Seen, Witness

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
PIECES = (HEAD, b'data: {"text":""}\n', b'data: {"te', b'xt":"a"}\n', b'data: {"text":"b"}\n', b'data: {"usage":1}\n')


def answered(ttft_s: float, itl_s: float, began_s: float = 0.0) -> Answered:
    return Answered(ttft_s, itl_s, 32, began_s)


def seen(start_s: float, ttft_s: float = 0.1) -> Seen:
    return Seen(start_s, [start_s + ttft_s])


async def test_the_witness_forwards_and_notes_when_text_passed() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            for piece in PIECES:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.05)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Witness(server.sockets[0].getsockname()[1]) as witness:
        port = int(witness.url.removesuffix("/v1").rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in (1, 2):
            writer.write(b"POST /v1/completions\n")
            assert await asyncio.wait_for(reader.readexactly(sum(map(len, PIECES))), 20) == b"".join(PIECES)
            assert len(witness.seen) == number and witness.began.is_set()
        writer.close()
        for one in witness.seen:
            assert len(one.text_s) == 2, "neither the empty text nor the usage"
            assert 0.14 < one.ttft_s <= one.text_s[1] - one.start_s, "the text that arrived in two pieces"


def test_requests_count_that_began_while_both_were_sending() -> None:
    ours = [answered(0.1, 0.02, began) for began in (2.0, 0.0, 1.0)]
    theirs = [answered(0.2, 0.03, 1000 + began) for began in (0.5, 1.5, 2.5)]
    late = [*map(seen, (1000.5, 1001.5, 1002.5)), Seen(1003.0)]
    sides = overlapping(ours, [*map(seen, (1000.0, 1001.0, 1002.0))], theirs, late)
    assert [one.start_s for one in sides[OURS].seen] == [1001.0, 1002.0]
    assert [one.began_s for one in sides[OURS].answered] == [1.0, 2.0], "the same requests"
    assert sides[THEIRS].counts == {"requests": 2, "output_tokens": 64}
    with pytest.raises(ValueError, match="never sent at the same time"):
        overlapping(ours, [*map(seen, (0.0, 1.0, 2.0))], theirs, late)
    with pytest.raises(ValueError, match="the witness saw 2 requests"):
        overlapping(ours, late[:2], theirs, late)


def test_means_and_medians_of_the_clients_are_judged() -> None:
    here = Side([answered(ttft_s, 0.020) for ttft_s in (0.1, 0.1, 0.4)], [seen(0.0, 0.09)] * 3)
    there = Side([answered(ttft_s, 0.023) for ttft_s in (0.105, 0.105, 0.42)], [seen(0.0, 0.085)] * 3)
    rows = {row["measure"]: row for row in compared({OURS: here, THEIRS: there})}
    assert rows["TTFT mean"]["ours_ms"] == 200.0
    assert rows["TTFT p50"]["difference"] == pytest.approx(0.05)
    assert rows["ITL p50"]["difference"] == pytest.approx(0.15) and rows["ITL p50"]["difference"] > BAR
    assert rows["TTFT above the wire p50"]["ours_ms"] == 10.0
    assert rows["TTFT above the wire p50"]["guidellm_ms"] == 20.0
    judged = [name for name, row in rows.items() if row["judged"]]
    assert judged == ["TTFT mean", "TTFT p50", "ITL mean", "ITL p50"]

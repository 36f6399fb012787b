"""The lines of a batch's files: broken requests, ids that occur twice, and output that a crash cut short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roster_client.batch.input_file import BrokenLine, Line, count_lines, read_lines
from roster_client.batch.output_file import OutputFile
from roster_client.batch.records import answered, broken, error_message, refused

BODY: dict[str, Any] = {"model": "m", "prompt": "x"}


def line(custom_id: object = "a", **changes: object) -> str:
    value = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": BODY, **changes}
    return json.dumps({name: part for name, part in value.items() if part is not None})


def read(path: Path, *lines: str | bytes) -> list[Line | BrokenLine]:
    path.write_bytes(b"\n".join(part.encode() if isinstance(part, str) else part for part in lines))
    return list(read_lines(path))


def test_lines_are_requests_with_their_numbers(tmp_path: Path) -> None:
    lines = read(tmp_path / "in", "\ufeff" + line("a"), "", line("b", url="/v1/chat/completions"), "  ")
    assert lines == [Line(1, "a", "/v1/completions", BODY), Line(3, "b", "/v1/chat/completions", BODY)]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("{", "invalid_json_line", "not JSON"),
        (b"\xff", "invalid_json_line", "not UTF-8"),
        ("[" * 100_000, "invalid_json_line", "nested too deep"),
        ('{"custom_id": NaN}', "invalid_json_line", "NaN"),
        ("[]", "invalid_request", "custom_id, method, url, body"),
        (line(None), "invalid_custom_id", "custom_id"),
        (line(7), "invalid_custom_id", "custom_id"),
        (line("\ud800"), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "'GET'"),
        (line(url="/v1/embeddings"), "invalid_url", "/v1/chat/completions or /v1/completions"),
        (line(body=[]), "invalid_body", "body"),
        (line(priority=1), "invalid_request", "'priority'"),
    ],
)
def test_a_broken_line_has_a_record_with_its_number(tmp_path: Path, text: str | bytes, code: str, message: str) -> None:
    good, bad, other = read(tmp_path / "in", line("good"), text, line("other"))
    assert isinstance(good, Line) and isinstance(other, Line) and isinstance(bad, BrokenLine)
    error = bad.record["error"]
    assert (error["code"], error["line"]) == (code, 2) and message in error["message"], error
    assert json.loads(json.dumps(bad.record)) == bad.record and bad.record["response"] is None
    assert "line 2: " in str(error_message(bad.record))


def test_an_id_that_occurs_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "in"
    read(path, line("a"), "{", line("b"), line("a", method="GET"))
    with pytest.raises(ValueError, match="lines 1 and 4 have the same custom_id 'a'"):
        count_lines(path)
    read(path, line("a"), "{", "{", line("b"))
    assert count_lines(path) == 4


def test_output_is_resumed_and_a_line_cut_short_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "out"
    first, last = answered("a", "id", {"x": "é\x85\u2028\u2029\x1c"}), refused("b", 400, "no", "n")
    with OutputFile(path) as output:
        for record in (first, broken(3, "invalid_json_line", "no"), last):
            output.write(record)
        assert output.failed == 2
        with pytest.raises(ValueError, match="another `roster batch`"):
            OutputFile(path)
    whole = path.read_bytes()
    assert json.loads(whole.decode().splitlines()[0]) == first and len(whole.decode().splitlines()) == 3
    for cut in (1, 2, 30, len(json.dumps(last)) - 1, len(json.dumps(last)), len(json.dumps(last)) + 1):
        path.write_bytes(whole[:-cut])
        with OutputFile(path) as output:
            assert output.has(Line(1, "a", "", {})) and output.has(BrokenLine(3, None, {}))
            assert not output.has(Line(9, "c", "", {})) and not output.has(BrokenLine(4, None, {}))
            if not output.has(Line(2, "b", "", {})):
                output.write(last)
        assert path.read_bytes() == whole


@pytest.mark.parametrize("content", ["# a page\n", '{"some": "json"}\n', "no newline", '{"id": 1}\n', "[]\n", "\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out"
    path.write_text(content)
    with pytest.raises(ValueError, match="other content: line 1"):
        OutputFile(path)
    assert path.read_text() == content

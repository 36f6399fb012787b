"""Pictures, read back from the SVG: panels, words, and one colour per request in all panels."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from roster_client.timeline.labels import labels_of
from roster_client.timeline.picture import Across, PictureUnavailable, check_picture, draw
from roster_client.timeline.recording import Recording
from tests.support.recordings import drawn

pytest.importorskip("matplotlib")

FCFS = drawn("fcfs", *["AB"] + ["ab"] * 20 + ["aC"] + ["ac"] * 20, waiting=1, a="Why is it so?", b="So?", c="Oh?")
STATIC = drawn("static", *["AB"] + ["ab"] * 20 + ["a."] * 20 + ["C."] + ["c."] * 20, waiting=1, a="Why is it so?")


def svg(path: Path, *recordings: object, **how: object) -> str:
    draw(path, recordings, **how)  # type: ignore[arg-type]
    return path.read_text()


def test_two_panels_with_words_and_shares(tmp_path: Path) -> None:
    text = svg(tmp_path / "t.svg", FCFS, STATIC, title="Three requests")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    for word in ("Three requests", "fcfs", "static", "slot 0", "queue", "1 wait", "empty", "a  Why is it so?"):
        assert word in words, words
    assert "42 steps · empty slots: 0%, while requests wait: 0%" in words
    assert "62 steps · empty slots: 33%, while requests wait: 33%" in words
    assert words.count("empty") == 1, "one long white stretch"
    assert svg(tmp_path / "again.svg", FCFS, STATIC, title="Three requests") == text, "the same file every time"


def test_a_request_has_one_colour_in_all_panels(tmp_path: Path) -> None:
    fills = [
        set(re.findall(r"fill: (#[0-9a-f]{6})", svg(tmp_path / f"{name}.svg", *runs)))
        for name, runs in (("one", [FCFS]), ("both", [FCFS, STATIC]))
    ]
    assert fills[1] - fills[0] == {"#999999"}, "the only new colour is that of the word 'empty'"
    other = drawn("other", "d" * 2)
    assert set(re.findall(r"fill: (#[0-9a-f]{6})", svg(tmp_path / "o.svg", FCFS, other))) - fills[0], "grey"


@pytest.mark.parametrize("across", list(Across))
def test_policy_changes_many_requests_and_many_slots(tmp_path: Path, across: Across) -> None:
    marks = "abcdefghijklmnopqrstuvwxyz" * 2
    run = drawn("live", marks.upper(), *[marks] * 5)
    run.steps[3:] = [step.__class__(**{**_fields(step), "policy": "fair"}) for step in run.steps[3:]]
    text = svg(tmp_path / "t.svg", run, across=across)
    assert "> fair</text>" in text
    assert "dark: prefill of the prompt" in text and ">a  </text>" not in text, "too many to name"
    assert ("seconds" in text) is (across is Across.TIME)


def _fields(step: object) -> dict[str, object]:
    return {name: getattr(step, name) for name in type(step).__slots__}  # type: ignore[attr-defined]


def renamed(recording: Recording, ids: dict[str, str]) -> Recording:
    """Returns the recording with other request ids and without labels."""
    steps = [
        replace(step, rows=tuple(replace(row, request=ids[row.request]) for row in step.rows))
        for step in recording.steps
    ]
    return Recording(recording.title, {}, steps)


def test_random_ids_become_numbers_and_the_legend_has_the_ids(tmp_path: Path) -> None:
    ids = {"a": "f3" * 16, "b": "0e" * 16, "c": "f3" * 16 + "/1"}
    words = re.findall(r"<text[^>]*>([^<]*)</text>", svg(tmp_path / "t.svg", renamed(FCFS, ids)))
    assert {"#1", "#2", "#1/1"} <= set(words) and "f3f3f3f3" not in words
    assert f"#2  {'0e' * 16}" in words
    assert labels_of(["7", "12", "long-0"]) == {"7": "#7", "12": "#12", "long-0": "long-0"}


def test_numbers_of_a_short_queue_do_not_overlap(tmp_path: Path) -> None:
    steps = [replace(step, waiting=index // 4 % 2 + 1) for index, step in enumerate(FCFS.steps * 4)]
    words = re.findall(r"<text[^>]*>([^<]*)</text>", svg(tmp_path / "t.svg", Recording("queue", {}, steps)))
    assert "1 wait" not in words and "2" in words, "four of 168 steps have no room for words"


def test_a_page_has_a_tooltip_on_each_bar_and_the_ids(tmp_path: Path) -> None:
    ids = {"a": "f3" * 16, "b": "<b>" * 4, "c": "0c" * 16}
    page = svg(tmp_path / "t.html", renamed(FCFS, ids), title="A & B")
    assert page.startswith("<!doctype html>") and "<h1>A &amp; B</h1>" in page and page.count("<svg") == 1
    tips = re.findall(r'<g id="bar-\d+"><title>([^<]*)</title>', page)
    assert len(tips) == page.count('<g id="bar-') == 6
    assert tips[0] == f"#1, {'f3' * 16}: prefill of 10 positions, step 0, 500.0 ms"
    assert tips[1].startswith("#1, ") and "decode of 41 positions, steps 1 to 41" in tips[1]
    assert "<td>&lt;b&gt;" in page and "<script" not in page


def test_png_and_refused_formats(tmp_path: Path) -> None:
    path = tmp_path / "t.png"
    check_picture(path)
    draw(path, [FCFS])
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(PictureUnavailable, match=r"must end in \.svg, \.html, \.png, \.pdf"):
        check_picture(tmp_path / "t.gif")

"""Pictures, read back from the SVG: panels, words, and one colour per request in all panels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roster_client.timeline.picture import Across, PictureUnavailable, check_picture, draw
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


def test_png_and_refused_formats(tmp_path: Path) -> None:
    path = tmp_path / "t.png"
    check_picture(path)
    draw(path, [FCFS])
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(PictureUnavailable, match=r"must end in \.svg, \.png, \.pdf"):
        check_picture(tmp_path / "t.gif")

"""The roster as a picture: slots down, steps or seconds across, a colour per request, prefill darker than decode.

White areas within a lane are empty slots. Recordings are stacked panels with a common horizontal scale, and a request
has the same colour in all of them. Requires the extra `plot`.
"""

from __future__ import annotations

import colorsys
import io
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from roster_client.timeline.html_page import BAR, timeline_page
from roster_client.timeline.labels import labels_of
from roster_client.timeline.lanes import Lane, Span, lanes_of, num_columns, occupancy, request_order
from roster_client.timeline.recording import Recording, RowKind

FORMATS = (".svg", ".html", ".png", ".pdf")
WIDTH_IN = 12.0
MOST_IN_LEGEND = 12
"""Maximum number of requests of a legend; the colours of more would be too similar."""
LEGEND_COLUMNS = 4
CHARACTER_SHARE = 0.0068
"""Share of the picture's width that a character takes; a word needs one and a half more for its margins."""
_HUES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377", "#66CCEE", "#EE8833", "#887766")
_OTHERS = "#BBBBBB"
_INK = "#333333"


class Across(StrEnum):
    """Unit of a picture's horizontal axis."""

    STEPS = "steps"
    TIME = "time"


class PictureUnavailable(ValueError):
    """matplotlib is missing, or the file's format is not supported."""


def check_picture(path: Path) -> None:
    """Raises PictureUnavailable if no picture can be written to `path`; to be called before recording."""
    if path.suffix not in FORMATS:
        raise PictureUnavailable(f"{path}: a picture's file must end in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PictureUnavailable(
            "pictures need matplotlib: install it with `pip install 'roster-serve[plot]'`, or use --trace instead"
        ) from None


def draw(path: Path, recordings: Sequence[Recording], across: Across = Across.STEPS, title: str = "") -> None:
    """Writes the picture. Call `check_picture` first."""
    import matplotlib
    from matplotlib.figure import Figure

    colours = _colours(recordings)
    labels = labels_of(list(colours))
    lanes = [lanes_of(recording) for recording in recordings]
    lane_in = min(0.42, max(0.08, 7.0 / max(1, sum(map(len, lanes)))))
    heights = [(len(panel) + 1) * lane_in + 0.75 for panel in lanes]
    height = sum(heights) + _legend_in(recordings) + (1.2 if title else 0.8)
    figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
    panels = figure.subplots(len(recordings), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    width = max(_extent(recording, across) for recording in recordings)
    bars: list[Span] = []
    for axes, recording, panel in zip(panels, recordings, lanes, strict=True):
        _Panel(axes, recording, across, colours, labels, width, bars).draw(panel)
    panels[-1].set_xlabel("step: one forward pass of the model" if across is Across.STEPS else "seconds", color=_INK)
    if title and path.suffix != ".html":  # the page has a heading
        figure.suptitle(title, fontsize=14, fontweight="bold", color=_INK)
    _legend(figure, recordings, colours, labels)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "roster"}):
        if path.suffix != ".html":
            figure.savefig(path, dpi=120, facecolor="white", metadata=_METADATA.get(path.suffix, {}))
            return
        text = io.StringIO()
        figure.savefig(text, format="svg", facecolor="white", metadata=_METADATA[".svg"])
    path.write_text(timeline_page(title, text.getvalue(), recordings, bars, labels), encoding="utf-8")


_METADATA: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""Omits the time of writing, so that the same recording gives the same file."""


@dataclass(slots=True)
class _Panel:
    axes: Any
    recording: Recording
    across: Across
    colours: dict[str, str]
    labels: dict[str, str]
    width: float
    bars: list[Span]
    """The bars drawn so far, by their number in the picture."""

    def draw(self, lanes: Sequence[Lane]) -> None:
        """Draws the lanes from top to bottom."""
        extent = _extent(self.recording, self.across)
        self.axes.broken_barh([(0, extent)], (-0.5, len(lanes)), facecolor="#F7F7F7", zorder=0)
        for row, lane in enumerate(lanes):
            self.axes.broken_barh([(0, extent)], (row - 0.42, 0.84), facecolor="white", edgecolor="#CCCCCC", lw=0.7)
            for span in lane.spans:
                self._bar(row, span)
            self._words(row, lane, extent)
        if extent < 0.9 * self.width:
            middle = (len(lanes) - 1) / 2
            style: dict[str, Any] = {"fontstyle": "italic", "fontsize": 11, "color": _INK}
            beside = {"xytext": (8, 0), "textcoords": "offset points"}
            self.axes.annotate("all done", (extent, middle), **beside, va="center", **style)
        self._waiting(len(lanes))
        self._changes_of_policy(len(lanes))
        self._frame(lanes)

    def _bar(self, row: int, span: Span) -> None:
        begin, end = self._reach(span)
        colour = self.colours[span.request]
        face = _shade(colour, 0.55) if span.kind is RowKind.PREFILL else _tint(colour, 0.35)
        bar = self.axes.broken_barh([(begin, end - begin)], (row - 0.42, 0.84), facecolor=face, lw=0, zorder=2)
        bar.set_gid(f"{BAR}{len(self.bars)}")
        self.bars.append(span)

    def _words(self, row: int, lane: Lane, extent: float) -> None:
        """Writes a request's name into its longest bar, and "empty" into long empty stretches."""
        if len(lane.spans) and self.width:
            for request in {span.request for span in lane.spans}:
                bar = max((span for span in lane.spans if span.request == request), key=lambda s: s.last - s.first)
                begin, end = self._reach(bar)
                name = self.labels[request]
                if self._fits(name, begin, end):
                    self._word(row, (begin + end) / 2, name, color="#111111", fontweight="bold", fontsize=9)
        edges = [0.0] + [edge for span in lane.spans for edge in self._reach(span)] + [extent]
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            if self._fits("empty", begin, end):
                self._word(row, (begin + end) / 2, "empty", color="#999999", fontstyle="italic", fontsize=8)

    def _fits(self, word: str, begin: float, end: float) -> bool:
        return end - begin > (len(word) + 1.5) * CHARACTER_SHARE * self.width

    def _word(self, row: float, place: float, word: str, **style: Any) -> None:
        self.axes.text(place, row, word, ha="center", va="center", zorder=4, clip_on=True, **style)

    def _waiting(self, row: int) -> None:
        """Draws the number of waiting sequences below the lanes, as a strip's height and as text if there is room."""
        counts = [(self._place(index), step.waiting) for index, step in enumerate(self.recording.steps)]
        most = max(count for _, count in counts) or 1
        begin, count = counts[0]
        for place, following in [*counts[1:], (_extent(self.recording, self.across), -1)]:
            if following == count:
                continue
            height = 0.8 * count / most
            self.axes.broken_barh([(begin, place - begin)], (row + 0.4 - height, height), facecolor="#DDDDDD", lw=0)
            words = (word for word in (f"{count} wait", str(count)) if count and self._fits(word, begin, place))
            if word := next(words, ""):
                self._word(row + 0.22, (begin + place) / 2, word, color="#555555", fontsize=8)
            begin, count = place, following

    def _place(self, index: int) -> float:
        """Returns the begin of a step on the axis."""
        steps = self.recording.steps
        return index if self.across is Across.STEPS else steps[index].begin_s - _begin_s(self.recording)

    def _changes_of_policy(self, num_lanes: int) -> None:
        steps = self.recording.steps
        for index in range(1, len(steps)):
            if steps[index].policy != steps[index - 1].policy:
                place = self._place(index)
                self.axes.plot([place, place], [-0.5, num_lanes - 0.5], color=_INK, lw=1, ls="--", zorder=3)
                self.axes.text(place, -0.55, f" {steps[index].policy}", fontsize=8, color=_INK, va="bottom")

    def _frame(self, lanes: Sequence[Lane]) -> None:
        axes, filled = self.axes, occupancy(self.recording.steps)
        axes.set(xlim=(0, self.width), ylim=(len(lanes) + 0.5, -0.5))
        several = len({lane.runner for lane in lanes}) > 1
        if len(lanes) <= 32:
            names = [f"{lane.runner} " * several + f"slot {lane.slot}" for lane in lanes]
            axes.set_yticks(range(len(lanes) + 1), [*names, "queue"], fontsize=9, color=_INK)
        else:
            axes.set_ylabel("slots", color=_INK)
        axes.tick_params(length=0, colors=_INK)
        for spine in axes.spines.values():
            spine.set_visible(False)
        took = f"{num_columns(self.recording)} steps"
        if self.across is Across.TIME:
            took += f" in {_extent(self.recording, self.across):.1f} s"
        axes.set_title(self.recording.title, loc="left", fontsize=12, fontweight="bold", color=_INK)
        axes.set_title(
            f"{took} · empty slots: {filled.empty_share:.0%}, while requests wait: {filled.wasted_share:.0%}",
            loc="right",
            fontsize=10,
            color=_INK,
        )

    def _reach(self, span: Span) -> tuple[float, float]:
        if self.across is Across.STEPS:
            return span.first, span.last + 1
        begin_s = _begin_s(self.recording)
        return span.begin_s - begin_s, span.end_s - begin_s


def _legend(figure: Any, recordings: Sequence[Recording], colours: dict[str, str], labels: dict[str, str]) -> None:
    """Draws the legend of the shades and, for up to MOST_IN_LEGEND requests, of the colours."""
    from matplotlib.patches import Patch

    words = {request: word for recording in recordings for request, word in recording.requests.items()}
    named = list(words) or list(colours)

    def told(request: str) -> str:
        """Returns what the label doesn't say: the prompt, or the id."""
        return words.get(request, "" if request in (labels[request], labels[request][1:]) else request)

    rows = (row for recording in recordings for step in recording.steps for row in step.rows)
    decoded = "one token per step and accepted drafts" if any(row.drafted for row in rows) else "one token per step"
    handles = [
        Patch(facecolor=_shade(_OTHERS, 0.45), label="dark: prefill of the prompt"),
        Patch(facecolor=_tint(_OTHERS, 0.35), label=f"light: decode, {decoded}"),
        Patch(facecolor="white", edgecolor="#CCCCCC", label="white: empty slot"),
    ]
    if len(named) <= MOST_IN_LEGEND:
        handles += [
            Patch(facecolor=_tint(colours[request], 0.2), label=f"{labels[request]}  {_clip(told(request))}".rstrip())
            for request in named
        ]
    others = [request for request in colours if request not in named]
    if others:
        handles.append(Patch(facecolor=_tint(_OTHERS, 0.2), label=f"grey: {_clip(', '.join(others))}"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=LEGEND_COLUMNS,
        frameon=False,
        fontsize=8.5,
        labelcolor=_INK,
        columnspacing=1.5,
    )


def _legend_in(recordings: Sequence[Recording]) -> float:
    """Returns the height of the legend, in inches."""
    named = {request for recording in recordings for request in recording.requests}
    return -(-(4 + min(MOST_IN_LEGEND, len(named))) // LEGEND_COLUMNS) * 0.2


def _colours(recordings: Sequence[Recording]) -> dict[str, str]:
    """Returns each request's colour; if headers name requests, all others are grey."""
    named = {request for recording in recordings for request in recording.requests}
    colours, count = {}, 0
    for request in request_order(recordings):
        if named and request not in named:
            colours[request] = _OTHERS
        else:
            colours[request] = _hue(count)
            count += 1
    return colours


def _hue(index: int) -> str:
    """Returns one of eight colours that colour-blind people can distinguish, then hues spread between them."""
    if index < len(_HUES):
        return _HUES[index]
    return _hex(colorsys.hls_to_rgb(index * 0.618034 % 1.0, 0.5, 0.55))


def _tint(colour: str, share: float) -> str:
    """Returns the colour mixed with white by `share`, 0 to 1."""
    return _hex(tuple(part + (1 - part) * share for part in _rgb(colour)))


def _shade(colour: str, share: float) -> str:
    """Returns the colour mixed with black by `share`, 0 to 1."""
    return _hex(tuple(part * (1 - share) for part in _rgb(colour)))


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))


def _hex(parts: tuple[float, ...]) -> str:
    return "#" + "".join(f"{round(part * 255):02X}" for part in parts)


def _begin_s(recording: Recording) -> float:
    return min(step.begin_s for step in recording.steps)


def _extent(recording: Recording, across: Across) -> float:
    if across is Across.STEPS:
        return num_columns(recording)
    return max(step.end_s for step in recording.steps) - _begin_s(recording)


def _clip(words: str, most: int = 33) -> str:
    words = " ".join(words.split())
    return words if len(words) <= most else words[: most - 1] + "…"

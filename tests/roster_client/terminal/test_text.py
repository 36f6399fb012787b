from __future__ import annotations

from roster_client.terminal.text import one_line, without_controls


def test_control_characters_do_not_reach_the_terminal() -> None:
    everything = "".join(map(chr, range(0x500))) + "👩‍👧 漢字"
    shown = without_controls(everything)
    assert len(shown) == len(everything)
    for before, after in zip(everything, shown, strict=True):
        is_control = ord(before) < 0x20 or 0x7F <= ord(before) < 0xA0
        assert after == ("\ufffd" if is_control and before not in "\n\t" else before)
    assert without_controls("a\ud800\udcffb") == "a\ufffd\ufffdb"
    assert one_line("a\n\n b\t\x1b[31mred") == "a b \ufffd[31mred"

"""Whose blocks are whose: conversations that go on, part, share a beginning, or have no id."""

from __future__ import annotations

import pytest

from scheduler_svc.kv.prefix_tree import MOST_CONVERSATIONS, PrefixTree, Turn


def names(text: str) -> list[bytes]:
    """Returns a name per character: the text up to it."""
    return [text[: end + 1].encode() for end in range(len(text))]


class Cache:
    """A tree whose pool keeps everything."""

    def __init__(self) -> None:
        self.tree = PrefixTree(16)

    def end(
        self, text: str, conversation: str = "", arrival_s: float = 0.0, end_s: float = 0.0, **more: object
    ) -> None:
        turn = Turn(str(more.pop("tenant", "")), conversation, arrival_s, end_s, bool(more.pop("ended", True)), **more)  # type: ignore[arg-type]
        self.tree.link(names(text), turn, names(text))
        for name in reversed(names(text)):
            self.tree.came(name, 0)

    def owner(self, text: str) -> str:
        prefix = self.tree.nodes[text.encode()].prefix
        return "shared" if prefix.shared else "left" if prefix is self.tree.left else prefix.conversation


def test_a_turn_extends_its_conversation_and_its_gap_is_learned() -> None:
    cache = Cache()
    cache.end("abc", "x", 0.0, 2.0)
    cache.end("abcde", "x", 5.0, 6.0, retain_s=9.0, next_turn_s=4.0)
    prefix = cache.tree.find("", "x")
    assert prefix is not None and (prefix.turns, prefix.tokens) == (2, 80)
    assert (prefix.ended_at, prefix.retain_s, prefix.next_turn_s) == (6.0, 9.0, 4.0)
    assert prefix.gaps.count == cache.tree.gaps.count == 1 and prefix.gaps.mean == pytest.approx(1.0986, abs=1e-4)
    assert cache.tree.names(prefix) == names("abcde")[::-1]
    assert (prefix.tenant.first.returned, prefix.tenant.first.ended, prefix.tenant.later.ended) == (1, 1, 1)


def test_a_conversation_without_an_id_is_known_by_what_it_extends() -> None:
    cache = Cache()
    cache.end("abc", "", 0.0, 1.0)
    cache.end("abcde", "", 3.0, 4.0)
    prefix = cache.tree.nodes[b"abcde"].prefix
    assert prefix is cache.tree.nodes[b"a"].prefix and prefix.turns == 2 and not prefix.shared
    cache.end("abx", "", 5.0, 6.0)  # another one with the same beginning
    assert [cache.owner(text) for text in ("a", "ab", "abc")] == ["shared", "shared", ""]


def test_what_two_conversations_begin_with_is_shared() -> None:
    cache = Cache()
    cache.end("sssab", "x", 0.0, 1.0)
    cache.end("ssscd", "y", 4.0, 5.0)
    cache.end("ssscdef", "y", 6.0, 7.0)
    cache.end("sse", "z", 9.0, 9.5)
    assert [cache.owner(text) for text in ("s", "sss", "sssa", "sssab", "sssc", "ssscdef", "sse")] == [
        "shared", "shared", "x", "x", "y", "y", "z",
    ]  # fmt: skip
    shared = cache.tree.nodes[b"sss"].prefix
    assert (shared.users, shared.tokens, shared.turns) == (3, 48, 4)
    assert shared.gaps.count == cache.tree.shared_gaps.count == 3
    x, y = cache.tree.find("", "x"), cache.tree.find("", "y")
    assert x is not None and y is not None and x.base is y.base is shared
    assert cache.tree.names(y, own=True) == [b"ssscdef", b"ssscde", b"ssscd", b"sssc"]


def test_blocks_that_a_conversation_has_left_are_worth_nothing() -> None:
    cache = Cache()
    cache.end("abcdef", "x", 0.0, 1.0)
    cache.end("abcxy", "x", 2.0, 3.0)
    assert [cache.owner(text) for text in ("abc", "abcd", "abcdef", "abcxy")] == ["x", "left", "left", "x"]
    cache.end("abcdefg", "y", 4.0, 5.0)  # and another one takes them up
    assert [cache.owner(text) for text in ("abc", "abcdef", "abcdefg")] == ["x", "shared", "y"]


def test_a_preempted_sequence_is_no_end() -> None:
    cache = Cache()
    cache.end("abc", "x", 0.0, 1.0, ended=False)
    prefix = cache.tree.find("", "x")
    assert prefix is not None and (prefix.turns, prefix.tokens, prefix.ended_at) == (0, 48, 0.0)
    assert prefix.tenant.first.ended == 0


def test_gaps_of_conversations_whose_blocks_are_gone_count_too() -> None:
    cache = Cache()
    cache.end("abc", "x", 0.0, 1.0)
    for name in reversed(names("abc")):
        cache.tree.went(name, 0)
    prefix = cache.tree.find("", "x")
    assert cache.tree.nodes == {} and prefix is not None and prefix.tail is None and cache.tree.names(prefix) == []
    cache.end("abcd", "x", 8.0, 9.0)
    assert prefix.gaps.count == 1 and prefix.turns == 2 and cache.tree.names(prefix) == names("abcd")[::-1]


def test_tenants_are_told_apart() -> None:
    cache = Cache()
    cache.end("abc", "x", tenant="t")
    cache.end("dex", "x", tenant="u")
    assert cache.tree.tenant("t").blocks == [3, 0] and cache.tree.num_tenants(0) == 2
    assert cache.tree.find("t", "x") is not cache.tree.find("u", "x")
    for name in reversed(names("dex")):
        cache.tree.went(name, 0)
    assert cache.tree.num_tenants(0) == 1


def test_a_node_lives_as_long_as_any_tier_has_it() -> None:
    cache = Cache()
    cache.end("ab", "x")
    cache.tree.came(b"ab", 1)
    cache.tree.went(b"ab", 0)
    assert b"ab" in cache.tree.nodes and cache.tree.tenant("").blocks == [1, 1]
    cache.tree.went(b"ab", 1)
    assert set(cache.tree.nodes) == {b"a"} and cache.tree.tenant("").blocks == [1, 0]


def test_conversations_are_remembered_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_CONVERSATIONS > 1000
    monkeypatch.setattr("scheduler_svc.kv.prefix_tree.MOST_CONVERSATIONS", 2)
    cache = Cache()
    for text in ("ax", "bx", "axy", "cx"):
        cache.end(text, text[0])
    assert cache.tree.find("", "b") is None
    assert cache.tree.find("", "a") is not None and cache.tree.find("", "c") is not None

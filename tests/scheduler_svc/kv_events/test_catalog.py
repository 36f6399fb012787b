"""The catalog: the union of several caches, published in runs with parents first."""

from __future__ import annotations

from roster_protos import engine_pb2
from scheduler_svc.kv_events.catalog import CachedBlock, Catalog
from tests.support.kv_follower import told


def block(name: int, parent: int = 0) -> CachedBlock:
    """Returns a block of two tokens; with parent 0, the first of its sequence."""
    return CachedBlock(named(name), named(parent) if parent else b"", bytes([name, 0, 0, 0, name, 1, 0, 0]))


def named(name: int) -> bytes:
    return name.to_bytes(16, "little")


def numbers(column: bytes) -> list[int]:
    return [told(column[at : at + 8]) for at in range(0, len(column), 8)]


def runs(changes: list[engine_pb2.KvChange]) -> list[tuple[str, list[int]]]:
    """Returns the kind and the blocks of each change."""
    return [(str(change.WhichOneof("change")), numbers(change.stored.names or change.removed)) for change in changes]


def test_a_block_is_cached_as_long_as_some_runner_has_it() -> None:
    catalog = Catalog()
    catalog.store(block(1))
    catalog.store(block(1))
    catalog.store(block(2, parent=1))
    assert runs(catalog.take_changes()) == [("stored", [1, 2])]
    catalog.remove(named(1))
    assert catalog.take_changes() == [] and len(catalog) == 2
    catalog.remove(named(1))
    assert runs(catalog.take_changes()) == [("removed", [1])]


def test_runs_of_one_prefix_are_one_change_with_their_parent() -> None:
    catalog = Catalog()
    for change in (block(1), block(2, 1), block(7), block(8, 7), block(3, 2)):
        catalog.store(change)
    first, second, third = catalog.take_changes()
    assert runs([first, second, third]) == [("stored", [1, 2]), ("stored", [7, 8]), ("stored", [3])]
    assert not first.stored.HasField("parent") and third.stored.parent == 2
    assert first.stored.tokens == block(1).tokens + block(2).tokens


def test_order_is_kept_within_a_turn() -> None:
    catalog = Catalog()
    catalog.store(block(1))
    catalog.take_changes()
    catalog.store(block(2))
    catalog.remove(named(1))
    catalog.remove(named(2))
    catalog.store(block(1))
    assert runs(catalog.take_changes()) == [("stored", [2]), ("removed", [1, 2]), ("stored", [1])]


def test_an_emptied_cache_is_published_as_cleared() -> None:
    catalog = Catalog()
    for name in (1, 2, 3):
        catalog.store(block(name))
    catalog.take_changes()
    for name in (3, 2, 1):
        catalog.remove(named(name))
    assert runs(catalog.take_changes()) == [("cleared", [])]
    assert catalog.take_changes() == []


def test_a_snapshot_holds_all_blocks_and_names_first_ones_their_own_parents() -> None:
    catalog = Catalog()
    for change in (block(1), block(2, 1), block(3, 2)):
        catalog.store(change)
    catalog.remove(named(2))
    snapshot = catalog.snapshot()
    assert (numbers(snapshot.names), numbers(snapshot.parents)) == ([1, 3], [1, 2])
    assert snapshot.tokens == block(1).tokens + block(3).tokens
    assert not Catalog().snapshot().names


def test_names_may_be_negative() -> None:
    catalog = Catalog()
    catalog.store(CachedBlock(b"\xff" * 16, b"", b"\0" * 8))
    catalog.store(CachedBlock(b"\xfe" * 16, b"\xff" * 16, b"\0" * 8))
    catalog.remove(b"\xff" * 16)
    (stored, removed) = catalog.take_changes()
    assert numbers(stored.stored.names) == [-1, told(b"\xfe" * 16)] and numbers(removed.removed) == [-1]

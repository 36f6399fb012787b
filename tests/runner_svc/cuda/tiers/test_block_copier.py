"""The GPU's copier on a device whose streams do their work later, in any order that the copier's events allow."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from runner_svc.cuda.tiers import block_copier
from runner_svc.cuda.tiers.block_copier import BlockCopier, HostPool
from runner_svc.tiers.block_copies import Region
from runner_svc.tiers.kv_copier import Direction, DoneTicket, Tickets
from tests.support.host_blocks import HostBlockCopies, LazyBlockCopies, LazyDevice, LazyStream
from tests.support.thoroughness import count

NUM_BLOCKS, NUM_HOST_BLOCKS, PARTS = 40, 30, 6


class Setup:
    """A cache of two regions, what its blocks are to hold, and a copier of places for three blocks."""

    def __init__(self, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = rng
        self.device = LazyDevice(rng)
        shapes = [(PARTS, NUM_BLOCKS + 1, 48), (1, NUM_BLOCKS + 1, 16)]
        self.cache = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in shapes]
        regions = [Region.of(each, NUM_BLOCKS + 1) for each in self.cache]
        size = sum(region.block_bytes for region in regions)
        monkeypatch.setattr(block_copier, "CHUNK_BYTES", 3 * size + 5)
        monkeypatch.setattr(block_copier, "_SEGMENT_BYTES", 7 * size + 5)
        monkeypatch.setattr(block_copier, "NUM_AHEAD", block_copier.NUM_PLACES)
        monkeypatch.setattr(block_copier, "BY_ROWS", {one for one in Direction if rng.random() < 0.5})
        copies = LazyBlockCopies(self.device)
        self.copier = BlockCopier(self.device, copies, regions, NUM_HOST_BLOCKS, lambda phase, share: None)  # type: ignore[arg-type]
        self.host: dict[int, list[bytes]] = {}  # what host blocks are to hold
        self.flights: dict[tuple[Direction, int], tuple[list[int], list[int], list[list[bytes]]]] = {}
        self.started = dict.fromkeys(Direction, 0)

    def content(self, block: int) -> list[bytes]:
        return [region[:, block].numpy().tobytes() for region in self.cache]

    def compute(self, block: int) -> list[bytes]:
        """Has the computing stream write a block, later; returns what it writes."""
        values = [torch.randint(0, 256, (len(region), region.shape[2]), dtype=torch.uint8) for region in self.cache]

        def write() -> None:
            for region, value in zip(self.cache, values, strict=True):
                region[:, block] = value

        self.device.streams[0].work.append(write)
        return [value.numpy().tobytes() for value in values]

    @property
    def taken(self) -> tuple[set[int], set[int]]:
        """Blocks of the cache and of the host pool that are being copied."""
        cached: set[int] = set()
        hosted: set[int] = set()
        for (direction, _), (sources, targets, _) in self.flights.items():
            cached |= set(sources if direction is Direction.OFFLOAD else targets)
            hosted |= set(targets if direction is Direction.OFFLOAD else sources)
        return cached, hosted

    def start(self) -> None:
        """Computes blocks and starts tickets of both directions behind that, of blocks that nothing else copies."""
        cached, hosted = self.taken
        free = [block for block in range(1, NUM_BLOCKS + 1) if block not in cached]
        blank = [block for block in range(1, NUM_HOST_BLOCKS + 1) if block not in hosted]
        self.rng.shuffle(free)
        if self.rng.random() < 0.5:
            self.rng.shuffle(blank)
        held = [block for block in blank if block in self.host]
        loads = self._tickets(held[: self.rng.randrange(12)], free, Direction.LOAD)
        for source in loads.sources.tolist():
            blank.remove(source)
        for target in loads.targets.tolist():
            free.remove(target)
            self.compute(target)  # what a step has written there must not come after the load
        offloads = self._tickets(free[: self.rng.randrange(12)], blank, Direction.OFFLOAD)
        self.copier.start(offloads, loads)

    def _tickets(self, sources: list[int], targets: list[int], direction: Direction) -> Tickets:
        pairs = list(zip(sources, targets, strict=False))
        cuts = sorted({0, len(pairs), *(self.rng.randrange(len(pairs) + 1) for _ in range(2))})
        for begin, end in pairwise(cuts):
            some = pairs[begin:end]
            if direction is Direction.LOAD:
                expected = [self.host[source] for source, _ in some]
            else:
                expected = [self.compute(source) for source, _ in some]
                for _, target in some:
                    self.host.pop(target, None)
            self.started[direction] += 1
            flight = [source for source, _ in some], [target for _, target in some], expected
            self.flights[direction, self.started[direction]] = flight
        first, second = (np.array([pair[side] for pair in pairs], np.int32) for side in (0, 1))
        return Tickets(first, second, np.diff(cuts).astype(np.int32))

    def check(self, done: DoneTicket) -> None:
        _, targets, expected = self.flights.pop((done.direction, done.ordinal))
        if done.direction is Direction.OFFLOAD:
            self.host.update(zip(targets, expected, strict=True))
        else:
            assert [self.content(block) for block in targets] == expected


def walk(seed: int, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Starts tickets and looks at random; every load is checked when it is done, so that offloads are too."""
    setup = Setup(random.Random(seed), monkeypatch)
    last = dict.fromkeys(Direction, 0)
    for _ in range(150):
        if setup.rng.random() < 0.3:
            setup.start()
        setup.device.advance(setup.rng.randrange(12))
        for done in setup.copier.take_done():
            assert done.ordinal == last[done.direction] + 1
            last[done.direction] = done.ordinal
            setup.check(done)
        assert setup.copier.in_flight == len(setup.flights)
    setup.copier.finish()
    for done in setup.copier.take_done():
        setup.check(done)
    assert not setup.flights and not setup.copier.in_flight
    return setup


@pytest.mark.parametrize("run", range(count(100, in_ci=12)))
def test_every_ticket_copies_what_its_sources_had(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    setup = walk(seed, monkeypatch)
    assert min(setup.started.values()) > 5
    setup.copier.restart()
    setup.started = dict.fromkeys(Direction, 0)
    setup.start()
    setup.copier.finish()
    for done in setup.copier.take_done():
        setup.check(done)
    assert not setup.flights


@pytest.mark.parametrize("dropped", range(3))
def test_the_walk_notices_a_missing_wait(dropped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the computing stream, of the kernel for the engine, or of the engine for the kernel."""
    wait = LazyStream.wait

    def waits(self: LazyStream, event: object) -> None:
        fired_by = next(index for index, stream in enumerate(self._device.streams) if _fires(stream, event))
        kind = 0 if fired_by == 0 else 1 + (fired_by > 2)  # streams 1 and 2 are the offloads'
        if kind != dropped:
            wait(self, event)  # type: ignore[arg-type]

    def _fires(stream: LazyStream, event: object) -> bool:
        return event in stream.__dict__.setdefault("recorded", [])

    record = LazyStream.record

    def recorded(self: LazyStream) -> object:
        event = record(self)
        self.__dict__.setdefault("recorded", []).append(event)
        return event

    monkeypatch.setattr(LazyStream, "record", recorded)
    monkeypatch.setattr(LazyStream, "wait", waits)

    def fails(seed: int) -> bool:
        try:
            walk(seed, monkeypatch)
        except AssertionError:
            return True
        return False

    assert any(fails(seed) for seed in range(20))


def test_a_look_launches_at_most_a_chunk_of_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(random.Random(1), monkeypatch)
    blocks = np.arange(1, 19, dtype=np.int32)
    setup.copier.start(Tickets(blocks, blocks, np.array([18], np.int32)), Tickets.none())
    before = [len(stream.work) for stream in setup.device.streams[1:]]
    assert before == [0, 0, 0, 0], "the launch of the step comes first"
    setup.device.rng.randrange = lambda *bounds: 0  # type: ignore[method-assign, assignment]
    for chunks in (1, 2, 3, 4, 4, 4):
        setup.copier.take_done()
        assert len(setup.copier._lanes[Direction.OFFLOAD]._active) == chunks


@pytest.mark.parametrize("direction", Direction)
def test_parts_that_are_far_apart_are_moved_by_the_kernel(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy engine's rows can be 2 GiB apart at most."""
    collected, name = list[int](), "collect" if direction is Direction.OFFLOAD else "spread"
    monkeypatch.setattr(HostBlockCopies, name, lambda self, stream, region, block, other: collected.append(block))
    blocks = np.array([2, 1], np.int32)
    tickets = Tickets(blocks, blocks, np.array([2], np.int32))
    for most, expected in ((48, [2, 1]), (47, [])):
        monkeypatch.setattr(block_copier, "MOST_PITCH", most)
        cache = torch.arange(2 * 3 * 16, dtype=torch.uint8).view(2, 3, 16)
        device, regions = LazyDevice(random.Random(0)), [Region.of(cache, 3)]
        copier = BlockCopier(device, HostBlockCopies(), regions, 2, lambda phase, share: None)  # type: ignore[arg-type]
        pair = (tickets, Tickets.none()) if direction is Direction.OFFLOAD else (Tickets.none(), tickets)
        copier.start(*pair)
        copier.finish()
        assert collected == expected
        collected.clear()


def test_neighbours_of_the_host_pool_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copier, "_SEGMENT_BYTES", 100)
    shares: list[float] = []
    device = LazyDevice(random.Random(0))
    pool = HostPool(device, 13, 16, lambda phase, share: shares.append(share))  # type: ignore[arg-type]
    assert [end - begin for begin, end in device.locked] == [96, 96, 16]
    assert shares == [0.0, 6 / 13, 12 / 13, 1.0]
    first, second, third = (begin for begin, _ in device.locked)

    def runs(*blocks: int) -> list[tuple[int, int]]:
        return pool.runs(np.array(blocks, np.int32))

    assert runs(1, 2, 3) == [(first, 3)]
    assert runs(5, 6, 7, 8) == [(first + 64, 2), (second, 2)]  # not beyond a segment, though memory may follow it
    assert runs(3, 2, 4, 5, 13) == [(first + 32, 1), (first + 16, 1), (first + 48, 2), (third, 1)]


def test_a_pool_that_is_deleted_is_unlocked_before_its_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the next pool could not be locked where the allocator gives out the same addresses again."""
    monkeypatch.setattr(block_copier, "_SEGMENT_BYTES", 64 << 10)
    device, cache = LazyDevice(random.Random(0)), torch.zeros(4, 3, 4096, dtype=torch.uint8)
    for _ in range(20):
        copier = BlockCopier(device, HostBlockCopies(), [Region.of(cache, 3)], 30, lambda phase, share: None)  # type: ignore[arg-type]
        assert len(device.locked) == 8
        del copier
        assert not device.locked


def test_a_pool_that_cannot_be_locked_whole_is_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copier, "_SEGMENT_BYTES", 100)
    device = LazyDevice(random.Random(0))
    lock = device.lock

    def refuse(memory: torch.Tensor) -> None:
        if len(device.locked) == 2:
            raise RuntimeError("no more")
        lock(memory)

    monkeypatch.setattr(device, "lock", refuse)
    with pytest.raises(RuntimeError, match="no more"):
        HostPool(device, 13, 16, lambda phase, share: None)  # type: ignore[arg-type]
    assert not device.locked


def test_a_region_states_what_the_kernel_needs() -> None:
    parts = torch.zeros(4, 5 * 3, 32, dtype=torch.bfloat16)
    region = Region.of(parts, 5)
    assert (region.num_parts, region.part_bytes, region.piece_bytes, region.block_bytes) == (4, 960, 192, 768)
    with pytest.raises(ValueError, match="a block has 12 bytes in each part: copies need a multiple of 16"):
        Region.of(torch.zeros(2, 5, 6, dtype=torch.bfloat16), 5)
    with pytest.raises(ValueError, match="not contiguous"):
        Region.of(parts.transpose(0, 1), 5)


def test_the_twin_moves_pieces() -> None:
    cache = torch.arange(2 * 4 * 16, dtype=torch.uint8).view(2, 4, 16)
    region, staged = Region.of(cache, 4), torch.zeros(3, 40, dtype=torch.uint8)
    ids = torch.tensor([3, 1], dtype=torch.int32)
    HostBlockCopies().gather(0, region, staged.data_ptr(), 40, ids.data_ptr(), 2)
    assert torch.equal(staged[:2, :32], cache[:, [3, 1]].transpose(0, 1).reshape(2, 32))
    assert not staged[2].any() and not staged[:, 32:].any()

"""A walk of a runner whose sequences share prefixes only through the host pool: each wrong byte is a wrong token.

A sequence that ends has its full blocks offloaded, and its blocks are free once results have named the tickets. A later
sequence with the same beginning gets them loaded into other blocks, and computes only the rest. Meanwhile others
decode, and blocks that are free are overwritten.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from runner_svc.backends.hash_backend import expected_tokens
from tests.support.host_world import BLOCK_SIZE, HostWorld, tag
from tests.support.plans import SAMPLE, admission

STEMS = [[100 + stem * 30 + index for index in range(20)] for stem in range(3)]


@dataclass(eq=False)
class Walker:
    """A sequence."""

    tokens: list[int]
    prompt_len: int
    most: int
    blocks: list[int] = field(default_factory=list)
    loaded: int = 0
    """Blocks that come from the host pool."""
    ticket: int | None = None
    """The load that it waits for."""
    slot: int | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.tokens) == self.prompt_len + self.most

    def prefix(self, block: int) -> tuple[int, ...]:
        """Returns the tokens up to the end of one of its blocks, which name it."""
        return tuple(self.tokens[: (block + 1) * BLOCK_SIZE])


class CopyWalk:
    """Plans of one walk; `hosted` maps the names of complete host blocks to them."""

    def __init__(self, world: HostWorld, rng: random.Random, num_blocks: int, num_host_blocks: int) -> None:
        self.world, self.rng = world, rng
        self.free, self.blank = list(range(1, num_blocks + 1)), list(range(1, num_host_blocks + 1))
        self.slots = list(range(world.backend.num_slots))
        self.hosted: dict[tuple[int, ...], int] = {}
        self.reading: list[int] = []  # host blocks
        self.flights: dict[tuple[str, int], list[tuple[int, int, tuple[int, ...]]]] = {}
        self.started = {"offload": 0, "load": 0}
        self.waiting: list[Walker] = []
        self.running: list[Walker] = []
        self.hits = 0

    def turn(self) -> None:
        """Sends a plan and takes its result."""
        rng, columns = self.rng, dict[str, list]()
        if len(self.waiting) < 3:
            stem = rng.choice(STEMS)
            prompt = [*stem[: rng.randint(1, 20)], *(rng.randrange(90) for _ in range(rng.randint(1, 5)))]
            self.waiting.append(Walker(prompt, len(prompt), rng.randint(1, 12)))
        self._end(columns)
        self._begin_loads(columns)
        self._admit(columns)
        rows = [walker for walker in self.running if not walker.is_done and rng.random() < 0.8]
        columns["extents"] = [self._row(walker) for walker in rows]
        drawn = self.world.execute(**columns)
        for walker, token in zip(rows, drawn, strict=True):
            walker.tokens.append(token)
            generated = walker.tokens[walker.prompt_len :]
            assert generated == expected_tokens(walker.tokens[: walker.prompt_len], len(generated), eos_probability=0)
        self._take_tickets()

    def _row(self, walker: Walker) -> tuple[int, int, int, int]:
        known = len(walker.tokens)
        start = walker.loaded * BLOCK_SIZE if known == walker.prompt_len else known - 1
        assert walker.slot is not None
        return walker.slot, start, known - start, SAMPLE

    def _end(self, columns: dict[str, list]) -> None:
        """Releases a sequence that is complete, and offloads its full blocks that the host pool lacks."""
        done = [walker for walker in self.running if walker.is_done]
        for walker in done[:1]:
            self.running.remove(walker)
            columns["releases"] = [walker.slot]
            self.slots.append(walker.slot)  # type: ignore[arg-type]
            ticket = []
            for index, block in enumerate(walker.blocks):
                name = walker.prefix(index)
                held = name in self.hosted or any(name == other for f in self.flights.values() for *_, other in f)
                if (index + 1) * BLOCK_SIZE > len(walker.tokens) - 1 or held or not self._has_blank():
                    self.free.append(block)
                else:
                    ticket.append((block, self.blank.pop(), name))
            if ticket:
                columns["offloads"] = [[(block, hosted, tag(1)) for block, hosted, _ in ticket]]
                self._fly("offload", ticket)
        self.rng.shuffle(self.free)

    def _has_blank(self) -> bool:
        """Evicts a host block that nothing reads if none is blank."""
        idle = [name for name, block in self.hosted.items() if block not in self.reading]
        if not self.blank and idle:
            self.blank.append(self.hosted.pop(self.rng.choice(idle)))
        return bool(self.blank)

    def _begin_loads(self, columns: dict[str, list]) -> None:
        for walker in self.waiting:
            if walker.blocks or walker.ticket is not None:
                continue
            needed = -(-(walker.prompt_len + walker.most) // BLOCK_SIZE)
            if needed > len(self.free):
                return
            walker.blocks = [self.free.pop() for _ in range(needed)]
            names = [walker.prefix(index) for index in range((walker.prompt_len - 1) // BLOCK_SIZE)]
            while walker.loaded < len(names) and names[walker.loaded] in self.hosted:
                walker.loaded += 1
            ticket = [
                (self.hosted[name], block, name)
                for name, block in zip(names, walker.blocks, strict=False)
                if name in names[: walker.loaded]
            ]
            if ticket:
                columns.setdefault("loads", []).append([(hosted, block) for hosted, block, _ in ticket])
                self.reading += [hosted for hosted, _, _ in ticket]
                walker.ticket = self._fly("load", ticket)
                self.hits += len(ticket)
                return  # another one may need the same host blocks, which one plan reads once

    def _admit(self, columns: dict[str, list]) -> None:
        for walker in list(self.waiting):
            if self.slots and walker.blocks and walker.ticket is None:
                self.waiting.remove(walker)
                walker.slot = self.slots.pop(0)
                admitted = admission(walker.slot, walker.tokens, walker.blocks, num_computed=walker.loaded * BLOCK_SIZE)
                columns.setdefault("admissions", []).append(admitted)
                self.running.append(walker)

    def _fly(self, direction: str, ticket: list[tuple[int, int, tuple[int, ...]]]) -> int:
        self.started[direction] += 1
        self.flights[direction, self.started[direction]] = ticket
        return self.started[direction]

    def _take_tickets(self) -> None:
        for direction, done in (("offload", self.world.offloads_done), ("load", self.world.loads_done)):
            for ordinal in done:
                for source, target, name in self.flights.pop((direction, ordinal)):
                    if direction == "offload":
                        self.free.append(source)
                        self.hosted[name] = target
                    else:
                        self.reading.remove(source)
                for walker in self.waiting:
                    if direction == "load" and walker.ticket == ordinal:
                        walker.ticket = None
            done.clear()

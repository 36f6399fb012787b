"""A hash runner with a host pool, driven by handwritten plans that each know their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.execution.plans_in_flight import LaunchedPlan
from runner_svc.execution.runner import Runner
from runner_svc.tiers.kv_copier import KVCopier
from runner_svc.tiers.thread_copier import CopyTrouble, ThreadCopier
from tests.support.plans import SAMPLE, admission, ints, plan

BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 4, 12, 6
MakeCopier = Callable[[HashBackend], KVCopier]


def tag(number: int) -> bytes:
    """Returns a tag, the same for the same number."""
    return bytes([number]) * 20


def threads(trouble: CopyTrouble | None = None) -> MakeCopier:
    """Returns what makes a copier with threads."""
    return lambda backend: ThreadCopier(backend.cache_regions, NUM_HOST_BLOCKS, trouble)


class HostWorld:
    """Session, plans and tickets of one runner."""

    def __init__(self, make: MakeCopier | None = None, backend: HashBackend | None = None) -> None:
        self.backend = backend or HashBackend(
            num_slots=3, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, context_length=64, eos_probability=0
        )
        self.copier = (make or threads())(self.backend)
        self.runner = Runner(self.backend, copier=self.copier)
        self.runner.reset(b"secret")
        self.offloads_done: list[int] = []
        self.loads_done: list[int] = []

    def launch(self, one: plan_pb2.Plan) -> LaunchedPlan:
        return self.runner.launch(self.runner.last_plan + 1, one)

    def execute(self, **columns: object) -> list[int]:
        """Executes a plan; returns its tokens."""
        return self.take(self.launch(plan(**columns)).wait())  # type: ignore[arg-type]

    def take(self, result: plan_pb2.Result) -> list[int]:
        """Takes the tickets that a result names; returns its tokens."""
        self.offloads_done += ints(result.offloads_done)
        self.loads_done += ints(result.loads_done)
        assert len(result.offloads_us) == len(result.offloads_done) and len(result.loads_us) == len(result.loads_done)
        return ints(result.tokens)

    def await_copies(self, offloads: Sequence[int] = (), loads: Sequence[int] = ()) -> None:
        """Sends empty plans until results have named these tickets."""
        while not (set(offloads) <= set(self.offloads_done) and set(loads) <= set(self.loads_done)):
            self.execute()

    def compute(self, slot: int, tokens: Sequence[int], blocks: Sequence[int], num_computed: int = 0) -> int:
        """Admits a sequence and computes all its tokens; returns the one after them."""
        (token,) = self.execute(
            admissions=[admission(slot, tokens, blocks, num_computed=num_computed)],
            extents=[(slot, num_computed, len(tokens) - num_computed, SAMPLE)],
        )
        return token

    def decode(self, slot: int, known: int, count: int) -> list[int]:
        """Decodes `count` tokens of a sequence that knows `known`, one step each."""
        return [self.execute(extents=[(slot, known - 1 + i, 1, SAMPLE)])[0] for i in range(count)]

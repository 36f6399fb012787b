"""The feed of a whole engine with hash runners: after every turn, a subscriber knows all blocks that can be hit."""

from __future__ import annotations

import random

import grpc
import pytest

from roster_protos import engine_pb2
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.front.gateway import kv_batches
from scheduler_svc.front.gateway.kv_batches import changes_batch, first_batches
from scheduler_svc.kv.block_hashes import root_hash
from scheduler_svc.kv_events import kv_feed
from scheduler_svc.kv_events.kv_feed import LINGER_S
from scheduler_svc.kv_events.pool_recorder import PoolEventRecorder
from tests.support.drafters import drafting_backend
from tests.support.fake_links import WORKER
from tests.support.in_process import Stack
from tests.support.kv_follower import KvFollower, ready_blocks, ready_copies
from tests.support.scripted_drafts import RandomDrafts
from tests.support.sharing import NO_EOS, OUTPUT, SIZE, Service, prompt, service


class Subscription:
    """The worker's side of one subscription, with a strict follower that checks it."""

    def __init__(self, stack: Stack, handle: int = 900, follower: KvFollower | None = None) -> None:
        self.stack, self.handle = stack, handle
        self.follower = follower or KvFollower()
        self.refused: engine_pb2.Refused | None = None
        self._from = 0
        self._seen = len(stack.others)
        stack.front.put(kv_subscribe=engine_pb2.KvSubscribe(handle=handle, after=self.follower.number))

    def read(self) -> None:
        """Applies the messages since the last call."""
        messages, self._seen = self.stack.others[self._seen :], len(self.stack.others)
        for message in messages:
            kind = message.WhichOneof("message")
            if kind == "kv_subscribed" and message.kv_subscribed.handle == self.handle:
                self._from = message.kv_subscribed.number
                for batch in first_batches(message.kv_subscribed, 1.0):
                    self.follower.take(batch)
            elif kind == "kv_changes" and self._from and message.kv_changes.number > self._from:
                self.follower.take(changes_batch(message.kv_changes))
            elif kind == "refused" and message.refused.handle == self.handle:
                self.refused = message.refused

    def end(self) -> None:
        self.stack.front.put(kv_unsubscribe=engine_pb2.KvUnsubscribe(handle=self.handle))


def truth(stack: Stack) -> set[int]:
    return ready_blocks(stack.engine.pool.schedulers.values())


def root(served: Service) -> bytes:
    model = served.scheduler.hello.model
    return root_hash(served.stack.engine.pool.secret.value, model.weights_version, model.numerics, "", "")


def known(subscription: Subscription) -> set[int]:
    subscription.read()
    return set(subscription.follower.blocks)


def backend(rng: random.Random) -> HashBackend:
    """Returns a backend that drafts."""
    return drafting_backend(
        HashBackend,
        rng,
        num_slots=4,
        block_size=SIZE,
        num_blocks=24,
        max_step_tokens=64,
        context_length=1024,
        eos_probability=NO_EOS,
    )


def test_stored_when_ready_and_removed_when_evicted() -> None:
    served = service(slots=2, num_blocks=8)
    subscription = Subscription(served.stack)
    served.stack.submit(prompt(4 * SIZE), OUTPUT)
    served.stack.step()
    assert known(subscription) == set()  # announced, not computed yet
    served.finish()
    assert len(known(subscription)) == 4
    assert subscription.follower.check_names(root(served)) == 4
    served.stack.submit(prompt(7 * SIZE, seed=2), OUTPUT)
    served.finish()
    assert known(subscription) == truth(served.stack)
    assert subscription.follower.check_names(root(served)) >= 7


@pytest.mark.parametrize("seed", range(6))
def test_a_follower_knows_after_every_turn_what_can_be_hit(seed: int) -> None:
    """Prefixes are shared, evicted, cancelled and flushed; runners die and connect, rows draft, blocks are copied to
    host pools and back."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    stack = Stack()
    stack.drafts = RandomDrafts(rng)
    host_blocks = 20 * (seed % 2)
    for _ in range(2):
        stack.add_runner(backend(rng), host_blocks)
    subscription = Subscription(stack)
    stack.step()
    stems = [prompt(rng.randrange(1, 6) * SIZE, seed=number) for number in range(4)]
    for turn in range(400):
        if rng.random() < 0.15 and stack.engine.requests.num_waiting < 8:
            tokens = rng.choice(stems) + prompt(rng.randrange(1, 30), seed=rng.randrange(6))
            stack.submit(tokens, rng.randrange(1, 20))
        if rng.random() < 0.02 and stack.requests:
            stack.front.put(cancel=engine_pb2.Cancel(handle=rng.choice(list(stack.requests))))
        if rng.random() < 0.01:
            stack.front.put(flush_prefixes=engine_pb2.FlushPrefixes(handle=1))
        if rng.random() < 0.02 and len(stack.runners.runners) == 2:
            stack.runners.kill(rng.choice(list(stack.runners.runners)))
            stack.add_runner(backend(rng), host_blocks)
        if rng.random() < 0.05:
            subscription.end()
            subscription = Subscription(stack, 900 + turn, subscription.follower)
        stack.turn(rng)
        stack.step()
        assert known(subscription) == truth(stack)
        schedulers = stack.engine.pool.schedulers.values()
        # Partial blocks of sequences that were swapped out can't be hit by others, and are not told.
        assert set(subscription.follower.on_host) <= ready_copies(schedulers)
        if not stack.engine.requests.totals.swaps + sum(scheduler.swaps for scheduler in schedulers):
            assert set(subscription.follower.on_host) == ready_copies(schedulers)
    assert subscription.follower.snapshots == 1 and not subscription.follower.partial


def test_a_block_may_be_in_the_cache_and_in_the_host_pool() -> None:
    served = service(slots=2, num_blocks=20, host_blocks=64)
    subscription = Subscription(served.stack)
    for seed in range(1, 9):
        served.stack.submit(prompt(6 * SIZE, seed), OUTPUT)
        served.finish()
    blocks, copies = known(subscription), set(subscription.follower.on_host)
    assert blocks & copies and copies - blocks and copies == ready_copies([served.scheduler])
    assert subscription.follower.check_names(root(served)) == len(blocks)
    late = Subscription(served.stack, 901)
    served.stack.step()
    assert known(late) == blocks and set(late.follower.on_host) == copies, "a snapshot has both"
    served.stack.front.put(flush_prefixes=engine_pb2.FlushPrefixes(handle=1))
    served.stack.step()
    assert known(subscription) == set(subscription.follower.on_host) == set()


def test_flush_and_the_loss_of_the_runner_clear_it() -> None:
    served = service()
    subscription = Subscription(served.stack)
    for empty in (
        lambda: served.stack.front.put(flush_prefixes=engine_pb2.FlushPrefixes(handle=1)),
        lambda: served.stack.runners.kill(served.session),
    ):
        served.stack.submit(prompt(3 * SIZE), OUTPUT)
        served.finish()
        assert len(known(subscription)) == 3
        empty()
        served.stack.step()
        assert known(subscription) == set()


def test_earlier_blocks_are_published_as_far_as_they_are_known() -> None:
    served = service(retention_s=60, retention_requests=1)
    for seed in (1, 2):
        served.stack.submit(prompt(3 * SIZE, seed=seed), OUTPUT)
        served.finish()
    subscription = Subscription(served.stack)
    served.stack.step()
    assert len(known(subscription)) == 3 and subscription.follower.partial  # the first request is forgotten
    served.stack.submit(prompt(3 * SIZE, seed=1) + prompt(SIZE, seed=3), OUTPUT)
    served.finish()  # a hit describes the rest
    assert known(subscription) == truth(served.stack) and len(truth(served.stack)) == 7
    assert subscription.follower.check_names(root(served)) == 7


def test_blocks_cut_by_a_stop_string_are_not_published_as_earlier_blocks() -> None:
    """The text is cut after its tokens have been cached: their blocks can be hit, but their tokens are not recorded."""
    served = service(retention_s=60, retention_requests=4)
    cut = served.stack.submit(prompt(3 * SIZE), 3 * SIZE)
    served.finish()
    served.stack.submit(prompt(2 * SIZE, seed=2), OUTPUT)
    served.finish()
    assert cut.first_sequence_id is not None
    served.stack.front.put(cut=engine_pb2.Cut(sequence_id=cut.first_sequence_id, num_tokens=2, stop_string="."))
    served.stack.step()
    subscription = Subscription(served.stack)
    served.stack.step()
    assert len(known(subscription)) == 5 and subscription.follower.partial
    assert subscription.follower.check_names(root(served)) == 5


def test_evicted_requests_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscription begins between two steps, with thousands of known requests whose blocks are already evicted."""
    served = service(num_blocks=16, retention_s=60, retention_requests=100)
    for seed in range(10):
        served.stack.submit(prompt(10 * SIZE, seed=seed), OUTPUT)
        served.finish()
    looked_at: list[int] = []
    describe = PoolEventRecorder.describe

    def counted(recorder: PoolEventRecorder, names: list[bytes], first: int, tokens: bytes) -> None:
        looked_at.append(len(names) - first)
        describe(recorder, names, first, tokens)

    monkeypatch.setattr(PoolEventRecorder, "describe", counted)
    subscription = Subscription(served.stack)
    served.stack.step()
    assert sum(looked_at) == len(known(subscription)) == 15
    assert known(subscription) == truth(served.stack)


def test_recording_lasts_from_the_first_subscription_to_the_linger_time() -> None:
    served = service()
    assert served.scheduler.pool.listener is None and not served.stack.engine.kv_feed.active
    subscription = Subscription(served.stack)
    served.stack.step()
    assert served.scheduler.pool.listener is not None
    subscription.end()
    served.stack.now_s += LINGER_S
    served.stack.step()
    assert served.scheduler.pool.listener is not None
    served.stack.now_s += 1
    served.stack.step()
    assert served.scheduler.pool.listener is None and not served.stack.engine.kv_feed.active


def test_a_subscription_goes_on_where_it_was_cut() -> None:
    served = service()
    first = Subscription(served.stack)
    served.stack.submit(prompt(3 * SIZE), OUTPUT)
    served.finish()
    assert len(known(first)) == 3
    first.end()
    served.stack.submit(prompt(5 * SIZE), OUTPUT)
    served.finish()
    assert len(known(first)) == 3  # it got no message about this
    second = Subscription(served.stack, 901, first.follower)
    served.stack.step()
    assert known(second) == truth(served.stack) and len(second.follower.blocks) == 5
    assert second.follower.snapshots == 1


def test_a_cursor_that_is_too_old_is_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "KEPT_BLOCKS", 4)
    served = service()
    old = Subscription(served.stack)
    served.stack.submit(prompt(SIZE), OUTPUT)
    served.finish()
    old.read()
    old.end()
    for seed in range(2, 6):
        served.stack.submit(prompt(2 * SIZE, seed=seed), OUTPUT)
        served.finish()
    again = Subscription(served.stack, 901, old.follower)
    served.stack.step()
    again.read()
    assert again.refused is not None and again.refused.code == grpc.StatusCode.OUT_OF_RANGE.value[0]
    anew = Subscription(served.stack, 902)
    served.stack.step()
    assert known(anew) == truth(served.stack) and not anew.follower.partial


@pytest.mark.parametrize("after", [1, 1 << 62])
def test_a_cursor_of_another_scheduler_is_out_of_range(after: int) -> None:
    served = service()
    subscription = Subscription(served.stack, follower=KvFollower(number=after))
    served.stack.step()
    subscription.read()
    assert subscription.refused is not None and subscription.refused.code == grpc.StatusCode.OUT_OF_RANGE.value[0]


def test_a_cursor_within_a_snapshot_that_broke_off_is_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are also those of earlier changes, from which a subscriber that has all of them can continue."""
    for module in (kv_feed, kv_batches):
        monkeypatch.setattr(module, "CHUNK_BLOCKS", 2)
    served = service()
    always = Subscription(served.stack)
    for seed in range(3):
        served.stack.submit(prompt(2 * SIZE, seed=seed), OUTPUT)
        served.finish()
    assert len(known(always)) == 6
    numbers = [always.follower.number - 2 + chunk for chunk in range(3)]
    Subscription(served.stack, 901)
    served.stack.step()
    for handle, after in enumerate(numbers, 902):
        broken = Subscription(served.stack, handle, KvFollower(number=after))
        served.stack.step()
        broken.read()
        assert (broken.refused is not None) == (after < numbers[-1])
    served.stack.submit(prompt(2 * SIZE, seed=4), OUTPUT)
    served.finish()
    assert known(always) == truth(served.stack)


def test_a_cursor_from_before_a_pause_of_the_recording_is_out_of_range() -> None:
    served = service()
    first = Subscription(served.stack)
    served.stack.submit(prompt(SIZE), OUTPUT)
    served.finish()
    first.read()
    first.end()
    served.stack.now_s += LINGER_S + 1
    served.stack.step()
    again = Subscription(served.stack, 901, first.follower)
    served.stack.step()
    again.read()
    assert again.refused is not None


def test_salted_requests_and_isolated_tenants_are_not_published() -> None:
    served = service(isolate_tenants=True)
    subscription = Subscription(served.stack)
    served.stack.submit(prompt(2 * SIZE), OUTPUT, cache_salt="secret")
    served.stack.submit(prompt(2 * SIZE), OUTPUT, tenant="acme")
    served.stack.submit(prompt(3 * SIZE), OUTPUT)
    served.finish()
    assert len(truth(served.stack)) == 7 and len(known(subscription)) == 3


def test_a_worker_that_dies_takes_its_subscriptions_along() -> None:
    served = service()
    Subscription(served.stack)
    served.stack.step()
    served.stack.front.put(b"successor", hello=engine_pb2.WorkerHello(worker=0))
    served.stack.step()
    served.stack.submit(prompt(2 * SIZE), OUTPUT)
    served.finish()
    assert not [m for m in served.stack.others if m.HasField("kv_changes")]


def test_each_worker_gets_changes_once_for_all_its_subscribers() -> None:
    served = service()
    front = served.stack.front
    front.put(b"second", hello=engine_pb2.WorkerHello(worker=1))
    for worker, handle in ((WORKER, 1), (b"second", 2), (b"second", 3)):
        front.put(worker, kv_subscribe=engine_pb2.KvSubscribe(handle=handle))
    served.stack.submit(prompt(2 * SIZE), OUTPUT)
    told: list[bytes] = []
    for _ in range(8):
        served.stack.engine.step()
        told += [worker for worker, message in front.messages if message.HasField("kv_changes")]
        front.messages = []
        while served.stack.runners.execute(served.session):
            served.stack.runners.deliver(served.session)
    assert told and told.count(WORKER) == told.count(b"second") == len(told) // 2

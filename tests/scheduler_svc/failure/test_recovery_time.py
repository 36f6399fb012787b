"""A new scheduler resumes within a second of a runner's connection, with every slot of a large runner occupied.

Time is this process's CPU time, so that a busy machine has no influence. The runner's steps are left out, because it
computes the same steps without a restart.
"""

from __future__ import annotations

import gc
import time

from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.link.runner_events import GotSnapshot
from tests.support.in_process import Stack
from tests.support.lockstep import advance

NUM_SLOTS = 256
PROMPT_TOKENS = 1000
LIMIT_S = 1.0


def test_every_stream_goes_on_within_a_second() -> None:
    """From Hello to the first new token of each of 256 streams: three turns of the engine within a second."""
    stack = Stack(policy="fcfs", prefix_sharing=True, check=False)  # all sequences run at once
    stack.add_runner(
        HashBackend(
            num_slots=NUM_SLOTS,
            block_size=16,
            num_blocks=NUM_SLOTS * 80,
            max_step_tokens=16384,
            context_length=2048,
            eos_probability=0.0,
        )
    )
    stack.step()
    for number in range(NUM_SLOTS):
        stack.submit([(number + 7 * place) % 200 for place in range(PROMPT_TOKENS)], 200, seed=number)
    while not all(request.streams and request.streams[0].tokens for request in stack.requests.values()):
        advance(stack)
    former = max(stack.runners.runners)
    runner = stack.runners.runners[former]
    stack.runners.dismiss(former)
    stack.restart_scheduler()  # without a runner: the clients attach, and are asked to wait
    stack.runners.connect(99, runner, former=former, holds=True)

    gc.collect()
    gc.freeze()  # what other tests have left is not collected on this one's time
    spent_s = -time.process_time()
    stack.engine.step()  # answers Hello with a Welcome and a request for a snapshot
    (event,) = stack.runners.events
    assert isinstance(event, GotSnapshot) and len(event.snapshot.sequences) == NUM_SLOTS
    stack.engine.step()  # takes the snapshot over and sends the first plan
    spent_s += time.process_time()
    scheduler = stack.engine.pool.schedulers[99]
    assert scheduler.table.num_running == NUM_SLOTS and scheduler.prefill_tokens == 0
    stack.runners.execute(99)
    stack.runners.deliver(99)
    before = stack.engine.requests.totals.sampled_tokens
    spent_s -= time.process_time()
    stack.engine.step()  # publishes its result
    spent_s += time.process_time()
    assert stack.engine.requests.totals.sampled_tokens - before == NUM_SLOTS
    assert spent_s < LIMIT_S, f"{spent_s:.2f} s"
    print(f"taken over in {1000 * spent_s:.0f} ms: {NUM_SLOTS} sequences of {PROMPT_TOKENS} tokens")

"""A prefix index loses blocks to other sequences, and is lost with its runner."""

from __future__ import annotations

from runner_svc.backends.hash_backend import HashBackend
from tests.support.sharing import NO_EOS, OUTPUT, SIZE, prompt, service


def test_a_runner_that_dies_takes_its_index_along() -> None:
    served = service(slots=8, step_tokens=SIZE)
    done = served.stack.submit(prompt(3 * SIZE), OUTPUT)
    served.finish()
    requests = [served.stack.submit(prompt(5 * SIZE + 1), OUTPUT) for _ in range(4)]
    served.advance()
    served.stack.runners.kill(served.session)
    served.stack.step()
    assert len(served.stack.engine.requests.queue) == 4
    backend = HashBackend(
        num_slots=8, block_size=SIZE, num_blocks=64, max_step_tokens=64, context_length=1024, eos_probability=NO_EOS
    )
    served.session = served.stack.add_runner(backend)
    served.stack.step()
    (admission,) = served.stack.runners.plans[served.session][0][1].admissions
    assert admission.num_computed == 0
    served.finish()
    assert served.cached(done) == 0
    assert served.scheduler.prefill_tokens == 5 * SIZE + 4
    assert [served.cached(request) for request in requests] == [3 * SIZE, *[5 * SIZE] * 3]


def test_names_are_recomputed_for_a_runner_with_another_block_size() -> None:
    served = service(slots=2, step_tokens=SIZE)
    prompts = [prompt(3 * SIZE) + prompt(4 * SIZE, seed=seed) for seed in (2, 3, 2)]
    requests = [served.stack.submit(tokens, 4 * SIZE) for tokens in prompts]
    served.advance(5)
    served.stack.runners.kill(served.session)
    served.stack.step()
    backend = HashBackend(
        num_slots=2, block_size=2 * SIZE, num_blocks=64, max_step_tokens=64, context_length=1024, eos_probability=NO_EOS
    )
    served.session = served.stack.add_runner(backend)
    served.finish()
    for request in requests:
        served.cached(request)
    assert served.scheduler.cached_tokens > 0


def test_a_prefix_evicted_while_its_request_waits_is_computed_again() -> None:
    served = service(slots=1, num_blocks=8)
    served.stack.submit(prompt(4 * SIZE), OUTPUT)
    served.finish()
    big = served.stack.submit(prompt(7 * SIZE, seed=2), OUTPUT)
    again = served.stack.submit(prompt(4 * SIZE), OUTPUT)
    served.finish()
    assert [served.cached(big), served.cached(again)] == [0, 0]


def test_the_deepest_blocks_are_evicted_first() -> None:
    served = service(slots=1, num_blocks=8)
    served.stack.submit(prompt(4 * SIZE), OUTPUT)
    served.finish()
    served.stack.submit(prompt(4 * SIZE + 1, seed=2), OUTPUT)  # takes the four blank blocks and one of the cached
    again = served.stack.submit(prompt(5 * SIZE), OUTPUT)
    served.finish()
    assert served.cached(again) == 3 * SIZE


def test_a_hit_is_pinned_at_once() -> None:
    """The hit's blocks are free on admission; the fresh blocks of the same step must not be taken from them."""
    served = service(slots=4, num_blocks=8)
    served.stack.submit(prompt(4 * SIZE), OUTPUT)
    served.finish()
    again = served.stack.submit(prompt(4 * SIZE), OUTPUT)
    others = [served.stack.submit(prompt(SIZE, seed=seed), OUTPUT) for seed in range(2, 5)]
    served.finish()
    assert served.cached(again) == 3 * SIZE
    assert [served.cached(other) for other in others] == [0, 0, 0]
    served.stack.assert_clean()

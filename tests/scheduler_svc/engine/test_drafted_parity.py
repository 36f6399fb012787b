"""Greedy output of real models equals transformers' through the whole engine while rows draft, wrongly and rightly.

Pools are so small that sequences are preempted in mid-run; the scheduler restarts, and a runner is lost. Of a
deterministic backend the output equals that of the text alone, without any near tie.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.torch_backend import DraftTarget, TorchBackend
from runner_svc.backends.torch_draft import TorchDraftModel, load_draft_model
from runner_svc.drafting.drafter import Drafter
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.drafters import cpu_drafter
from scheduler_svc.constrained.process.compiler import grammar_text
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.plan.plan_draft import pack
from tests.support.constraints import allowed_after
from tests.support.drafters import MixedDrafter, Prophet
from tests.support.eagle_layers import cycle_layer, save_layer
from tests.support.exact_parity import ExactParity
from tests.support.host_backend import no_progress
from tests.support.in_process import Stack
from tests.support.medusa_models import cycle_heads, make_cycle_model, save_heads
from tests.support.parity import expected_tokens
from tests.support.scripted_drafts import RandomDrafts
from tests.support.tested_backend import CPU, DETERMINISTIC, parity_of, poison
from tests.support.thoroughness import choice, count
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

MAX_TOKENS, MOST = 30, 5
REGEX = "(foo|ba+r)[0-9]{2,5}"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("gemma3", {}),
    "windows, deterministic": ("gemma3", {"deterministic": True}),
    "experts, deterministic": ("qwen3-moe", {"deterministic": True}),
    "RoPE by length": ("llama-longrope", {}),
    "experts": ("qwen3-moe", {}),
    "transformers": ("mistral", {"decoder": "transformers"}),
    "medusa": ("cycle", {}),
    "eagle": ("cycle", {}),
}


def _right(kind: str, tmp_path: Path, target: DraftTarget) -> Drafter:
    """Returns a drafter that is right for the cycle model, by the model's states alone."""
    folder = tmp_path / "drafter"
    if not folder.exists():
        if kind == "medusa":
            save_heads(folder, cycle_heads(MOST, own_outputs=False))
        else:
            save_layer(folder, cycle_layer())
    return cpu_drafter(RunnerSettings.read(draft=f"{kind}:{folder}"), no_progress)(target)  # type: ignore[misc]


def _grammar(number: int) -> dict[str, str]:
    """Returns the grammar of every fifth request: its rows wait for masks beside rows that draft."""
    return {"grammar": grammar_text("regex", REGEX)} if number % 5 == 4 else {}


def _sampling(number: int) -> plan_pb2.Sampling:
    stop_ids = pack([IM_END_ID]) if _grammar(number) else b""
    return plan_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1, stop_ids=stop_ids)


@pytest.mark.parametrize("kind", choice([*KINDS], in_ci=["windows", "medusa", "eagle"]))
def test_drafts_give_the_tokens_of_generate(kind: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    family, options = KINDS[kind]
    is_cycle = family == "cycle"
    tiny = tmp_path / "tiny"
    folder = make_cycle_model(tiny) if is_cycle else make_tiny_model(family, tiny, rng.randrange(1000))
    parity = parity_of(DETERMINISTIC if options.get("deterministic") else CPU, folder)
    stem = [rng.randrange(NUM_TOKENS) for _ in range(20)]
    prompts = [
        stem[: rng.choice([0, 20])] + [rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 9))]
        for _ in range(count(24, in_ci=6 if is_cycle else 10))
    ]
    is_exact = isinstance(parity, ExactParity)
    answers = (parity.expected_tokens if is_exact else partial(expected_tokens, parity.model))(prompts, MAX_TOKENS)
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]

    prophet = Prophet(rng, NUM_TOKENS, wrong=0.25)
    prophet.texts = texts

    def make_drafter(target: DraftTarget) -> Drafter:
        """Half of the rows are drafted by the model itself, from its second KV."""
        model = load_draft_model("itself", folder, target, folder / "unused", no_progress)
        assert isinstance(model._model, TorchDraftModel)
        poison(model._model.cache_pass.cache.data)
        return MixedDrafter(rng, [prophet, model])

    def load() -> TorchBackend:
        backend = TorchBackend.load(
            str(folder),
            cache_folder=folder / "unused",
            progress=no_progress,
            num_blocks=40,
            block_size=4,
            num_slots=6,
            max_step_tokens=64,
            make_drafter=partial(_right, kind, tmp_path) if is_cycle else make_drafter,
            max_drafts=MOST,
            **options,
        )
        poison(backend.cache.data)
        return backend

    stack = Stack(depth=rng.randint(2, 3), policy_parameters={"step_tokens": 24}, prefix_sharing=True)
    session = stack.add_runner(load())
    stack.drafts = RandomDrafts(rng)
    for number, prompt in enumerate(prompts):
        stack.submit(prompt, MAX_TOKENS, sampling=_sampling(number), **_grammar(number))
        for _ in range(rng.randrange(5)):
            stack.turn(rng)
        if number == len(prompts) // 3:
            stack.restart_scheduler()
        elif number == len(prompts) // 2:
            stack.runners.kill(next(iter(stack.runners.runners)), Loss.LEFT)
            session = stack.add_runner(load())
    stack.run(rng)
    stack.assert_clean()
    requests = list(stack.requests.values())
    allowed = allowed_after(load().model, "regex", REGEX, stop_ids=[IM_END_ID])
    for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        tokens = request.streams[0].tokens
        if _grammar(number):
            parity.check_forced(prompt, tokens, allowed)
        elif tokens != answers[number]:
            assert not is_exact, (tokens, answers[number])
            assert len(tokens) == MAX_TOKENS
            parity.check_forced(prompt, tokens)
    parity.assert_few_ties()
    totals = stack.engine.pool.schedulers[session]
    ends = [request.streams[0].end for request in requests]
    accepted = sum(end.accepted_tokens for end in ends if end is not None)
    drafted = sum(end.drafted_tokens for end in ends if end is not None)
    print(f"{totals.preemptions} preemptions, {drafted} drafted, {accepted} accepted")
    if is_cycle:  # what is right is always accepted, whatever became of slots and blocks since
        assert accepted == drafted
    assert accepted > len(requests)

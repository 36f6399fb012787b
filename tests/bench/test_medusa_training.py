"""Medusa heads are trained on the states that drew a model's own tokens, and saved as the drafter reads them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from bench.speculation.medusa_training import Examples, Heads, accuracy, examples_of, save, train
from bench.speculation.own_answers import Answer, Writer, message_frame
from runner_svc.drafting.medusa.checkpoint import read_heads
from runner_svc.drafting.medusa.heads import logits_of
from tests.support.medusa_models import HIDDEN, codes, following
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model


def test_heads_learn_the_tokens_at_their_distances_and_are_read_again(tmp_path: Path) -> None:
    torch.manual_seed(1)
    states = codes()[:HIDDEN]
    head = torch.zeros(NUM_TOKENS, HIDDEN)
    head[:HIDDEN] = states / 8
    targets = torch.stack([following(distance)[:HIDDEN] for distance in (2, 3)], dim=1)
    targets[-1, 1] = -1  # where a text ends
    examples, heads = Examples(states, targets), Heads(2, HIDDEN)
    before, _ = accuracy(heads, examples, head)
    train(heads, examples, head, steps=60, batch=64, rate=2e-2, seconds=60, rivals=16)
    alone, together = accuracy(heads, examples, head)
    assert max(before) < 0.1 and min(alone + together) > 0.9
    save(heads, tmp_path / "heads", "tiny")
    read = read_heads(tmp_path / "heads", HIDDEN, NUM_TOKENS)
    for index, logits in enumerate(logits_of(read, states, lambda hidden: hidden @ head.T)):
        right = logits.argmax(dim=1) == targets[:, index]
        assert right[:-1].float().mean() > 0.9


def test_an_answer_comes_with_the_states_that_drew_it(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    writer = Writer(model, ([1, 2], [3]), end=NUM_TOKENS - 1, seed=1)
    answers = writer.answers([[5], [6, 7, 8]], 9, temperature=0.0)
    for answer in answers:
        assert (answer.states @ model.lm_head.weight.detach().T).argmax(dim=1).tolist() == answer.tokens
    assert len(writer.messages(3, 4)) == 3
    (task,) = writer.tasks(answers[:1], lambda text: [len(text)], 4)
    assert task[1:] == answers[0].tokens[:4]


def test_examples_are_of_the_tokens_behind_the_one_drawn() -> None:
    states = torch.arange(4.0)[:, None]
    made = examples_of([Answer([7, 8, 9, 10], states), Answer([5, 6], states[:2])], 2)
    assert made.states.flatten().tolist() == [0, 1, 2, 0]
    assert made.targets.tolist() == [[8, 9], [9, 10], [10, -1], [6, -1]]


def test_the_frame_of_a_message_is_what_two_messages_share() -> None:
    assert message_frame(lambda text: [1, 2, *map(ord, text), 3]) == ([1, 2], [3])

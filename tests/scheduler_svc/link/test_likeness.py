"""A runner that would answer differently is refused with a reason; capacities may differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import structlog

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.execution.runner import Runner
from scheduler_svc.link.likeness import Likeness
from tests.support.in_process import Stack

Change = Callable[[plan_pb2.Hello], Any]


def hello() -> plan_pb2.Hello:
    """Returns the Hello of a runner that reports everything."""
    hello = Runner(HashBackend(num_slots=4, num_blocks=64), "first").hello()
    hello.fingerprints.update({"rope": "default, theta 10000", "kv": "bfloat16", "numerics": "sm_90 bfloat16"})
    hello.model.special_tokens["eos_token"] = "<|im_end|>"
    hello.model.chat_template = "{{ messages }}"
    return hello


UNLIKE: dict[str, tuple[Change, str]] = {
    "name": (lambda h: setattr(h.model, "name", "other"), "start it with the same model"),
    "weights_version": (lambda h: setattr(h.model, "weights_version", "v2"), "start it with the same model"),
    "formats": (
        lambda h: h.model.MergeFrom(plan_pb2.Model(weights_version="v2", weight_formats="fp8 on load")),
        "in another format (fp8 on load) than this service's (not quantized): start it with the same --model, --quanti",
    ),
    "architecture": (lambda h: setattr(h.model, "architecture", "Other"), "architecture is 'Other'"),
    "vocab_size": (lambda h: setattr(h.model, "vocab_size", 300), "vocabulary has 300 tokens"),
    "eos_token_ids": (lambda h: h.model.eos_token_ids.append(7), "end-of-sequence tokens are [7, 257]"),
    "tokenizer": (lambda h: setattr(h.model, "tokenizer", b"{}"), "tokenizer differs"),
    "chat_template": (lambda h: setattr(h.model, "chat_template", "{{ 1 }}"), "chat template differs"),
    "special_tokens": (lambda h: h.model.special_tokens.update({"eos_token": "x"}), "special tokens differs"),
    "weights": (lambda h: h.fingerprints.update({"weights": "float16"}), "--dtype"),
    "rope": (lambda h: h.fingerprints.update({"rope": "yarn"}), "config.json"),
    "kv": (lambda h: h.fingerprints.update({"kv": "float8_e4m3fn"}), "--kv-cache-dtype"),
    "numerics": (lambda h: setattr(h.model, "numerics", "6b17"), "start all with the same --deterministic"),
    "block_size": (lambda h: setattr(h, "block_size", 32), "--block-size"),
}
OWN: dict[str, Change] = {
    "context_length": lambda h: setattr(h.model, "context_length", 64),
    "weight_formats": lambda h: setattr(h.model, "weight_formats", "named otherwise by a later release"),
    "decoder": lambda h: setattr(h.model, "decoder", "transformers"),
    "cache_groups": lambda h: setattr(h, "cache_groups", 2),
    "prefix_positions": lambda h: setattr(h.model, "prefix_positions", 32),
    "num_slots": lambda h: setattr(h, "num_slots", 2),
    "num_blocks": lambda h: setattr(h, "num_blocks", 8),
    "max_step_tokens": lambda h: setattr(h, "max_step_tokens", 17),
    "max_depth": lambda h: setattr(h, "max_depth", 1),
    "tile_tokens": lambda h: setattr(h, "tile_tokens", 128),
    "step_costs": lambda h: h.step_costs.add(decode_rows=1, step_ns=1),
    "max_drafts": lambda h: setattr(h, "max_drafts", 7),
    "drafter": lambda h: setattr(h, "drafter", "ngram"),
    "max_sampled": lambda h: setattr(h, "max_sampled", 64),
    "num_host_blocks": lambda h: setattr(h, "num_host_blocks", 64),
    "block_bytes": lambda h: setattr(h, "block_bytes", 1 << 21),
    "load_block_ns": lambda h: setattr(h, "load_block_ns", 48_000),
    "offload_block_ns": lambda h: setattr(h, "offload_block_ns", 48_000),
    "naming_secret": lambda h: setattr(h, "naming_secret", bytes(16)),
    "has_experts": lambda h: setattr(h, "has_experts", True),
    "move_endpoint": lambda h: setattr(h, "move_endpoint", "tcp://10.0.0.7:50065"),
    "kv_format": lambda h: setattr(h, "kv_format", "block 16"),
    "move_memory": lambda h: setattr(h, "move_memory", "a host"),
    "role": lambda h: setattr(h, "role", "decode"),
    "ranks": lambda h: setattr(h, "ranks", 4),
    "epoch": lambda h: setattr(h, "epoch", 3),
    "lost_rank": lambda h: setattr(h, "lost_rank", "rank 1 was ended"),
    "device": lambda h: setattr(h, "device", "cuda:1"),
    "runner_id": lambda h: setattr(h, "runner_id", "second"),
    "eos in another order": lambda h: h.model.eos_token_ids.extend(h.model.eos_token_ids),
    "the fingerprint of numerics": lambda h: h.fingerprints.update({"numerics": "sm_80 bfloat16"}),
    "no fingerprints": lambda h: h.fingerprints.clear(),
    "a fingerprint of a later release": lambda h: h.fingerprints.update({"sampler": "2"}),
}


def unlike(change: Change) -> str:
    likeness, other = Likeness(), hello()
    likeness.learn(hello())
    change(other)
    return likeness.unlike(other, hello().block_size)


@pytest.mark.parametrize("what", UNLIKE)
def test_what_decides_answers_must_be_equal(what: str) -> None:
    change, says = UNLIKE[what]
    reason = unlike(change)
    assert says in reason and ": " in reason, reason


@pytest.mark.parametrize("what", OWN)
def test_what_is_its_own_may_differ(what: str) -> None:
    assert unlike(OWN[what]) == ""


def test_every_field_of_hello_and_model_is_decided_on() -> None:
    """A new field must be added here before it is served."""
    about_the_link = {"protocol_version", "term", "term_id", "features", "fingerprints", "model", "longest_context"}
    about_the_link |= {"move_key"}
    fields = {field.name for message in (plan_pb2.Hello, plan_pb2.Model) for field in message.DESCRIPTOR.fields}
    assert fields == about_the_link | (set(UNLIKE) | set(OWN)) & fields


def test_what_the_first_does_not_report_is_that_of_the_first_to_report_it() -> None:
    likeness, silent = Likeness(), hello()
    silent.fingerprints.clear()
    for one in (silent, hello()):
        assert likeness.unlike(one, None) == ""
        likeness.learn(one)
    other = hello()
    other.fingerprints["kv"] = "float8_e4m3fn"
    assert "'kv'" in likeness.unlike(other, None)
    other.fingerprints.update({"kv": "bfloat16", "numerics": "cpu float32"})
    assert likeness.unlike(other, None) == "" and "nearly tie" in likeness.doubt(other)
    assert likeness.doubt(silent) == likeness.doubt(hello()) == ""


def test_of_two_that_resume_at_once_the_second_is_checked_against_the_first() -> None:
    """Neither has joined when both say hello to a new scheduler."""
    stack = Stack()
    first, second = (Runner(HashBackend(vocab_size=size), f"r{size}") for size in (259, 300))
    stack.runners.connect(1, first, former=77, holds=True)
    stack.runners.connect(2, second, former=78, holds=True)
    with structlog.testing.capture_logs() as logs:
        stack.step()
        stack.step()
    assert list(stack.engine.pool.schedulers) == [1]
    assert "vocabulary has 300" in stack.runners.rejected[2]
    refused = [entry for entry in logs if entry["event"] == "a runner is refused"]
    assert [entry["reason"] for entry in refused] == [stack.runners.rejected[2]]

"""Builds a Request with its sequences from a worker's Submit."""

from __future__ import annotations

import secrets

import numpy as np

from roster_protos import engine_pb2
from scheduler_svc.model.prompt_logprobs import PromptLogprobs
from scheduler_svc.model.sequence import Request, Sequence
from scheduler_svc.model.token_log import token_log


def build_request(submit: engine_pb2.Submit, owner: bytes, first_sequence_id: int, now_s: float) -> Request:
    """Returns the request with its n sequences, not queued yet."""
    tokens, num_received = token_log(submit.prompt, submit.received), len(submit.received) // 4
    prompt_len = len(tokens) - num_received
    request = Request(
        handle=submit.handle,
        owner=owner,
        tenant=submit.tenant,
        request_id=submit.request_id,
        digest=submit.digest,
        body=submit.body,
        prompt=submit.prompt,
        prompt_len=prompt_len,
        num_received=num_received,
        sampling=submit.sampling,
        seed=submit.seed if submit.HasField("seed") else secrets.randbits(64),
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        arrival_s=now_s,
        deadline_s=now_s + submit.timeout_ms / 1000 if submit.HasField("timeout_ms") else None,
        ttft_target_ms=submit.ttft_target_ms if submit.HasField("ttft_target_ms") else None,
        itl_target_ms=submit.itl_target_ms if submit.HasField("itl_target_ms") else None,
        keep_s=submit.keep_ms / 1000,
        max_tokens=submit.max_tokens,
        stop_ids=frozenset(np.frombuffer(submit.sampling.stop_ids, "<i4").tolist()),
        grammar=submit.grammar,
        open_ended=submit.open_ended,
        prompt_logprobs=PromptLogprobs() if submit.sampling.HasField("prompt_logprobs") else None,
        grammar_kind=submit.grammar_kind,
        speculates=not submit.no_speculation,
        conversation_id=submit.conversation_id,
        kv_retain_s=submit.kv_retain_s if submit.HasField("kv_retain_s") else None,
        next_turn_s=submit.next_turn_s if submit.HasField("next_turn_s") else None,
    )
    limit = prompt_len + submit.max_tokens
    request.sequences = [
        Sequence(first_sequence_id + index, request, index, tokens[:], limit) for index in range(submit.n)
    ]
    return request

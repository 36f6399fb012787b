"""How long a sequence a runner can hold to its end."""

from __future__ import annotations

from roster_protos import plan_pb2


def most_tokens(hello: plan_pb2.Hello) -> int:
    """Most tokens, prompt and output, of one sequence that has the runner for itself.

    The pool holds the KV of all of them but the last, which needs none; the context is the runner's own, which may
    differ from that of others (0: the runner does not tell it).
    """
    in_pool = hello.num_blocks * hello.block_size + 1
    return min(in_pool, hello.model.context_length or in_pool)

"""Groups of kernels and the tests that check them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

_TESTS = Path("tests/gpu")


@dataclass(frozen=True, slots=True)
class Group:
    """Kernels, by their names after `__global__`, and the files of tests/gpu that launch them."""

    kernels: tuple[str, ...]
    files: tuple[str, ...]
    shards: int = 1
    """Number of runs among which the tests are divided."""
    but_not: str = ""
    """Excluded tests (pytest's -k): shapes that take minutes under the tools."""
    not_raced: str = ""
    """Further tests that racecheck excludes."""
    captures: bool = False
    """Whether tests allocate while they capture a graph, so that torch's memory cache must stay on."""

    def commands(self, tool: str, budget: float | None = None) -> list[list[str]]:
        """Returns the pytest command of each shard; `budget` is in seconds."""
        files = [str(_TESTS / f"{file}.py") for file in self.files]
        names = [self.but_not, self.not_raced if tool == "racecheck" else ""]
        expression = " or ".join(name for name in names if name)
        left_out = ["-k", f"not ({expression})"] if expression else []
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "bench.sanitizer.shard", "-o", "timeout=0"]
        pytest += [] if budget is None else ["--budget", str(budget)]
        return [[*pytest, "--shard", f"{index}/{self.shards}", *files, *left_out] for index in range(self.shards)]


GROUPS = {
    "norm": Group(("add_rms_norm", "residual_norm"), ("test_norm",)),
    "rope": Group(("rope_kv_write",), ("test_rope_kv",)),
    "gather": Group(("gather_inputs",), ("test_gather",)),
    "drafts": Group(
        ("accept_drafts", "expand_records", "gather_drafted", "ngram_draft", "place_drafts"),
        ("test_draft_kernels",),
    ),
    "verifying": Group(("accept_drafts", "ngram_draft", "place_drafts"), ("test_drafts",), shards=3, captures=True),
    "draft model": Group(
        ("accept_drafts", "place_drafts"), ("test_draft_model", "test_draft_states"), shards=4, captures=True
    ),
    "rotation": Group(("rotate_halves",), ("test_rotate_halves",)),
    "activation": Group(("activation_mul",), ("test_activation",)),
    "roster": Group(("copy_words", "scatter_segments"), ("test_slot_copies",)),
    "blocks": Group(("move_blocks",), ("test_blocks",), but_not="timed"),
    "shared memory": Group(("move_blocks",), ("test_shared_memory",)),
    "exchanges": Group(("one_shot_reduce", "one_shot_gather", "embed_part"), ("test_one_shot",)),
    "ranks": Group(
        ("one_shot_reduce", "one_shot_gather", "embed_part"),
        ("test_tensor_parallel",),
        not_raced="8b_shape",
        captures=True,
    ),
    "copied steps": Group(("move_blocks",), ("test_copied_steps",), captures=True),
    "sampling": Group(("sample", "adjust_logits"), ("test_sampling", "test_masked_sampling"), shards=3),
    "split": Group(("split_product",), ("test_split_product",)),
    "gated": Group(("gated_product",), ("test_gated_product",), shards=2, but_not="14336"),
    "products": Group(
        ("skinny_product", "embed"),
        ("test_skinny_product",),
        shards=6,
        but_not="14336 or 28672",
        not_raced="a_chain_that_overlaps",  # some 550 launches: did not end in 150 s
    ),
    "canonical products": Group(
        ("canonical_residual", "canonical_scales", "canonical_product", "log_softmax"),
        ("test_canonical_products",),
        shards=2,
    ),
    "deterministic": Group(
        ("canonical_residual", "canonical_scales", "canonical_product", "log_softmax", "skinny_product"),
        ("test_determinism",),
        shards=4,
        captures=True,
    ),
    "int4": Group(
        ("int4_product", "int4_stream", "int4_wide", "int4_dequantize"),
        ("test_int4_offsets", "test_int4_product"),
        shards=2,
        but_not="14336 or 28672",
    ),
    "fp8": Group(
        ("fp8_many", "fp8_norm", "fp8_product", "fp8_rows", "fp8_scale"),
        ("test_fp8_product",),
        shards=6,
        but_not="14336 or 28672",
        not_raced="a_chain_that_overlaps",
    ),
    "formats": Group(("fp8_product", "int4_product"), ("test_formats",), shards=4),
    "quantized": Group(("fp8_product", "int4_product"), ("test_quantized",), shards=2, captures=True),
    "experts": Group(
        (
            "expert_activate",
            "expert_combine",
            "expert_combine_norm",
            "expert_entry",
            "expert_gather",
            "expert_product",
            "expert_routing",
            "expert_tiles",
        ),
        ("test_experts",),
        shards=4,
        but_not="captured",
    ),
    "transformers": Group(
        ("paged_decode", "paged_prefill_hopper", "rotate_halves"),
        ("test_transformers_decoder",),
        shards=2,
        captures=True,
    ),
    "backend": Group(
        ("sample", "adjust_logits", "gather_inputs", "copy_words", "scatter_segments"),
        ("test_masked_rows", "test_cuda_backend"),
        shards=2,
        captures=True,
    ),
    "steps": Group(
        ("paged_decode", "paged_prefill_hopper", "skinny_product", "gated_product", "add_rms_norm", "rope_kv_write"),
        ("test_mixed_steps", "test_large_decode_variants"),
        shards=2,
        captures=True,
    ),
    "attention": Group(
        ("paged_decode", "paged_prefill_hopper", "paged_prefill"),
        ("test_attention",),
        shards=12,
        but_not="20000 or x4000",
    ),
    "canonical": Group(
        ("canonical_decode", "canonical_prefill", "paged_prefill_hopper"),
        ("test_canonical_attention",),
        shards=6,
        but_not="8192 or low",
    ),
    "verify": Group(("paged_decode", "paged_prefill_hopper"), ("test_verify_attention",), shards=4),
}

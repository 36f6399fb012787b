"""vLLM's n-gram drafts beside ours: the job runs in the site's environment, and its rounds are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.speculation.peer import answers, arguments_of, compared

VLLM = """
class SamplingParams:
    def __init__(self, **given):
        assert given["temperature"] == 0.0 and given["stop_token_ids"] == [9]
        self.most = given["max_tokens"]


class LLM:
    def __init__(self, **given):
        assert given.pop("skip_tokenizer_init") and given.pop("model") == "/model"
        self.drafts = given.get("speculative_config", {}).get("num_speculative_tokens", 0)
        if self.drafts > 5:
            raise ValueError("too many")

    def generate(self, prompts, sampling, use_tqdm):
        print("a line of its log")
        return [Output([*p["prompt_token_ids"], *range(self.drafts)][: sampling.most]) for p in prompts]


class Output:
    def __init__(self, token_ids):
        self.token_ids, self.outputs = token_ids, [self]
"""


def test_a_job_is_answered_with_and_without_drafts(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(VLLM)
    job = {"model": "/model", "ends": [9], "prompts": {"edit": [[1, 2], [3], [4]]}, "rows": [1, 2]}
    job |= {"max_tokens": 3, "rounds": 2}
    plain, drafted = (answers(tmp_path, {**job, "arguments": arguments_of(drafts, 2)}, 60) for drafts in (0, 2))
    assert [made["tokens"] for made in plain["edit", 2]] == [[[1, 2], [3], [4]]] * 2
    first, second = compared(plain, drafted, 2)
    assert (first["rows"], second["rows"], first["drafts"], first["parted"]) == (1, 2, 2, 3)
    assert first["gain"] > 0
    with pytest.raises(RuntimeError, match=r"vLLM ended with status 1: .*too many"):
        answers(tmp_path, {**job, "arguments": arguments_of(7, 2)}, 60)

"""Settings that a group of ranks can't be used with are refused with a sentence that says what to change."""

from __future__ import annotations

import pytest

from runner_svc.settings.runner_settings import RunnerSettings
from tests.support.in_this_process import run_runner


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--tensor-parallel=0",), "tensor_parallel"),
        (("--tensor-parallel=-2",), "tensor_parallel"),
        (("--tensor-parallel=65",), "tensor_parallel"),
        (("--tensor-parallel=two",), "tensor-parallel"),
        (("--rank-timeout-s=0",), "rank_timeout_s"),
        (("--tensor-parallel=2", "--device=null"), "the test backend 'null' has nothing to divide"),
        (("--tensor-parallel=2", "--decoder=transformers"), "set tensor_parallel to 1, or decoder to 'roster'"),
        (("--tensor-parallel=2", "--move-listen=127.0.0.1:0"), "leave move_listen out"),
        (("--nnodes=2",), "ranks on several hosts are not served yet: set it to 1"),
        (("--nnodes=0",), "nnodes"),
        (("--nnodes=2", "--tensor-parallel=2"), "ranks on several hosts are not served yet: set it to 1"),
        (("--rdzv-endpoint=node:29500", "--tensor-parallel=2"), "leave it out"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(flags: tuple[str, ...], told: str) -> None:
    ended = run_runner("--device=hash", *flags) if "--device=null" not in flags else run_runner(*flags)
    assert ended.returncode == 2
    assert told in ended.stderr.replace("_", "-") or told in ended.stderr, ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr


def test_ranks_are_allowed_with_other_settings() -> None:
    settings = RunnerSettings(tensor_parallel=4, device="hash", host_kv_tokens=64, draft="ngram", role="both")
    assert settings.tensor_parallel == 4

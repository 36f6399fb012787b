"""Settings that a group of ranks can't be used with are refused with a sentence that says what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner_svc.settings.runner_settings import RunnerSettings
from tests.support.in_this_process import run_runner

MEET = ("--rdzv-endpoint=127.0.0.1:29500",)


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
        (("--nnodes=0",), "nnodes"),
        (("--node-rank=-1",), "node_rank"),
        (("--nnodes=2", *MEET), "tensor_parallel is 1, which 2 nodes can't share equally"),
        (("--tensor-parallel=3", "--nnodes=2", *MEET), "set it to a multiple of nnodes"),
        (("--tensor-parallel=2", "--nnodes=2", "--node-rank=2", *MEET), "number the nodes from 0 to 1"),
        (("--tensor-parallel=2", "--nnodes=2"), "set it to the address of node 0 on all nodes"),
        (("--tensor-parallel=2", "--node-rank=1"), "leave node_rank out, or set nnodes to the number of hosts"),
        (("--tensor-parallel=2", *MEET), "leave rdzv_endpoint out, or set nnodes to the number of hosts"),
        (("--tensor-parallel=2", "--nnodes=2", "--rdzv-endpoint=node"), "'node' is not an address; write host:port"),
        (("--tensor-parallel=2", "--nnodes=2", "--rdzv-endpoint=127.0.0.1:0"), "which other nodes can't dial"),
        (("--tensor-parallel=2", "--nnodes=2", "--rdzv-endpoint=0.0.0.0:29500"), "which other nodes can't dial"),
        (("--tensor-parallel=2", "--nnodes=2", "--rdzv-endpoint=[::]:29500"), "which other nodes can't dial"),
        (("--tensor-parallel=2", "--nnodes=2", "--rdzv-endpoint=node0:29500"), "the same runner_key on all nodes"),
        (("--tensor-parallel=2", "--nnodes=2", *MEET, "--all-reduce=one-shot"), "set all_reduce to 'nccl'"),
        (("--tensor-parallel=2", "--nnodes=2", *MEET, "--launcher=ray"), "set nnodes to 1, or launcher to 'local'"),
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


def test_ranks_are_allowed_on_several_hosts(tmp_path: Path) -> None:
    settings = RunnerSettings(
        tensor_parallel=4, nnodes=2, node_rank=1, rdzv_endpoint="node0.example:29500",
        runner_key=tmp_path / "runner.key", scheduler_key=tmp_path / "scheduler.pub",
    )  # fmt: skip
    assert settings.node_rank == 1

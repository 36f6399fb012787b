"""What several ranks can't do on GPUs is refused by a sentence that says what to change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from roster_common.setting_sources import UnusableSettings
from runner_svc.gpu.ranks import placing
from runner_svc.gpu.ranks.refusals import refuse_on_gpus
from runner_svc.group.member import own_gpu_first
from runner_svc.interface.ranks import WHOLE, Shard
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.config_file import read_config
from tests.support.tiny_models import make_tiny_model


@dataclass
class Options:
    draft: str = ""
    shares_cache: bool = False
    deterministic: bool = False
    one_shot: bool = False


def config_of(family: str, folder: Path, **sizes: int) -> ModelConfig:
    return ModelConfig.from_hugging_face(read_config(make_tiny_model(family, folder / family, **sizes)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (Options(draft="ngram"), "draft is 'ngram', .*: set draft to ''"),
        (Options(shares_cache=True), "move_listen is set, .* set move_listen to ''"),
        (Options(deterministic=True), "set all_reduce to 'one-shot', or deterministic to false"),
    ],
)
def test_settings(options: Options, says: str, tmp_path: Path) -> None:
    config = config_of("llama", tmp_path)
    with pytest.raises(UnusableSettings, match=says):
        refuse_on_gpus(config, Shard(0, 2), options)
    refuse_on_gpus(config, WHOLE, options)
    refuse_on_gpus(config, Shard(0, 2), Options(deterministic=True, one_shot=True))


def test_models(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"norms all heads' queries together, .*set tensor_parallel to 1"):
        refuse_on_gpus(config_of("olmo2", tmp_path), Shard(1, 2), Options())
    with pytest.raises(UnsupportedModel, match=r"Experts of 64 columns have parts of 32 on 2 ranks.*multiples of 64"):
        refuse_on_gpus(config_of("qwen3-moe", tmp_path), Shard(0, 2), Options())
    refuse_on_gpus(config_of("qwen3-moe", tmp_path, moe_intermediate_size=128), Shard(0, 2), Options())


def test_ranks_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(placing, "GpuDevice", lambda capture_mode: made.append(capture_mode))
    with pytest.raises(
        UnusableSettings, match="tensor_parallel is 2, but this host has 1 GPU: set tensor_parallel to 1"
    ):
        placing.gpu_of(Shard(1, 2))
    placing.gpu_of(WHOLE)
    monkeypatch.setenv(placing.SHARING, "1")
    placing.gpu_of(Shard(1, 2))
    assert made == ["global", "thread_local"]


def test_a_rank_sees_its_own_gpu_first() -> None:
    assert [own_gpu_first(rank, 3) for rank in range(3)] == ["0,1,2", "1,2,0", "2,0,1"]
    assert [own_gpu_first(rank, 2, "4,7") for rank in range(2)] == ["4,7", "7,4"]
    assert [own_gpu_first(rank, 2, "5") for rank in range(2)] == ["5", "5"]

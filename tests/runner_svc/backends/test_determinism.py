"""With `deterministic`, a position's logits are equal in every bit however it is computed; without, they are not."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from roster_common.setting_sources import UnusableSettings
from runner_svc.arithmetic import check, functions, products
from runner_svc.arithmetic.instruction_set import LEVELS, widest
from runner_svc.arithmetic.known_numbers import known_numbers
from runner_svc.attention import canonical_check
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.backend_factory import build_backend
from tests.support.bit_probes import MODELS, PROBES, STORED, hash_of, known_model, library_bits
from tests.support.bit_walk import BLOCKS, Walk, load
from tests.support.host_backend import no_progress
from tests.support.logits_of_steps import different
from tests.support.ranked_backend import RankedBackend
from tests.support.thoroughness import choice, count
from tests.support.tiny_models import FAMILIES, make_tiny_model

pytestmark = pytest.mark.usefixtures("deterministic_cpu")

REFUSED = ("llama-dynamic",)
SERVED = [family for family in FAMILIES if family not in REFUSED]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", choice(SERVED, in_ci=["gemma2"]))
def test_logits_are_equal_in_every_bit(family: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    longer = {} if "rope" in str(FAMILIES[family][1]) else {"max_position_embeddings": 400}
    folder = make_tiny_model(family, tmp_path / family, seed, **longer)
    walk = Walk(load(folder), random.Random(seed))
    assert [walk.chunks(size) for size in choice((1, 3, 16, 100, 256), in_ci=(100,))] == [0] * count(5, in_ci=1)
    assert [walk.batches() for _ in range(count(10, in_ci=1))] == [0] * count(10, in_ci=1)
    assert (walk.hits(), walk.not_finite_behind()) == (0, 0)
    for threads in choice((1, 2, 3, 16), in_ci=(1,)):
        torch.set_num_threads(threads)
        assert walk.chunks(100) == 0, threads
    other = Walk(load(folder, num_blocks=BLOCKS + 7, block_size=32, num_slots=2), random.Random(seed))
    assert other.backend.model.numerics == walk.backend.model.numerics != ""
    assert different(other.wanted, walk.wanted) == 0
    plain = Walk(load(folder, deterministic=False), random.Random(seed))
    assert plain.backend.model.numerics == ""
    assert any(plain.batches() for _ in range(20)), "the same test finds differences with the mode off"
    assert torch.allclose(plain.wanted, walk.wanted, atol=1e-3)


@pytest.mark.parametrize("part", choice([*PROBES], in_ci=[part for part in PROBES if part not in MODELS[1:]]))
def test_a_change_of_bits_is_noticed(part: str) -> None:
    """A change of bits takes a new ORDER_VERSION, and new hashes."""
    got, library = hash_of(PROBES[part]()), library_bits()
    if library not in STORED:
        pytest.skip(f"no hash is stored for libraries and processors that compute {library}: {part} {got}")
    assert got == STORED[library][part], library


def test_numerics_say_how_many_ranks_add_up(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "llama", 0)
    sizes = {"num_blocks": 8, "block_size": 16, "num_slots": 2, "max_step_tokens": 64}
    found = [RankedBackend.load(folder, size, deterministic=True, **sizes).model.numerics for size in (1, 2, 2, 4)]
    assert found[1] == found[2] and len(set(found)) == 3 and all(found)


def test_what_is_not_invariant_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "llama", 0)
    dynamic = make_tiny_model("llama-dynamic", tmp_path / "dynamic", 0)
    for says, where, given in (
        ("dynamic RoPE", dynamic, {}),
        ("block_size is 48, which does not divide 256", folder, {"block_size": 48}),
        ("transformers computes this model", folder, {"decoder": "transformers"}),
    ):
        with pytest.raises(UnusableSettings, match=says):
            load(where, **given)
    for device in ("hash", "null"):
        with pytest.raises(UnusableSettings, match=r"deterministic is true, but .*set device to 'cpu'"):
            build_backend(RunnerSettings.read(deterministic=True), device, no_progress)
    settings = RunnerSettings.read(deterministic=True, quantization="fp8", model=str(folder), cache_dir=tmp_path)
    with pytest.raises(UnusableSettings, match="the weights are quantized"):
        build_backend(settings, "cpu", no_progress)


def test_numerics_depend_on_weights(tmp_path: Path) -> None:
    folder = known_model(tmp_path / "known")
    before = load(folder).model.numerics
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    assert load(folder).model.numerics != before
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 3] += 1e-3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert load(folder).model.numerics != before


def test_the_checks_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.check_functions([64]) == check.check_functions([64])
    monkeypatch.setitem(check.ELEMENTWISE, "silu", functional.silu)
    with pytest.raises(UnusableSettings, match="the bits of silu depend on the place of a number"):
        check.check_functions([64])
    weight = known_numbers(64, 48)
    with pytest.raises(UnusableSettings, match="the bits of a product with 48 columns depend on the number of rows"):
        products.least_rows(lambda x: (x @ weight.t()) * (1 + len(x) % 2 * 2.0**-20), 48)
    assert products.least_rows(lambda x: (x @ weight.t()) * 0 + (len(x) == 1), 48) == 2
    whole = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda x, y, out=None: whole(x + (256 not in y.shape) * 2.0**-20, y, out=out))
    assert canonical_check.checked_units(4, 2, 16, 16)[1] == 256
    monkeypatch.setattr(torch, "bmm", lambda x, y, out=None: whole(x + x.shape[1] % 3 * 2.0**-20, y, out=out))
    with pytest.raises(UnusableSettings, match="the bits of MKL's products in attention"):
        canonical_check.checked_units(4, 2, 16, 16)


def test_a_bias_is_added_behind_the_sum() -> None:
    weight, bias, x = known_numbers(50, 600), known_numbers(50, seed=1), known_numbers(20, 600)
    biased, plain = (products.canonical_product(weight, one) for one in (bias, None))
    assert all(torch.equal(biased(x[:count]), plain(x[:count]) + bias) for count in (1, 2, 20))


def test_long_rows_are_added_in_parts() -> None:
    x = known_numbers(3, 50_000)
    parts = functional.pad(x, (0, -50_000 % 256)).view(3, -1, 256).sum(dim=-1).sum(dim=-1, keepdim=True)
    assert torch.equal(functions.row_sum(x), parts)
    assert torch.allclose(functions.log_softmax(x), x.log_softmax(dim=-1), atol=1e-5)


def test_the_instruction_set_is_the_widest_of_two() -> None:
    both = {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
    assert [widest(flags) for flags in (both, both - {"avx512vl"}, {"sse4_1"})] == ["AVX512", "AVX2", ""]
    assert len({tuple(names) for names in LEVELS.values()}) == 1

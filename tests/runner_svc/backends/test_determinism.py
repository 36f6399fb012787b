"""With `deterministic`, a position's logits are equal in every bit however it is computed; without, they are not."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from roster_common.setting_sources import UnusableSettings
from runner_svc.arithmetic import check, functions, products
from runner_svc.arithmetic.instruction_set import LEVELS, widest
from runner_svc.arithmetic.known_numbers import known_numbers
from runner_svc.attention import canonical_check
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.backend_factory import build_backend
from tests.support.deterministic_cpu import NEEDS_TRIED_CPU
from tests.support.host_backend import no_progress
from tests.support.logits_of_steps import Part, Steps, different
from tests.support.thoroughness import choice, count
from tests.support.tiny_models import FAMILIES, NUM_TOKENS, make_tiny_model

pytestmark = NEEDS_TRIED_CPU

BLOCKS = 120
REFUSED = ("llama-dynamic",)
SERVED = [family for family in FAMILIES if family not in REFUSED]
STORED = {
    "b588d1187ab1e370": "3ee913cfb75dac27",  # AVX-512
    "8296fb3d17830e86": "6ce8734a4b801a07",  # AVX2
}
"""The logits' hash of a known model, by the hash of what torch, oneDNN and MKL compute on the machine that runs it."""


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def load(folder: Path, *, deterministic: bool = True, **sizes: Any) -> TorchBackend:
    sizes = {"num_blocks": BLOCKS, "block_size": 16, "num_slots": 8, "max_step_tokens": 512, **sizes}
    loaded = TorchBackend.load(
        str(folder), cache_folder=folder / "unused", progress=no_progress, deterministic=deterministic, **sizes
    )
    loaded.cache.data.fill_(torch.nan)  # so that reading an unwritten position shows
    return loaded


class Walk:
    """One sequence of random tokens, computed in several ways; `wanted` are its logits in one chunk."""

    def __init__(self, backend: TorchBackend, rng: random.Random) -> None:
        self.backend, self._rng, self._steps = backend, rng, Steps(backend)
        self._length = min(300, backend.model.context_length - 10)
        blocks = list(range(1, BLOCKS + 1))
        rng.shuffle(blocks)
        needed = -(-(self._length + 10) // 16)
        self._tables = [blocks[number * needed : (number + 1) * needed] for number in range(len(blocks) // needed)][:5]
        self._tokens = [self._random_tokens(self._length) for _ in self._tables]
        self.wanted = self._logits([self._part(0, 0, self._length)])[0]

    def _random_tokens(self, number: int) -> list[int]:
        return [self._rng.randrange(NUM_TOKENS) for _ in range(number)]

    def _part(self, sequence: int, start: int, end: int, drafts: Sequence[int] = ()) -> Part:
        return Part([*self._tokens[sequence][start:end], *drafts], start, self._tables[sequence])

    def _logits(self, parts: list[Part]) -> list[Tensor]:
        return self._steps.logits(parts, self._length)

    def chunks(self, size: int) -> int:
        """Returns the positions that differ when they are computed `size` at a time, over another prompt's cache."""
        starts = range(0, self._length, size)
        got = [self._logits([self._part(0, start, min(start + size, self._length))])[0] for start in starts]
        return different(torch.cat(got), self.wanted)

    def batches(self) -> int:
        """Returns the positions that differ in steps with chunks, decoding rows and drafts of other sequences."""
        places, got = [0] * len(self._tables), []
        while places[0] < self._length:
            parts, kept = [], 0
            for sequence in range(len(places)):
                most = self._length - places[sequence]
                number = min(self._rng.choice([1, 1, 1, 2, 8, 40, 130]), most)
                if not number:
                    continue
                drafts = self._random_tokens(self._rng.randint(0, 7)) if number == 1 else []
                parts.append(self._part(sequence, places[sequence], places[sequence] + number, drafts))
                places[sequence] += number
                kept = number if sequence == 0 else kept
            got.append(self._logits(parts)[0][:kept])
        return different(torch.cat(got), self.wanted)

    def hits(self) -> int:
        """Returns the positions behind each block of a prefix that another request has computed, which differ."""
        self.chunks(7)
        starts = range(16, self._length, 16)
        return sum(
            different(self._logits([self._part(0, start, min(start + 5, self._length))])[0], self.wanted[start:][:5])
            for start in starts
        )

    def not_finite_behind(self) -> int:
        """Returns whether a position differs before a draft whose values are not finite."""
        self._logits([self._part(0, 0, 20)])
        embeddings = self.backend._decoder.embeddings  # type: ignore[attr-defined]
        kept = embeddings[5].clone()
        embeddings[5] = torch.nan
        got = self._logits([self._part(0, 20, 21, [5, 5])])[0][:1]
        embeddings[5] = kept
        return different(got, self.wanted[20:21]) if self._tokens[0][20] != 5 else 0


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


def known_model(folder: Path) -> Path:
    """Returns a tiny Llama whose weights are the same numbers on every machine."""
    make_tiny_model("llama", folder, 0)
    tensors = load_file(folder / "model.safetensors")
    for index, name in enumerate(sorted(tensors)):
        tensors[name] = known_numbers(*tensors[name].shape, seed=index) * (0.1 if tensors[name].dim() > 1 else 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def library_bits() -> str:
    """Returns a hash of what torch, oneDNN and MKL compute here, with nothing of ours between."""
    digest, x = hashlib.blake2b(digest_size=8), known_numbers(64, 256)
    results = [function(x) for function in (torch.exp, torch.tanh, torch.cos, torch.sin, lambda x: (x + 3).log())]
    for rows, columns in ((128, 64), (192, 64), (64, 96), (272, 64), (64, 64)):
        packed = torch.ops.mkldnn._reorder_linear_weight(known_numbers(rows, columns), products.PACKED_ROWS)
        inputs = known_numbers(17, columns)
        results += [torch.ops.mkldnn._linear_pointwise(inputs, packed, None, "none", [], "")]
    for number in (3, 16):
        left = known_numbers(number, 16, 16)
        results += [torch.bmm(left, known_numbers(number, 16, 256)), torch.bmm(x.view(4, 16, 256), x.view(4, 256, 16))]
    results += [x.sum(dim=-1), x[:, :64].contiguous().sum(dim=-1)]
    for result in results:
        digest.update(result.numpy().tobytes())
    return digest.hexdigest()


def test_a_change_of_bits_is_noticed(tmp_path: Path) -> None:
    """A change of bits takes a new ORDER_VERSION, and new hashes here."""
    steps = Steps(load(known_model(tmp_path / "known")))
    tokens = [(index * 37 + 11) % 256 for index in range(90)]
    logits = steps.logits([Part(tokens, 0, list(range(1, 7)))])[0]
    got, library = hashlib.blake2b(logits.numpy().tobytes(), digest_size=8).hexdigest(), library_bits()
    if library not in STORED:
        pytest.skip(f"no hash is stored for libraries and processors that compute {library}: logits {got}")
    assert got == STORED[library], library


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
    for device in ("cuda", "hash", "null"):
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


def test_long_rows_are_added_in_parts() -> None:
    x = known_numbers(3, 50_000)
    parts = functional.pad(x, (0, -50_000 % 256)).view(3, -1, 256).sum(dim=-1).sum(dim=-1, keepdim=True)
    assert torch.equal(functions.row_sum(x), parts)
    assert torch.allclose(functions.log_softmax(x), x.log_softmax(dim=-1), atol=1e-5)


def test_the_instruction_set_is_the_widest_of_two() -> None:
    both = {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
    assert [widest(flags) for flags in (both, both - {"avx512vl"}, {"sse4_1"})] == ["AVX512", "AVX2", ""]
    assert len({tuple(names) for names in LEVELS.values()}) == 1

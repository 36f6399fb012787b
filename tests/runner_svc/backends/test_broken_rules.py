"""Each rule of docs/determinism.md broken on purpose is noticed: another hash, another sentence, or rows that differ.

Hashes are compared with those of the rule kept, which `test_determinism.py` compares with stored ones.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roster_common.setting_sources import UnusableSettings
from runner_svc.arithmetic import check, products
from runner_svc.arithmetic.instruction_set import LEVELS
from runner_svc.arithmetic.known_numbers import known_numbers, same_bits
from runner_svc.attention import canonical_check
from runner_svc.backends import determinism
from runner_svc.backends.torch_backend import TorchBackend
from tests.support.bit_probes import ALONE, MODELS, POSITIONS, PROBES, Attended, hash_of, known_model, of_model
from tests.support.bit_walk import Walk, load
from tests.support.broken_rules import Rule
from tests.support.known_texts import KnownTexts, Most, Stream, copies, stream_all
from tests.support.rule_breaks import RULES
from tests.support.thoroughness import FULL, choice

pytestmark = pytest.mark.usefixtures("deterministic_cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def backend(family: str) -> TorchBackend:
    return load(known_model(Path(mkdtemp()) / family, family))


def hashed(probe: Callable[[], Iterable[Any]]) -> str:
    """Returns the probe's hash, or the sentence with which a check at the start refuses."""
    try:
        return hash_of(probe())
    except UnusableSettings as error:
        return str(error)


def logits(family: str) -> str:
    return hash_of(of_model(backend(family)))


def rows_of_one_and_many(most: int) -> str:
    """Returns whether a product's rows are the same alone, with 19 others, and with more than 2,048."""
    weight, x = known_numbers(64, 48), known_numbers(most, 48)
    product = products.canonical_product(weight, None)
    whole = product(x)
    return str([same_bits(product(x[:count]), whole[:count]) for count in (1, 2, 20)])


@contextmanager
def kernel(changed: Callable[[int], bool]) -> Iterator[None]:
    """Simulates a machine whose packed product has other bits for the numbers of rows that `changed` names."""
    whole = torch.ops.mkldnn._linear_pointwise
    with pytest.MonkeyPatch.context() as patch:

        def product(x: Tensor, *args: Any) -> Tensor:
            y: Tensor = whole(x, *args)
            return y * (1 + 2.0**-20) if changed(len(x)) else y

        patch.setattr(torch.ops.mkldnn, "_linear_pointwise", product)
        patch.setattr(products, "_least_rows", {})
        yield


def alone() -> str:
    with kernel(lambda count: count == 1):
        return rows_of_one_and_many(20)


def beyond() -> str:
    with kernel(lambda count: count > 2048):
        return rows_of_one_and_many(2100)


def start_check(**machine: Callable[..., Tensor]) -> str:
    """Returns the sentence with which a check at the start refuses, or what it finds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in machine.items():
            patch.setattr(torch, name, function)
        try:
            check.check_functions([64])
            return str(canonical_check.checked_units(4, 2, 16, 16)[:2])
        except UnusableSettings as error:
            return str(error)


def bmm_by_rows() -> str:
    """The check on a machine whose bits depend on the number of queries, if that is no multiple of 4."""
    whole = torch.bmm

    def bmm(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        return whole(x + x.shape[1] % 4 * 2.0**-20, y, out=out)

    return start_check(bmm=bmm)


def bmm_by_keys() -> str:
    """The check on a machine whose bits depend on the number of keys."""
    whole = torch.bmm

    def bmm(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        return whole(x + (256 not in (x.shape[2], y.shape[2])) * 2.0**-20, y, out=out)

    return start_check(bmm=bmm)


def positions_alone() -> str:
    """Returns the layers of attention whose outputs differ between positions alone and one chunk."""
    attended = Attended()
    whole, single = attended.run([0], [POSITIONS]), attended.run(ALONE, [1] * len(ALONE))
    return str([same_bits(one[ALONE], other) for one, other in zip(whole, single, strict=True)])


def not_finite() -> str:
    return str(Walk(backend("llama"), random.Random(1), length=40).not_finite_behind())


def drafts() -> str:
    """Returns a hash of streams that draft, wrongly too."""
    plain = [Stream([5, 6, 7], 1, {"temperature": 1.0}), Stream([9, 8], 2)]
    drafted = copies(plain)
    stream_all(backend("llama"), plain, 6, None)
    drafter = KnownTexts(Most(1), 250, wrong=0.3)
    drafter.texts = {slot: stream.prompt + stream.tokens for slot, stream in enumerate(plain)}
    made = load(Path(backend("llama").model.name), drafter=drafter, max_drafts=3)
    stream_all(made, drafted, 6, Most(1))
    return str([same(*pair) for pair in zip(plain, drafted, strict=True)])


def same(one: Stream, other: Stream) -> bool:
    return one.tokens == other.tokens and np.array(one.logprobs).tobytes() == np.array(other.logprobs).tobytes()


def numerics() -> str:
    """Returns which changes of what the bits depend on change `numerics`."""
    loaded = backend("llama")
    folder = Path(loaded.model.name)
    config = loaded._decoder.config
    assert isinstance(config, determinism.ModelConfig)
    made = determinism.Determinism(folder, config, determinism.CanonicalArithmetic())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(determinism, "check_functions", lambda widths: b"functions")
        patch.setattr(determinism, "checked_units", lambda *sizes: (4, 32, b"attention"))
        before = made.numerics()
        changes: list[Callable[[], object]] = [
            lambda: patch.setattr(determinism, "check_functions", lambda widths: b"others"),
            lambda: patch.setattr(determinism, "checked_units", lambda *sizes: (4, 32, b"another")),
            lambda: patch.setattr(determinism, "ORDER_VERSION", "cpu-0"),
            lambda: patch.setattr(torch, "__version__", "1"),
            lambda: patch.setenv("MKL_CBWR", "COMPATIBLE"),
            lambda: patch.setattr(type(config), "rope_fingerprint", "another"),
            lambda: made.arithmetic._products.update(b"another"),
        ]
        found = []
        for change in changes:
            change()
            found.append(made.numerics() != before)
            before = made.numerics()
        for name in ("config.json", "model.safetensors"):
            kept = (folder / name).read_bytes()
            (folder / name).write_bytes(kept + b" ")
            found.append(made.numerics() != before)
            (folder / name).write_bytes(kept)
    return str(found)


FINDERS: dict[str, Callable[[], str]] = {
    **{name: partial(hashed, probe) for name, probe in PROBES.items() if name not in MODELS},
    **{family: partial(logits, family) for family in MODELS},
    "rows alone": alone,
    "rows beyond 2,048": beyond,
    "start check": start_check,
    "bmm by rows": bmm_by_rows,
    "bmm by keys": bmm_by_keys,
    "positions alone": positions_alone,
    "not finite": not_finite,
    "drafts": drafts,
    "numerics": numerics,
}
"""What each finds is a string that is the same as long as the rules are kept."""
kept = cache(lambda finder: FINDERS[finder]())


IN_CI = [rule for rule in RULES[::2] if rule.finder != "glm4-moe"]


@pytest.mark.parametrize("rule", choice(RULES, in_ci=IN_CI), ids=str)
def test_a_broken_rule_is_noticed(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kept(rule.finder)
    rule.broken(monkeypatch)
    assert FINDERS[rule.finder]() != right


def test_each_rule_is_broken_where_it_is_followed() -> None:
    """Of those, too, that only ROSTER_TEST_FULL=1 runs: each finds the part of the source that it replaces."""
    for rule in RULES:
        with pytest.MonkeyPatch.context() as patch:
            rule.broken(patch)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.skipif(not FULL, reason="starts a process")
def test_the_service_pins_before_torch_is_imported() -> None:
    question = "import sys, runner_svc.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", question], env=environment()).returncode == 0


@pytest.mark.skipif(not FULL, reason="imports torch in two processes")
def test_products_that_are_not_pinned_are_refused() -> None:
    """With MKL's code for AVX2 on Intel's processors; otherwise pinning makes no difference."""
    question = "from tests.support.deterministic_cpu import refusal; print(refusal())"
    avx2 = {**LEVELS["AVX2"], "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "2"}
    found = []
    for pinned in (False, True):
        variables = {**environment(), **avx2}
        if not pinned:
            del variables["MKL_CBWR"]
        asked = subprocess.run([sys.executable, "-c", question], env=variables, capture_output=True, text=True)
        assert not asked.returncode, asked.stderr
        found.append(asked.stdout.strip())
    if found == ["", ""] and "GenuineIntel" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("MKL's products are the same here, pinned or not")
    assert "the bits of MKL's products in attention depend" in found[0] and found[1] == ""

"""Every kind of GGUF file answers as transformers' model with its meaning does, or is refused with a sentence.

CI tries some cases of each outcome, ROSTER_TEST_FULL=1 all, with figures. With ROSTER_GGUF_ORACLE=1 each file is loaded
by transformers as well, to count how many of those that it serves rightly are served.
"""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.gguf import kept_blocks
from runner_svc.gguf.conversion import Conversion
from runner_svc.gguf.errors import GgufError
from runner_svc.gguf.tokenizer import tokenizer_json
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.gguf_conversion import converted_folder
from runner_svc.model.gguf_servable import why_not
from tests.support.gguf_bytes import GgufFile
from tests.support.gguf_cases import DROPPED, EFFECTS, REVIEWED, GgufCase, all_cases
from tests.support.greedy_driver import RandomDriver
from tests.support.parity import FLOAT32, Parity
from tests.support.thoroughness import FULL
from tests.support.tiny_gguf import load_back, tiny_gguf, tiny_model

SERVED_IN_CI, REFUSED_IN_CI = 12, 60
MAX_TOKENS = 8
TEXT = "the 42 cats don't  sing in <s> the <|im_end|> ing \xe9 <|user|> 12.5!"
ORACLE = os.environ.get("ROSTER_GGUF_ORACLE", "0") != "0"


def no_progress(what: str, share: float) -> None:
    pass


def drawn(cases: list[GgufCase], rng: random.Random) -> list[GgufCase]:
    if FULL:
        return cases
    served = [case for case in cases if case.refused is None]
    refused = [case for case in cases if case.refused is not None]
    return rng.sample(served, SERVED_IN_CI) + rng.sample(refused, REFUSED_IN_CI)


def test_every_file_answers_rightly_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(kept_blocks, "MOST_PLAIN_WEIGHTS", rng.choice([0, kept_blocks.MOST_PLAIN_WEIGHTS]))
    sweep = Sweep(tmp_path, rng)
    for case in drawn(all_cases(), rng):
        sweep.run(case)
    sweep.report()
    assert sweep.failures == []


def refusal(path: Path) -> str | None:
    """Why the file is refused, other than that the decoder lacks its architecture."""
    try:
        Conversion.plan(path)
    except GgufError as error:
        return str(error)
    said = why_not(path)
    return None if said is not None and " Architecture " in said else said


class Sweep:
    """Runs cases and counts outcomes."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder, self._rng = folder, rng
        self._models: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()
        self._lost: list[GgufCase] = []
        self._parity = Parity(None, FLOAT32)
        self.failures: list[str] = []

    def run(self, case: GgufCase) -> None:
        try:
            self._run(case)
        except Exception as error:
            self.failures.append(f"{case}: {type(error).__name__}: {error}"[:400])
            print(self.failures[-1])

    def report(self) -> None:
        self._parity.assert_few_ties()
        print(*(f"{outcome}: {count}" for outcome, count in sorted(self._counts.items())), sep="\n")
        if ORACLE:
            right = self._counts["transformers right, here served"]
            print(f"{right} of {right + len(self._lost)} that transformers answers rightly are served; not:")
            for case in self._lost:
                reasons = [reason for pattern, reason in REVIEWED.items() if re.search(pattern, case.name)]
                print(f"  {case}: {reasons[0] if reasons else 'not reviewed'}")
                if not reasons:
                    self.failures.append(f"{case}: not reviewed")
            assert right >= 0.9 * (right + len(self._lost))

    def _run(self, case: GgufCase) -> None:
        model = self._model(case)
        file = tiny_gguf(case.architecture, model)
        unchanged = file.copy()
        case.change(file)
        path = file.write(self._folder / "case.gguf")
        said = refusal(path)
        self._counts["served" if said is None else "refused"] += 1
        if case.refused is not None:
            assert said is not None, "served"
            assert re.search(case.refused, said), said
            assert said.count("\n") == 0 and said.endswith("."), said
            with pytest.raises(UnsupportedModel):
                converted_folder(path, self._folder / "cache", no_progress)
        else:
            assert said is None, said
            load_back(case.architecture, model, file)
            if why_not(path) is None:
                self._check_tokens(model, path)
            else:
                self._check_logits(model, path)
            self._check_text(case, unchanged, path)
        if ORACLE and str(10**9) not in case.name:  # transformers would build that many layers
            self._ask_transformers(case, model, path)

    def _model(self, case: GgufCase) -> Any:
        """Made once for each configuration; its numbers become those of the last file that was made of it."""
        name = f"{case.architecture} {case.overrides}"
        if name not in self._models:
            self._models[name] = tiny_model(case.architecture, **case.overrides)
        return self._models[name]

    def _check_tokens(self, model: Any, path: Path) -> None:
        vocab = model.config.vocab_size
        backend = TorchBackend.load(
            str(path),
            cache_folder=self._folder / "cache",
            progress=no_progress,
            num_blocks=16,
            block_size=16,
            num_slots=2,
            max_step_tokens=64,
        )
        prompts = [[self._rng.randrange(vocab) for _ in range(length)] for length in (5, 40)]
        streams = RandomDriver(backend, self._rng).generate(prompts, MAX_TOKENS, 30)
        self._parity.model = model
        self._parity.check(prompts, streams, MAX_TOKENS)

    def _check_logits(self, model: Any, path: Path) -> None:
        """Of an architecture that the decoder lacks: the folder is compared through transformers."""
        with tempfile.TemporaryDirectory() as folder:
            Conversion.plan(path).write(Path(folder), no_progress, "")
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.tensor([[self._rng.randrange(model.config.vocab_size) for _ in range(40)]])
        with torch.inference_mode():
            assert torch.allclose(theirs(ids).logits, model(ids).logits, atol=1e-4)

    def _check_text(self, case: GgufCase, unchanged: GgufFile, path: Path) -> None:
        changed = Conversion.plan(path)
        ends = changed.config.get("eos_token_id", [])
        ends = [ends] if isinstance(ends, int) else ends
        expected = [unchanged.keys["tokenizer.ggml.eos_token_id"]] if case.ends is None else list(case.ends)
        assert ends == expected
        if case.is_equal_text:
            before = Conversion.plan(unchanged.write(self._folder / "before.gguf"))
            stated = [tokenizer_json(one.tokenizer) for one in (before, changed)]
            tokenizers = [Tokenizer.from_str(json.dumps(one)) for one in stated]
            made = [tokenizer.encode(TEXT).ids for tokenizer in tokenizers]
            assert made[0] == made[1]
            texts = [tokenizer.decode(made[0]) for tokenizer in tokenizers]
            assert texts[0] == texts[1]

    def _ask_transformers(self, case: GgufCase, model: Any, path: Path) -> None:
        ids = torch.tensor([[self._rng.randrange(model.config.vocab_size) for _ in range(40)]])
        try:
            theirs = transformers.AutoModelForCausalLM.from_pretrained(
                str(path.parent),
                gguf_file=path.name,
                dtype=torch.float32,
                quantization_config=transformers.GgufConfig(dequantize=True),
            )
            with torch.inference_mode():
                error = float((theirs(ids).logits - model(ids).logits).abs().max())
            outcome = "right" if error < 1e-3 else "wrong"
        except Exception:
            outcome = "refused"
        here = "served" if case.refused is None else "refused"
        dropped = [f"{key} = {value}" for key, _, value in EFFECTS] if here == "refused" else []
        if case.name in dropped or (here == "refused" and re.match("|".join(DROPPED), case.name)):
            outcome = "wrong" if outcome == "right" else outcome
        self._counts[f"transformers {outcome}, here {here}"] += 1
        if outcome == "right" and here == "refused":
            self._lost.append(case)

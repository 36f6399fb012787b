"""Serves a tiny random model of each causal class of transformers through the engine: works, refused, or wrong.

`python -m tests.support.transformers_sweep [MODEL_TYPE ...]` prints a JSON object for each, computed in a process of
its own with a limit on its memory.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import structlog
import torch
import transformers

from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.model.errors import UnsupportedModel
from tests.support.in_process import Stack, Submitted
from tests.support.tested_backend import ModelBackend, poison
from tests.support.transformers_models import make_tiny, make_unloadable, names

MEMORY_BYTES = 9 << 30
SECONDS = 120
MAX_TOKENS = 14
VOCABULARY = range(3, 250)
BLOCKS, BLOCK_SIZE = 16, 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one class: `outcome` is "works", "refused", "wrong" or "failed"."""

    model_type: str
    name: str
    outcome: str
    why: str = ""
    preemptions: int = 0
    cached_tokens: int = 0


def serve_tiny(model_type: str, name: str, folder: Path, seed: int = 0) -> Verdict:
    """Serves a tiny model of the class, made in `folder`, and compares its tokens with those of `generate`."""
    try:
        make_tiny(model_type, name, folder, seed)
    except Exception as error:  # a part needs another package, or sizes that a small model can't have
        make_unloadable(model_type, name, folder)
        verdict = serve_folder(model_type, name, folder, seed)
        if verdict.outcome != "refused":
            raise AssertionError(f"no tiny model could be made of {model_type}: {error}") from error
        return verdict
    return serve_folder(model_type, name, folder, seed)


def serve_folder(
    model_type: str, name: str, folder: Path, seed: int = 0, loader: Callable[..., ModelBackend] | None = None
) -> Verdict:
    """Does that for a model that is there: chunks, prefix hits, preemptions, batches, two choices of one prompt."""
    try:
        backend = (loader or load)(folder, num_blocks=BLOCKS)
    except UnsupportedModel as error:
        return Verdict(model_type, name, "refused", str(error).replace(str(folder), "its folder"))
    rng = random.Random(seed)
    stack = Stack(depth=2, policy_parameters={"step_tokens": 9})
    session = stack.add_runner(backend)
    stem = [rng.choice(VOCABULARY) for _ in range(17)]
    for length, choices in ((14, 1), (21, 2), (3, 1), (17, 1), (26, 1)):
        tail = [rng.choice(VOCABULARY) for _ in range(12)]
        stack.submit((stem + tail)[:length], MAX_TOKENS, n=choices)
        for _ in range(rng.randrange(8)):
            stack.turn(rng)
    stack.run(rng)
    stack.assert_clean()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    wrong = []
    for request in stack.requests.values():
        prompt = prompt_of(request)
        own = generated(model, prompt, MAX_TOKENS)
        wrong += [len(prompt) for stream in request.streams if stream.tokens != own]
    scheduler = stack.engine.pool.schedulers[session]
    why = f"other tokens than generate's after prompts of {wrong} tokens" if wrong else ""
    return Verdict(model_type, name, "wrong" if wrong else "works", why, scheduler.preemptions, scheduler.cached_tokens)


def load(folder: Path, *, num_blocks: int) -> TorchBackend:
    """Loads a folder through transformers; its cache holds NaN, and it ends at no token."""
    backend = TorchBackend.load(
        str(folder),
        cache_folder=folder,
        progress=lambda what, share: None,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_slots=6,
        max_step_tokens=64,
        decoder="transformers",
    )
    poison(backend.cache.data)
    del backend.model.eos_token_ids[:]
    return backend


def prompt_of(request: Submitted) -> list[int]:
    """Returns its token ids."""
    prompt: list[int] = np.frombuffer(request.submit.prompt, "<i4").tolist()
    return prompt


def generated(model: torch.nn.Module, prompt: list[int], max_tokens: int) -> list[int]:
    """Returns the tokens of `generate` for a prompt alone."""
    ids = torch.tensor([prompt])
    output = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def sweep(pairs: list[tuple[str, str]]) -> Iterator[Verdict]:
    """Yields the verdict on each pair of model type and class, from a process of its own."""
    for model_type, name in pairs:
        yield _apart(model_type, name)


def _apart(model_type: str, name: str) -> Verdict:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        signal.alarm(SECONDS)
        try:
            with tempfile.TemporaryDirectory() as folder:
                verdict = serve_tiny(model_type, name, Path(folder))
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({place.filename}:{place.lineno})"
            verdict = Verdict(model_type, name, "failed", told)
        os.write(writing, json.dumps(asdict(verdict)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    return Verdict(**json.loads(content)) if content else Verdict(model_type, name, "failed", "its process died")


def main(asked: list[str]) -> None:
    """Prints the verdicts on all classes, or on those of the model types that are asked for."""
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for verdict in sweep([pair for pair in names() if not asked or pair[0] in asked]):
        print(json.dumps(asdict(verdict)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

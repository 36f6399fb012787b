"""Writes docs/models.md from a sweep over transformers' causal classes: `PYTHONPATH=. python docs/generate_models.py`.

It takes minutes. With the name of a file, it reads the verdicts from there: what
`python -m tests.support.transformers_sweep` has printed. With `--keep`, it keeps those of the page.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import transformers

from runner_svc.model.config import ARCHITECTURES
from tests.support.transformers_models import names
from tests.support.transformers_sweep import Verdict, sweep

PAGE = Path(__file__).resolve().parent / "models.md"
HEAD = """\
# Models

Roster's own decoder computes the architectures of the first table. All others go through `transformers`: its forward
pass of the model, over Roster's paged KV cache and attention. `--decoder` chooses (`auto`, `roster`, `transformers`);
`roster status`, `GetModel` and the runner's log say which one computes.

## Roster's own decoder

| architecture | model type |
| --- | --- |
"""
THEIRS = """
## Through transformers

A model is served this way if its class declares that its attention can be replaced, and if these hold. What does not is
refused at start, with a sentence.

- **Its state is keys and values.** State-space layers, linear attention, convolutions, cross-attention, and encoders
  are refused, as are [quantized checkpoints](quantization.md) and models with code of their own (`auto_map`).
- **Its masks are causal, or a causal sliding window.** The mask function of each layer is evaluated at chosen pairs of
  positions. Masks that a layer changes, and scores that an argument changes, are refused.
- **All layers have as many query heads.** The cache has one shape for all layers. Keys and values of unlike sizes are
  padded to the widest of them: expanded latent attention (192 and 128) takes 1.2 times the memory that it needs. Layers
  with fewer key-value heads than others, and layers that share those of another, store theirs several times.
- **It computes alone what it computes in a batch.** At start, four short rows are computed in chunks, with a prefix
  hit, in shared steps, and compared with each row through the model's own eager attention. They may differ by twice
  what its own SDPA attention differs by. Its `generate` must agree with its forward pass, too.
- **Every tensor is used.** A tensor that is missing, unknown or of another shape is refused by name. Keys of
  config.json that the class does not know are named in the log. The file is mapped and its layers are packed one after
  another: 1.24 GB of float32 weights took 1.22 GB of memory beside the file.

On a CPU, a decode step of SmolLM2-135M takes 1.2 times that of Roster's own decoder, alone and in a batch of 8.

On a GPU, RMSNorm, gated MLPs, the rotation of queries and keys and the product with the head are swapped for Roster's
kernels where these compute the same numbers, and steps replay CUDA graphs where the forward pass can be captured. The
log says what was swapped, and why steps are not captured. The KV cache is in 16 bits. On one H200, the decode step of
Llama-3.1-8B's shape takes 5.18 / 5.50 / 7.11 / 13.99 ms with 1 / 8 / 64 / 256 sequences, 1.22 / 1.25 / 1.18 / 1.10
times that of Roster's own decoder on another card in the same hour (`python -m bench.steps --variants transformers`).
The table of classes below is of a CPU; on an H200, tiny models of ten dense classes gave the tokens of `generate`.

RoPE whose frequencies depend on the length of a text (`dynamic`, `longrope`) is computed row by row, by both decoders.
The length that counts is the prompt's, or that of the text so far where it is longer. Keys that are cached keep the
frequencies that they have, as in `generate`. Phi-3 and PhiMoE with `longrope` are served up to
`original_max_position_embeddings` positions, as their `generate` computes the whole cache again at that length. Of a
multimodal model, the text part is served; its other parts take memory.
Layers with a sliding window keep the blocks that have left the window until the sequence ends: a sequence has one block
table for all layers. For a model with windows of 1,024 in five of six layers, as Gemma 3, at 32,768 tokens that is 5.2
times the memory that its layers read. Groups of layers with a block table of their own (`Hello.cache_groups`) would
free them; there is one group today.

The table comes from a sweep: a tiny random model of each class, served by the engine on a CPU with chunked prompts,
prefix hits, preemptions, batches and two choices of one prompt. "Works" means that its greedy tokens are those of its
own `generate`. `docs/generate_models.py` writes this page.

"""


def kept(content: str) -> list[Verdict]:
    """Returns the verdicts of a page."""
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| (\w+)(?:: (.*))? \|$", content, re.MULTILINE)
    return [Verdict(kind, name, outcome, why.replace("\\|", "|")) for kind, name, outcome, why in rows]


def page(verdicts: Iterable[Verdict], title: str | None = None) -> str:
    """Returns the whole page; `title` stands above its table of verdicts."""
    own = "\n".join(f"| `{name}` | `{architecture.model_type}` |" for name, architecture in ARCHITECTURES.items())
    rows = sorted(verdicts, key=lambda verdict: (verdict.model_type, verdict.name))
    counts = Counter(verdict.outcome for verdict in rows)
    verbs = {"works": "work", "refused": "are refused"}
    told = ", ".join(f"{count} {verbs.get(outcome, outcome)}" for outcome, count in counts.most_common())
    table = "\n".join(
        f"| `{row.model_type}` | `{row.name}` | {row.outcome}{': ' + reason(row) if row.why else ''} |" for row in rows
    )
    title = title or f"transformers {transformers.__version__}: {len(rows)} classes, {told}."
    return f"{HEAD}{own}\n{THEIRS}{title}\n\n| model type | class | outcome |\n| --- | --- | --- |\n{table}\n"


def reason(row: Verdict) -> str:
    """Returns why it is refused, without what the row says already."""
    why = row.why.removeprefix(f"{row.name} is not served: ").splitlines()[0]
    return why.replace("|", "\\|").replace("`pip install", "`pip` `install")  # no command of this project


def main(arguments: list[str]) -> None:
    """Writes the page."""
    if arguments == ["--keep"]:
        content = PAGE.read_text("utf-8")
        title = next(line for line in content.splitlines() if line.startswith("transformers "))
        PAGE.write_text(page(kept(content), title), "utf-8")
    elif arguments:
        lines = Path(arguments[0]).read_text("utf-8").splitlines()
        PAGE.write_text(page(Verdict(**json.loads(line)) for line in lines if line), "utf-8")
    else:
        PAGE.write_text(page(sweep(names())), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

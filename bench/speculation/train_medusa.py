"""Trains Medusa heads for a model on its own answers: `python -m bench.speculation.train_medusa --out FOLDER`.

The model makes up prompts and answers them, in rounds of `--rows`; other rounds have tasks about its own texts. Then
the heads are trained on the cached states of the answers, and tried on texts that were kept apart. The number of
answers decides how often heads are right: see docs/speculation.md. The defaults are for a GPU, about a minute on an
H200; on a CPU, lower `--rows` and `--batch`, and give it more time.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch

from bench.common.on_gpu import require_gpu
from bench.speculation.medusa_training import Heads, accuracy, examples_of, save, train
from bench.speculation.own_answers import Answer, Writer, message_frame
from roster_protos import inference_pb2
from runner_svc.catalog.source import model_folder
from runner_svc.model.config import ModelConfig
from runner_svc.model.description import describe_model
from runner_svc.model.folder.config_file import read_config
from runner_svc.settings.runner_settings import default_cache_folder
from scheduler_svc.front.text.tokenizer import ModelText


def written(options: argparse.Namespace, model: object, text: ModelText, end: int) -> list[Answer]:
    """Returns what the model writes in all rounds."""

    def encode(message: str) -> list[int]:
        return list(text.encode_prompt(inference_pb2.Prompt(user_message=message)))

    frame = message_frame(encode)
    inner = len(encode("a")) - 1 - sum(map(len, frame))
    assert not inner, "the template changes the message"
    began, writer = time.monotonic(), Writer(model, frame, end, options.seed)
    texts: list[Answer] = []
    for number in range(options.rounds):
        if number % options.fresh == 0:
            messages = writer.messages(options.rows, options.prompt_tokens)
        else:
            messages = writer.tasks(
                random.Random(number).sample(texts, min(options.rows, len(texts))),
                lambda words: encode(words)[len(frame[0]) : len(encode(words)) - len(frame[1])],
                options.prompt_tokens,
            )
        temperature = options.temperature if number % 4 > 1 else 0.0
        texts += writer.answers(messages, options.answer_tokens, temperature)
        tokens = sum(len(one.tokens) for one in texts)
        print(f"round {number}, {time.monotonic() - began:.0f} s: {len(texts)} texts, {tokens} tokens", flush=True)
        if time.monotonic() - began > options.write_s:
            break
    return [one for one in texts if len(one.tokens) > 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as the runner's setting")
    parser.add_argument("--base", help="what the heads' config.json calls the model; default: --model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the heads")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2048, help="texts of a round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--fresh", type=int, default=2, help="every round of this number has prompts that it makes up")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=224)
    parser.add_argument("--temperature", type=float, default=0.0, help="of every second pair of rounds")
    parser.add_argument("--write-s", type=float, default=30, help="seconds after which no further round begins")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument(
        "--rivals", type=int, default=0, help="random ids beside those of a batch; 0: the whole vocabulary"
    )
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.1, help="share of a state's elements that are dropped")
    parser.add_argument("--train-s", type=float, default=20, help="most seconds of training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    require_gpu(options.device, kernels=False)
    torch.set_num_threads(options.threads)
    from transformers import AutoModelForCausalLM

    folder = model_folder(options.model, default_cache_folder(), lambda what, share: None)
    config = ModelConfig.from_hugging_face(read_config(folder))
    description = describe_model(
        options.model, folder, config, "trained", default_cache_folder(), lambda what, share: None
    )
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype).to(options.device).eval()
    text = ModelText(description)
    texts = written(options, model, text, description.eos_token_ids[0])
    text.close()
    random.Random(options.seed).shuffle(texts)
    apart = max(1, min(128, len(texts) // 10))
    learnt, tried = (examples_of(part, options.heads) for part in (texts[apart:], texts[:apart]))
    print(f"{len(learnt.states)} examples, {len(tried.states)} apart", flush=True)
    heads = Heads(options.heads, config.hidden_size).to(options.device)
    head = model.get_output_embeddings().weight.detach()
    sizes = {"steps": options.steps, "batch": options.batch, "rivals": options.rivals}
    train(heads, learnt, head, rate=options.rate, seconds=options.train_s, dropout=options.dropout, **sizes)
    for name, shares in zip(("alone", "with all before"), accuracy(heads, tried, head), strict=True):
        print(f"right {name}: {' '.join(f'{share:.3f}' for share in shares)}")
    save(heads, options.out, options.base or options.model)


if __name__ == "__main__":
    main()

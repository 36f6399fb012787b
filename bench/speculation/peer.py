"""Measures vLLM's n-gram drafts on the prompts of `bench.speculation`: `python -m bench.speculation.peer --site DIR`.

Run it beside `python -m bench.speculation --service --device cuda` on the same card. DIR has vLLM, as `--peer-site` of
`bench.gpu_comparison`. vLLM fixes at its start what drafts and how many tokens, so it is started twice for each number
of `--drafts`: without drafts and with them. The prompts are cached before, as there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common.on_gpu import require_gpu
from bench.common.provenance import provenance, write_results
from bench.gpu_comparison.peers.site import WORK, Unusable, environment, found_site, unpacked_site, version
from bench.speculation import vllm_answers
from bench.speculation.prompts import PROMPTS
from roster_protos import inference_pb2
from runner_svc.catalog.source import model_folder
from runner_svc.model.config import ModelConfig
from runner_svc.model.description import describe_model
from runner_svc.model.folder.config_file import read_config
from runner_svc.settings.runner_settings import default_cache_folder
from scheduler_svc.front.text.tokenizer import ModelText

LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 1}
"""Lengths of a match in vLLM; Roster's are in `runner_svc.drafting.ngram`."""

Cases = dict[tuple[str, int], list[dict[str, Any]]]
"""The rounds of each task and number of rows, as `vllm_answers` prints them."""


def arguments_of(drafts: int, rows: int) -> dict[str, Any]:
    """Returns vLLM's arguments; without `drafts` it drafts nothing."""
    arguments: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": rows}
    arguments |= {"gpu_memory_utilization": 0.4, "enable_prefix_caching": True}
    if drafts:
        arguments["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts, **LOOKUP}
    return arguments


def answers(site: Path, job: Mapping[str, Any], timeout_s: float) -> Cases:
    """Runs a job in the site's environment. Raises RuntimeError with vLLM's last lines if it fails."""
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".json", dir=WORK) as file:
        json.dump(job, file)
        file.flush()
        script = Path(vllm_answers.__file__).resolve()
        command = [*environment(site), sys.executable, str(script), file.name]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if ended.returncode:
        raise RuntimeError(f"vLLM ended with status {ended.returncode}: {' | '.join(ended.stderr.splitlines()[-6:])}")
    cases: Cases = defaultdict(list)
    for line in ended.stdout.splitlines():
        if line.startswith("{"):
            made = json.loads(line)
            cases[made["task"], made["rows"]].append(made)
    return cases


def compared(plain: Cases, drafted: Cases, drafts: int) -> list[dict[str, Any]]:
    """Returns a record of each case; `gain` is the median of the rounds' ratios."""
    records = []
    for (task, rows), without in plain.items():
        pairs = list(zip(without, drafted[task, rows], strict=True))
        records.append(
            {
                "task": task,
                "rows": rows,
                "drafts": drafts,
                "plain": round(statistics.median(_rate(one) for one in without), 2),
                "with drafts": round(statistics.median(_rate(other) for _, other in pairs), 2),
                "gain": round(statistics.median(_rate(other) / _rate(one) for one, other in pairs), 3),
                "parted": sum(a != b for a, b in zip(pairs[-1][0]["tokens"], pairs[-1][1]["tokens"], strict=True)),
            }
        )
    return records


def _rate(made: Mapping[str, Any]) -> float:
    return float(sum(map(len, made["tokens"])) / made["seconds"])


def job_of(name: str, tasks: Sequence[str]) -> dict[str, Any]:
    """Returns the parts of a job that depend on the model."""
    cache = default_cache_folder()
    folder = model_folder(name, cache, lambda what, share: None)
    config = ModelConfig.from_hugging_face(read_config(folder))
    model = describe_model(name, folder, config, "peer", cache, lambda what, share: None)
    text = ModelText(model)
    prompts = {
        task: [list(text.encode_prompt(inference_pb2.Prompt(user_message=prompt))) for prompt in PROMPTS[task]]
        for task in tasks
    }
    text.close()
    return {"model": str(folder), "ends": list(model.eos_token_ids), "prompts": prompts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, required=True, help="folder with vLLM, or with its archive")
    parser.add_argument("--model", default="smollm2", help="as the runner's setting")
    parser.add_argument("--tasks", nargs="+", choices=[*PROMPTS], default=[*PROMPTS])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="prompts at a time")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3], help="tokens that vLLM drafts in each step")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=240.0, help="of each of vLLM's runs")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    require_gpu("cuda", kernels=False)
    try:
        site = unpacked_site(found_site(options.site))
    except Unusable as error:
        sys.exit(str(error))
    job = job_of(options.model, options.tasks)
    job |= {"rows": options.rows, "max_tokens": options.max_tokens, "rounds": options.rounds}

    def run(drafts: int) -> Cases:
        return answers(site, {**job, "arguments": arguments_of(drafts, max(options.rows))}, options.timeout_s)

    plain, records = run(0), []
    print(f"vLLM {version(site)}\n| task | rows | drafts | tokens/s without | with | gain | answers that part |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for drafts in options.drafts:
        for record in compared(plain, run(drafts), drafts):
            print(f"| {' | '.join(str(value) for value in record.values())} |", flush=True)
            records.append(record)
    if options.json:
        source = provenance("bench.speculation.peer", ("torch",))
        write_results(options.json, source, {"vllm": version(site), "cases": records})


if __name__ == "__main__":
    main()

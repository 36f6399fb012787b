"""Answers prompts with vLLM, in its own environment: `python bench/speculation/vllm_answers.py JOB.json`.

A job has the model's folder, arguments of vLLM's `LLM`, and by task the prompts, as token ids. For each number of rows
and each task it prints a line of JSON: the task, the rows, the seconds and the answers. Imports nothing of Roster.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any


def answered(job: dict[str, Any]) -> None:
    """Prints the answers of a job; before each task is timed, a token of each answer is made, which caches prompts."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=job["model"], skip_tokenizer_init=True, **job["arguments"])

    def answers(prompts: list[list[int]], most: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=most, detokenize=False, stop_token_ids=job["ends"])
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    for rows in job["rows"]:
        for task, prompts in job["prompts"].items():
            groups = [prompts[at : at + rows] for at in range(0, len(prompts), rows)]
            for group in groups:
                answers(group, 1)
            for number in range(job["rounds"]):
                began = time.perf_counter()
                tokens = [line for group in groups for line in answers(group, job["max_tokens"])]
                seconds = time.perf_counter() - began
                line = {"task": task, "rows": rows, "round": number, "seconds": seconds, "tokens": tokens}
                print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    answered(json.loads(parser.parse_args().job.read_text()))


if __name__ == "__main__":
    main()

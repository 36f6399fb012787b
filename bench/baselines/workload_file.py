"""A workload as a file, so that a system in another process gets the same token ids at the same times.

JSON Lines: a header, then one request per line; fields are those of `roster_client.bench.load.workload`.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from roster_client.bench.load.workload import LoadRequest, TokenIds, Workload


def write_workload(path: Path, workload: Workload) -> None:
    """Writes the workload. Raises TypeError for text prompts, because the baselines have no tokenizer."""
    lines = [_plain(workload, leave_out="requests"), *map(_plain, workload.requests)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_workload(path: Path) -> Workload:
    """Reads a workload. Raises ValueError or TypeError if the file is not one."""
    facts, *lines = map(json.loads, path.read_text().splitlines())
    requests = (LoadRequest(**line | {"prompt": np.array(line["prompt"], np.int32)}) for line in lines)
    return Workload(**facts | {"notes": tuple(facts["notes"]), "requests": tuple(requests)})


def _plain(part: Workload | LoadRequest, leave_out: str = "") -> dict[str, Any]:
    values = {one.name: getattr(part, one.name) for one in fields(part) if one.name != leave_out}
    if isinstance(part, LoadRequest):
        values["prompt"] = token_ids(part).tolist()
    return values


def token_ids(request: LoadRequest) -> TokenIds:
    """Returns the request's prompt. Raises TypeError if it is text."""
    if isinstance(request.prompt, str):
        raise TypeError(f"the prompt of request {request.request_id} is a text; the baselines need token ids")
    return request.prompt

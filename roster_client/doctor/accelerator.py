"""Checks the GPU in a process of its own, because a broken driver may end or hang the process that asks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from roster_client.doctor.findings import Finding, State
from roster_common.extras import TEST_DEVICES

LONGEST_S = 120.0
_QUESTION = """
import json, torch
from runner_svc.startup.gpu_probe import gpu_obstacle
from runner_svc.startup.versions import versions
obstacle = gpu_obstacle()
found = {"versions": versions().splitlines()[1:], "why": "", "todo": "", "here": True}
if obstacle is not None:
    found |= {"why": obstacle.why, "todo": obstacle.remedy, "here": obstacle.gpu_is_here}
else:
    free, total = torch.cuda.mem_get_info()
    found["free"] = free / total
print(json.dumps(found))
"""


def gpu(device: str) -> list[Finding]:
    """Returns what torch and CuPy find, for a runner with this setting `device`."""
    if device in TEST_DEVICES:
        return []
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _QUESTION], capture_output=True, text=True, timeout=LONGEST_S, check=True
        )
        found = json.loads(asked.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        text = f"the driver did not answer within {LONGEST_S:g} s"
        return [Finding("GPU", State.PROBLEM, text, "check nvidia-smi, and restart the machine")]
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no output"])[-1]
        todo = "pip install 'roster-serve[runner]', or check the driver with nvidia-smi"
        return [Finding("GPU", State.PROBLEM, f"it can't be asked ({last})", todo)]
    except (ValueError, IndexError) as error:
        return [Finding("GPU", State.PROBLEM, f"its answer can't be read ({error})")]
    return [Finding("CUDA", State.OK, "; ".join(found["versions"])), _card(found, device)]


def _card(found: dict[str, Any], device: str) -> Finding:
    if not found["why"]:
        share = found["free"]
        state = State.OK if share > 0.5 else State.WARNING
        todo = "" if share > 0.5 else "end other programs that use the GPU, or lower gpu_memory"
        return Finding("GPU", state, f"usable, {share:.0%} of its memory free", todo)
    if device == "cpu":
        return Finding("GPU", State.NOTE, f"{found['why']}; device is 'cpu'")
    if device == "cuda":
        return Finding("GPU", State.PROBLEM, found["why"], found["todo"] or "set device to 'cpu'")
    state = State.WARNING if found["here"] else State.NOTE
    return Finding("GPU", state, f"{found['why']}; the model would run on the CPU", found["todo"])

"""Writes deploy/kubernetes/*.yaml: the chart rendered with its default values, one file for each template.

python deploy/helm/generate_manifests.py HELM       # HELM: the program; `make manifests` downloads it
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "roster"
MANIFESTS = ROOT / "deploy" / "kubernetes"
HEADER = "# Generated from deploy/helm/roster by `make manifests`.\n"
SOURCE = re.compile(r"^---\n# Source: roster/templates/(\S+)\n", re.M)


def rendered(helm: str | Path, *options: str) -> str:
    """Returns the output of `helm template` for the release `roster`. Raises CalledProcessError if helm refuses."""
    command = [str(helm), "template", "roster", str(CHART), "--namespace", "roster", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def manifests(helm: str | Path) -> dict[str, str]:
    """Returns the text of each manifest by its file's name, with the objects in the order that helm installs them."""
    _, *parts = SOURCE.split(rendered(helm))
    objects: dict[str, list[str]] = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        objects.setdefault(name, []).append(text.rstrip("\n") + "\n")
    return {name: HEADER + "---\n".join(texts) for name, texts in objects.items()}


if __name__ == "__main__":
    for file, text in manifests(sys.argv[1]).items():
        (MANIFESTS / file).write_text(text, "utf-8")

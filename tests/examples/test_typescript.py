"""The TypeScript backend of examples/, built with the commands of its page, with a real Roster."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chat_backend import ChatBackend, ChatBackendTests, chat_backend, roster_for_backends

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is missing: apt-get install npm")


def built(folder: Path) -> Path:
    """Returns the compiled program; the working tree is not changed."""
    example = folder / "examples" / "typescript"
    outputs = shutil.ignore_patterns("node_modules", "dist", "generated")
    shutil.copytree(ROOT / "examples" / "typescript", example, ignore=outputs)
    shutil.copytree(ROOT / "protos", folder / "protos", ignore=shutil.ignore_patterns("*.py*"))
    for command in (["npm", "ci", "--no-audit", "--no-fund"], ["npm", "run", "build"]):
        done = subprocess.run(command, cwd=example, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
    return example / "dist" / "server.js"


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatBackend]:
    program = built(tmp_path_factory.mktemp("build"))
    with (
        roster_for_backends(tmp_path_factory.mktemp("roster")) as roster,
        chat_backend(["node", str(program)], roster) as backend,
    ):
        yield backend


class TestTypeScript(ChatBackendTests):
    """The tests of the base class, with the TypeScript backend."""

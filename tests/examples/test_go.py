"""The Go backend of examples/, with a real Roster.

Built without a module proxy, with Debian's golang-go golang-google-grpc-dev golang-google-protobuf-dev
protobuf-compiler protoc-gen-go-1-5 protoc-gen-go-grpc. That grpc depends on an old github.com/golang/protobuf, which
fails on current generated code; ROSTER_GO_PATH names a GOPATH with a newer one (golang-github-golang-protobuf-1-5-dev,
unpacked by dpkg -x, has it in usr/share/gocode).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chat_backend import ChatBackend, ChatBackendTests, chat_backend, roster_for_backends

ROOT = Path(__file__).resolve().parents[2]
GO_PATH = os.environ.get("ROSTER_GO_PATH")
TOOLS = ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
LIBRARIES = Path("/usr/share/gocode")

pytestmark = pytest.mark.skipif(
    GO_PATH is None or not all(map(shutil.which, TOOLS)),
    reason=f"needs {', '.join(TOOLS)} and ROSTER_GO_PATH, see above",
)


def built(folder: Path) -> Path:
    """Returns the program, compiled against the libraries of the distribution."""
    shutil.copytree(ROOT / "protos", folder / "src" / "protos", ignore=shutil.ignore_patterns("*.py*"))
    example = folder / "src" / "examples" / "roster-backend"
    shutil.copytree(ROOT / "examples" / "go", example, ignore=shutil.ignore_patterns("rosterpb"))
    generate = ["go", "generate"]
    subprocess.run(generate, cwd=example, check=True, timeout=60, env=os.environ | {"GO111MODULE": "off"})
    (folder / "src" / "roster-backend").symlink_to(example)
    environment = os.environ | {"GO111MODULE": "off", "GOPATH": f"{folder}:{GO_PATH}:{LIBRARIES}", "GOFLAGS": ""}
    build = ["go", "build", "-o", str(folder / "backend"), "roster-backend"]
    done = subprocess.run(build, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder / "backend"


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatBackend]:
    program = built(tmp_path_factory.mktemp("build"))
    with (
        roster_for_backends(tmp_path_factory.mktemp("roster")) as roster,
        chat_backend([str(program)], roster) as backend,
    ):
        yield backend


def test_the_source_is_formatted() -> None:
    listed = subprocess.run(["gofmt", "-l", str(ROOT / "examples" / "go")], capture_output=True, text=True, check=True)
    assert listed.stdout == ""


class TestGo(ChatBackendTests):
    """The tests of the base class, with the Go backend."""

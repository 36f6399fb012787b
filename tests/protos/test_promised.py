"""The public protos stay compatible with promised.binpb (`make buf`), and a breaking change is found."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from tests.support.staged_protos import staged

ROOT = Path(__file__).resolve().parents[2]
BUF = ROOT / ".cache" / "buf" / "node_modules" / ".bin" / "buf"
PUBLIC = ("--path", "roster_protos/inference.proto", "--path", "roster_protos/admin.proto")

needs_buf = pytest.mark.skipif(not BUF.exists(), reason="buf is not here: `make buf` brings it, with npm")


def breaking(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [BUF, "breaking", *PUBLIC, "--against", str(ROOT / "protos" / "promised.binpb")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def changed(tmp_path: Path, file: str, old: str, new: str) -> Path:
    """Returns a copy of the protos with `old` replaced by `new`."""
    path = staged(tmp_path) / "roster_protos" / file
    source = path.read_text("utf-8")
    assert source.count(old) == 1
    path.write_text(source.replace(old, new), "utf-8")
    return tmp_path


def test_both_public_files_are_promised() -> None:
    promised = descriptor_pb2.FileDescriptorSet.FromString((ROOT / "protos" / "promised.binpb").read_bytes())
    services = {f"{file.package}.{service.name}" for file in promised.file for service in file.service}
    assert services == {"roster.v1.InferenceService", "roster.admin.v1.AdminService"}


@needs_buf
def test_the_promise_is_kept(tmp_path: Path) -> None:
    done = breaking(staged(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_buf
@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("inference.proto", "optional float top_p = 3;", "optional double top_p = 3;", "top_p"),
        ("inference.proto", "optional float top_p = 3;", "optional float nucleus = 3;", "top_p"),
        ("inference.proto", "optional float top_p = 3;", "", "top_p"),
        ("inference.proto", "FINISH_REASON_LENGTH = 2;", "FINISH_REASON_LENGTH = 7;", "FINISH_REASON_LENGTH"),
        ("admin.proto", "repeated RunnerStatus runners", "RunnerStatus runners", "runners"),
    ],
)
def test_a_change_that_breaks_a_client_is_found(tmp_path: Path, file: str, old: str, new: str, complaint: str) -> None:
    done = breaking(changed(tmp_path, file, old, new))
    assert done.returncode != 0 and complaint in done.stdout, done.stdout + done.stderr


@needs_buf
def test_an_addition_breaks_nothing(tmp_path: Path) -> None:
    more = "optional float top_p = 3;\n  // New.\n  optional float typical_p = 99;"
    done = breaking(changed(tmp_path, "inference.proto", "optional float top_p = 3;", more))
    assert done.returncode == 0, done.stdout + done.stderr

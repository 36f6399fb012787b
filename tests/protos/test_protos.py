"""The generated code is up to date, every field is documented, and buf finds no problem."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2

from tests.support.staged_protos import staged

ROOT = Path(__file__).resolve().parents[2]
BUF = ROOT / ".cache" / "buf" / "node_modules" / ".bin" / "buf"


def generator() -> ModuleType:
    """protos/generate.py, loaded from its file because protos/ is not a package."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "protos" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = generator()


def generated(folder: Path) -> dict[str, bytes]:
    """Returns the contents of the generated files below `folder`/roster_protos, by name."""
    return {path.name: path.read_bytes() for path in (folder / "roster_protos").glob("*_pb2*") if path.is_file()}


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    (tmp_path / "roster_protos").mkdir()
    GENERATOR.generate(tmp_path)
    fresh, committed = generated(tmp_path), generated(ROOT)
    assert sorted(fresh) == sorted(committed), "run `make protos`"
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run `make protos`"


def undocumented(file: descriptor_pb2.FileDescriptorProto) -> list[str]:
    """Returns the names of a file's fields, enum values, methods and services without a comment."""
    commented = {
        tuple(location.path) for location in file.source_code_info.location if location.leading_comments.strip()
    }
    missing: list[str] = []

    def need(path: tuple[int, ...], name: str) -> None:
        if path not in commented:
            missing.append(name)

    def visit(message: descriptor_pb2.DescriptorProto, path: tuple[int, ...], name: str) -> None:
        for i, field in enumerate(message.field):
            need((*path, 2, i), f"{name}.{field.name}")
        for i, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                visit(nested, (*path, 3, i), f"{name}.{nested.name}")
        visit_enums(message.enum_type, (*path, 4), name)

    def visit_enums(enums: list[descriptor_pb2.EnumDescriptorProto], path: tuple[int, ...], name: str) -> None:
        for i, enum in enumerate(enums):
            for j, value in enumerate(enum.value):
                need((*path, i, 2, j), f"{name}.{enum.name}.{value.name}")

    for i, message in enumerate(file.message_type):
        visit(message, (4, i), message.name)
    visit_enums(list(file.enum_type), (5,), file.package)
    for i, service in enumerate(file.service):
        need((6, i), service.name)
        for j, method in enumerate(service.method):
            need((6, i, 2, j), f"{service.name}.{method.name}")
    return missing


def describe(include: str, name: str, tmp_path: Path) -> descriptor_pb2.FileDescriptorProto:
    """Returns the descriptor of a .proto file with its comments."""
    out = tmp_path / "descriptors.bin"
    GENERATOR.run(include, "--include_source_info", f"--descriptor_set_out={out}", name)
    return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "protos").glob("*.proto")))
def test_everything_is_documented(name: str, tmp_path: Path) -> None:
    assert undocumented(describe(GENERATOR.INCLUDE, f"{GENERATOR.PACKAGE}/{name}", tmp_path)) == []


def test_a_missing_comment_is_found(tmp_path: Path) -> None:
    source = tmp_path / "x.proto"
    source.write_text(
        'syntax = "proto3"; package x;\n'
        "message M {\n  // Said.\n  int32 a = 1;\n  int32 b = 2;\n  message N {\n    int32 c = 1;\n  }\n}\n"
        "enum E {\n  E_ZERO = 0;\n}\n// Said.\nservice S {\n  rpc Call(M) returns (M);\n}\n"
    )
    assert undocumented(describe(f"-I{tmp_path}", source.name, tmp_path)) == ["M.b", "M.N.c", "x.E.E_ZERO", "S.Call"]


def test_buf_lints(tmp_path: Path) -> None:
    buf = BUF if BUF.exists() else shutil.which("buf")
    if not buf:
        pytest.skip("buf is not here: `make buf` installs it through npm")
    found = subprocess.run([buf, "lint"], cwd=staged(tmp_path), capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout + found.stderr

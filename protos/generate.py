"""Generates the Python code of protos/*.proto: `python -m protos.generate [FOLDER]` (`make protos`).

It needs the extra `dev`: grpcio-tools in exactly the version of the constraints, since `_pb2_grpc.py` refuses a grpcio
that is older than its generator.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> None:
    """Writes protos/*_pb2.py, .pyi and, for files with a service, _pb2_grpc.py below `out`. Raises RuntimeError."""
    files = sorted(f"protos/{path.name}" for path in (ROOT / "protos").glob("*.proto"))
    services = [name for name in files if "\nservice " in (ROOT / name).read_text("utf-8")]
    # Imports are "protos/x.proto", which makes the generated ones `from protos import x_pb2`: hence the include path.
    run(f"-I{ROOT}", f"--python_out={out}", f"--pyi_out={out}", *files)
    run(f"-I{ROOT}", f"--grpc_python_out={out}", *services)


def run(*arguments: str) -> None:
    """Runs protoc, which prints what is wrong. Raises RuntimeError."""
    includes = f"-I{Path(protoc.__file__).parent / '_proto'}"
    if protoc.main(["protoc", includes, *arguments]) != 0:
        raise RuntimeError(f"protoc failed: {' '.join(arguments)}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)

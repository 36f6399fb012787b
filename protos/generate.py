"""Generates the package `roster_protos` from protos/*.proto: `python protos/generate.py [FOLDER]` (`make protos`).

It needs the extra `dev`, with exactly the grpcio-tools version of constraints.txt: `_pb2_grpc.py` refuses a grpcio that
is older than its generator.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "roster_protos"
"""Package of the generated code, and the folder of the file names in protobuf's descriptor pool. The pool is shared by
the whole process, where `protos/inference.proto` may be a user's own file."""
INCLUDE = f"-I{PACKAGE}={ROOT / 'protos'}"


def generate(out: Path) -> None:
    """Writes *_pb2.py, .pyi and, for files with a service, _pb2_grpc.py to `out`/roster_protos. Raises RuntimeError."""
    files = {f"{PACKAGE}/{path.name}": path for path in sorted((ROOT / "protos").glob("*.proto"))}
    services = [name for name, path in files.items() if "\nservice " in path.read_text("utf-8")]
    run(INCLUDE, f"--python_out={out}", f"--pyi_out={out}", *files)
    run(INCLUDE, f"--grpc_python_out={out}", *services)


def run(*arguments: str) -> None:
    """Runs protoc, which prints its errors. Raises RuntimeError."""
    includes = f"-I{Path(protoc.__file__).parent / '_proto'}"
    if protoc.main(["protoc", includes, *arguments]) != 0:
        raise RuntimeError(f"protoc failed: {' '.join(arguments)}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)

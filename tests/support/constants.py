"""Prints the constants of the modules of Roster that a service imports, as JSON: text by "module.NAME".

Those that differ between two processes are state of a process (see fork_server).
"""

from __future__ import annotations

import json
import sys

from tests.support.fork_server import Kind, import_modules, import_torch

PACKAGES = ("roster_client", "roster_common", "runner_svc", "scheduler_svc")


def text(value: object) -> str | None:
    """Returns a plain value's text, which is the same in each process; None for other types and for nested ones."""
    if isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    if not isinstance(parts, list | tuple | set | frozenset):
        return None
    texts = [repr(part) for part in parts if isinstance(part, bool | int | float | str | bytes)]
    return str(sorted(texts))  # lists made of sets differ in order


def main() -> None:
    import_modules()
    if sys.argv[1] == Kind.TORCH.value:
        import_torch()
    elif "torch" in sys.modules:
        sys.exit("torch is imported, before which a runner pins its instruction set")
    found = {}
    for module in sorted(sys.modules):
        if module.partition(".")[0] in PACKAGES:
            for name, value in vars(sys.modules[module]).items():
                if not name.startswith("__") and (plain := text(value)) is not None:
                    found[f"{module}.{name}"] = plain
    print(json.dumps(found))


if __name__ == "__main__":
    main()

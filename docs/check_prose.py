"""Checks the words of docstrings, comments, messages and pages: `python docs/check_prose.py [PATH ...]`.

Prints each word of the list below with its file and line, and exits with status 1 if there is any. Code in backquotes
and fenced blocks is not prose. Strings are messages in the product's packages; elsewhere they are data.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("roster_client", "roster_common", "runner_svc", "scheduler_svc")
# Each pattern with what to write instead.
WORDS = {
    r"who|whom|who(?:m?ever)|(?:no|some|every|any)body|(?:some|any|every)one|he|him|his|she|hers?": (
        "a sequence, request, runner or client is *it*; name the thing"
    ),
    r"anew": "again",
    r"so many|so much": "name the quantity",
    r"(?:is|are|was|were|be|been|being|gets?|got) told|told (?:to|by|of|why|so)|tells": (
        "receives, reports, returns, says, shows"
    ),
    r"what (?:there is|is there)": "name the thing",
    r"doors?|seats?|seating|courtroom|jury|guilty|innocent|convict(?:s|ed|ion)?|accus(?:e|es|ed|ation)": (
        "the field's term, not an image: listener, slot, isolation, attribution"
    ),
    r"kin|hitherto|lest|thereof|reckon(?:s|ed|ing)?|likewise": "plain English",
}
PATTERN = re.compile(rf"(?<![\w'-])(?:{'|'.join(WORDS)})(?![\w-])", re.IGNORECASE)
COMMENT = {
    ".proto": r"//(.*)",
    ".cu": r"//(.*)",
    ".cuh": r"//(.*)",
    ".h": r"//(.*)",
    ".ts": r"//(.*)",
    ".go": r"//(.*)",
    ".sh": r"(?:^|\s)#(.*)",
    ".yaml": r"(?:^|\s)#(.*)",
    ".yml": r"(?:^|\s)#(.*)",
    ".toml": r"(?:^|\s)#(.*)",
    "Makefile": r"(?:^|\s)#(.*)",
    "Dockerfile": r"(?:^|\s)#(.*)",
    "run": r"(?:^|\s)#(.*)",
}

DATA = ("roster_client/bench/load/prompts.py", "roster_client/demo/prompts.py")
"""Files whose strings are prompts."""

Line = tuple[int, str]


def read_python(source: str, messages: bool) -> Iterator[Line]:
    """Yields the lines of docstrings and comments, and with `messages` also those of strings that hold a space."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(first.value)
        elif not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        elif node in docstrings or (messages and " " in node.value):
            yield from enumerate(node.value.splitlines(), node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def read_page(source: str) -> Iterator[Line]:
    """Yields the lines of a Markdown page outside fenced blocks."""
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"\]\([^)]*\)", "]", line)


def read_comments(source: str, pattern: str) -> Iterator[Line]:
    for number, line in enumerate(source.splitlines(), 1):
        if found := re.search(pattern, line):
            yield number, found.group(1)


def read_prose(path: Path) -> Iterator[Line]:
    """Yields the numbered lines of prose in a file; none for a kind of file that holds none."""
    if path.suffix == ".py":
        name = path.relative_to(ROOT)
        return read_python(path.read_text("utf-8"), name.parts[0] in PRODUCT and name.as_posix() not in DATA)
    if path.suffix == ".md":
        return read_page(path.read_text("utf-8"))
    kind = COMMENT.get(path.suffix or path.name.split(".")[0])
    if path.name.startswith("Dockerfile"):
        kind = COMMENT["Dockerfile"]
    return read_comments(path.read_text("utf-8"), kind) if kind else iter(())


def find_words(path: Path) -> Iterator[str]:
    """Yields one sentence for each word of the list in a file: where it stands, and what to write instead."""
    for number, line in read_prose(path):
        for found in PATTERN.finditer(re.sub(r"`[^`]*`", "", line)):
            word = found.group(0)
            advice = next(advice for words, advice in WORDS.items() if re.fullmatch(words, word, re.IGNORECASE))
            yield f"{path.relative_to(ROOT)}:{number}: {word!r}: {advice}"


def list_files(arguments: list[str]) -> list[Path]:
    """Returns the tracked files under the arguments, all of them without one; generated and recorded files excepted."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [
        ROOT / name
        for name in listed
        if not name.endswith(("_pb2.py", "_pb2_grpc.py", ".pyi")) and not name.startswith("bench/results/")
        if (ROOT / name) != Path(__file__).resolve() and (ROOT / name).is_file()
    ]


def main() -> None:
    found = [line for path in list_files(sys.argv[1:]) for line in find_words(path)]
    print(*found, sep="\n") if found else None
    sys.exit(f"{len(found)} words to replace" if found else 0)


if __name__ == "__main__":
    main()

"""A folder is a concept: few files, functions that fit on a screen, imports only from lower folders."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.support.import_graph import ROOT, folder_of, import_graph, modules

PACKAGES = ("scheduler_svc", "runner_svc", "roster_client")
MOST_FILES = 15
MOST_LINES = 50
EXEMPT = {"scheduler_svc/policies"}
"""Exempt, as it has one file per policy."""

ORDER = {
    "scheduler_svc": (
        "settings link step_times policy policies model kv plan drafting queue metrics tiers scheduler requests "
        "runners moves constrained constrained/schema constrained/process kv_events failure reports engine "
        "simulator/conversations "
        "simulator simulator/calibration simulator/report front/base front/text front/request front/tracing "
        "front/stream front/rpc front/auth front/gateway front operation ."
    ),
    "runner_svc": (
        "weights weights/blocks arithmetic tiers interface/products interface settings gguf hub model/folder "
        "model/quantization model/families model/tokenizer model model/checkpoint catalog sampling drafting "
        "cuda/memory cuda cuda/drafts cuda/fp8 cuda/int4 cuda/products cuda/canonical cuda/experts cuda/tiers "
        "cuda/ranks attention attention/canonical_gpu decoder transformers_decoder transformers_decoder/gpu "
        "drafting/medusa drafting/eagle timings batch backends gpu/canonical gpu/blocks gpu/ranks gpu gpu/ranked "
        "gpu/drafts execution group nodes transfer link startup launch ."
    ),
    "roster_client": (
        "client options terminal timeline top serve offline batch bench bench/records bench/load bench/runs "
        "bench/report demo doctor commands ."
    ),
}
"""Each package's folders, lowest first: files import only from their own folder and from lower ones."""


def folders(package: str) -> list[str]:
    return [package if name == "." else f"{package}/{name}" for name in ORDER[package].split()]


@pytest.mark.parametrize("package", ORDER)
def test_the_order_lists_every_folder(package: str) -> None:
    found = {folder_of(name, files) for files in [modules(package)] for name in files}
    assert sorted(found) == sorted(folders(package))


@pytest.mark.parametrize("package", ORDER)
def test_nothing_imports_upward(package: str) -> None:
    files, order = modules(package), folders(package)
    upward = [
        f"{name} -> {imported}"
        for name, imports in import_graph(package).items()
        for imported in imports
        if order.index(folder_of(imported, files)) > order.index(folder_of(name, files))
    ]
    assert sorted(upward) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_has_too_many_files(package: str) -> None:
    counts = Counter(folder_of(name, files) for files in [modules(package)] for name in files)
    assert {name: n for name, n in counts.items() if n > MOST_FILES and name not in EXEMPT} == {}


@pytest.mark.parametrize("package", ["roster_common", *PACKAGES])
def test_functions_fit_on_a_screen(package: str) -> None:
    long = [
        f"{path.relative_to(ROOT)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in modules(package).values()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        if node.end_lineno - node.lineno >= MOST_LINES
    ]
    assert long == []

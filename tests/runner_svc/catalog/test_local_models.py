"""The list of models on this machine: where they are found, their sizes, and why some can't be served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from roster_client.cli import app
from roster_client.terminal.exit_codes import ExitCode
from runner_svc.hub.cache import hub_cache_folder, snapshot_folder
from runner_svc.hub.names import HubError, HubName
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[3]
COMMIT = "b" * 40


def snapshot(cache: Path, repo: str, commit: str = COMMIT, ref: str | None = "main") -> Path:
    """Makes the folder of a cached snapshot."""
    repository = cache / f"models--{repo.replace('/', '--')}"
    if ref is not None:
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def listed(tmp_path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Returns what `roster models --json` prints, by name."""
    environment = {"HF_HUB_CACHE": str(tmp_path / "hub"), "ROSTER_CACHE_DIR": str(tmp_path / "roster")}
    result = CliRunner().invoke(app, ["models", "--json", *arguments], env=environment)
    assert result.exit_code == ExitCode.OK, result.output
    return {model["name"]: model for model in json.loads(result.stdout)}


def test_what_the_hub_cache_holds(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    make_tiny_model("llama", snapshot(cache, "acme/whole").parent / "c")
    (cache / "models--acme--whole" / "refs" / "v1").write_text("c")
    make_tiny_model("qwen3", snapshot(cache, "acme/partly") / "tiny").rename(
        cache / "models--acme--partly" / "snapshots" / "d"
    )
    (cache / "models--acme--partly" / "refs" / "main").write_text("d")
    (cache / "models--acme--partly" / "snapshots" / "d" / "model.safetensors").unlink()
    write(snapshot(cache, "acme/sharded"), config={"architectures": ["LlamaForCausalLM"]})
    index = cache / "models--acme--sharded" / "snapshots" / COMMIT / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    write(snapshot(cache, "acme/speech", ref=None), config={"architectures": ["WhisperModel"], "model_type": "whisper"})
    (cache / "models--acme--speech" / "snapshots" / COMMIT / "model.safetensors").write_bytes(b"w" * 1000)
    write(snapshot(cache, "acme/list"), config=[1])
    silent = make_tiny_model("llama", snapshot(cache, "acme/silent", "f").parent / "g")
    (cache / "models--acme--silent" / "refs" / "main").write_text("g")
    (silent / "tokenizer.json").unlink()
    write_tiny_gguf(snapshot(cache, "acme/ggufs") / "tiny.gguf")

    found = listed(tmp_path)
    assert found["acme/whole@v1"]["servable"] and found["acme/whole@v1"]["architecture"] == "LlamaForCausalLM"
    assert found["acme/whole@v1"]["bytes"] > 1000
    assert found["acme/partly"]["why_not"] == "There is no model.safetensors."
    assert found["acme/sharded"]["why_not"] == "It is there only in part: one.safetensors is missing."
    speech = found[f"acme/speech@{COMMIT}"]
    assert "WhisperModel" in speech["why_not"] and speech["bytes"] > 1000
    assert not found["acme/list"]["servable"]
    assert found["acme/silent"]["why_not"] == "There is no tokenizer."
    assert found["acme/ggufs:tiny.gguf"]["architecture"] == "llama" and found["acme/ggufs:tiny.gguf"]["servable"]
    assert {model["place"] for model in found.values()} <= {"hub", "package"}


def test_a_broken_cache_costs_no_more_than_its_own_model(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    make_tiny_model("llama", snapshot(cache, "acme/whole").parent / "c")
    for name, ref in (("acme/bytes", b"\xff\xfe"), ("acme/zeros", bytes(40)), ("acme/whole", b"c")):
        snapshot(cache, name, "d")
        (cache / f"models--{name.replace('/', '--')}" / "refs" / "main").write_bytes(ref)
    odd = snapshot(cache, "acme/odd")
    (odd / "config.json").write_text('{"architectures": ["Odd\\ud800"], "model_type": 7}')
    (odd / "model.safetensors").touch()
    write(snapshot(cache, "acme/text"), config={"architectures": "LlamaForCausalLM"})
    found = listed(tmp_path)
    assert found["acme/whole"]["servable"] and not found["acme/bytes@d"]["servable"]
    assert found["acme/text"]["architecture"] == ""
    environment = {"HF_HUB_CACHE": str(cache), "ROSTER_CACHE_DIR": str(tmp_path), "COLUMNS": "200"}
    result = CliRunner().invoke(app, ["models"], env=environment)
    assert result.exit_code == ExitCode.OK and "Odd\ufffd" in result.stdout, result.output
    assert snapshot_folder(cache / "models--acme--zeros", "main") is None


def test_folders_files_and_conversions(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "models" / "tiny")
    (tmp_path / "models" / "empty").mkdir()
    converted = make_tiny_model("llama", tmp_path / "roster" / "tiny-0123456789abcdef")
    (tmp_path / "roster" / "runner-ids").mkdir()
    found = listed(tmp_path, str(tmp_path / "models"))
    assert found[str(folder)]["servable"] and found[str(folder)]["place"] == "folder"
    assert found[str(converted)]["why_not"] == "It is the conversion of a .gguf file: give that file."
    assert listed(tmp_path, str(folder)) == found
    write_tiny_gguf(tmp_path / "models" / "tiny.gguf")
    name = str(tmp_path / "models" / "tiny.gguf")
    assert listed(tmp_path, name)[name]["bytes"] == (tmp_path / "models" / "tiny.gguf").stat().st_size
    assert name in listed(tmp_path, str(tmp_path / "models"))


def test_the_table_and_an_unusable_folder(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny")
    (tmp_path / "broken").mkdir()
    write(tmp_path / "broken", config={"architectures": ["[red]Odd"]})
    environment = {"HF_HUB_CACHE": str(tmp_path / "hub"), "ROSTER_CACHE_DIR": str(tmp_path), "COLUMNS": "400"}
    result = CliRunner().invoke(app, ["models", str(tmp_path)], env=environment)
    assert result.exit_code == ExitCode.OK
    (row,) = [line for line in result.stdout.splitlines() if line.startswith(f"{folder} ") and "folder" in line]
    assert "LlamaForCausalLM" in row and row.rstrip().endswith("yes")
    assert "no: There is no model.safetensors." in result.stdout and "[red]Odd" in result.stdout
    result = CliRunner().invoke(app, ["models", str(tmp_path / "none")], env=environment)
    assert result.exit_code == ExitCode.USAGE and "is neither a folder nor a .gguf file" in result.stderr


def test_it_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    make_tiny_model("llama", snapshot(tmp_path, "acme/tiny").parent / "e")
    code = (
        "import sys; sys.argv[1:] = ['models']\n"
        "from roster_client.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_CACHE": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "acme/tiny@e" in ended.stdout, ended


def test_without_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "runner_svc.catalog.local_models", None)
    result = CliRunner().invoke(app, ["models"])
    assert result.exit_code == ExitCode.USAGE and "pip install 'roster-serve[runner]'" in result.stderr


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_where_the_hub_cache_is(environment: dict[str, str], folder: str) -> None:
    assert hub_cache_folder(environment) == Path(folder)


def test_a_hub_cache_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(HubError, match="has no home folder: set HF_HOME"):
        hub_cache_folder({})


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("acme/tiny", HubName("acme/tiny")),
        ("acme/tiny-1.5B_x@refs/pr/3:Q4_K_M", HubName("acme/tiny-1.5B_x", "refs/pr/3", "Q4_K_M")),
        ("acme/tiny:a/b.gguf", HubName("acme/tiny", file="a/b.gguf")),
        *((name, None) for name in ("tiny", "a/b/c", "../b", "./b", "/a/b", "~/b", "a--b/c", "a/b..c", "a/ b", "a/b@")),
    ],
)
def test_names(name: str, parsed: HubName | None) -> None:
    assert HubName.parse(name) == parsed
    assert parsed is None or str(parsed) == name

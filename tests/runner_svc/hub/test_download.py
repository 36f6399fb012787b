"""Models by hub id, against a hub on loopback: what is downloaded, resumed, cached, and said when it fails."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner_svc.catalog.source import model_folder
from runner_svc.hub import download
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from tests.support.fake_hub import COMMIT, FakeHub, fake_hub

REPO = "acme/tiny"
CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}).encode()
INDEX = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()
SHARDED = {
    "config.json": CONFIG,
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}1",
    "tokenizer_config.json": b"{}2",
    "added_tokens.json": b"{}3",
    "tokenizer.model": b"s",
    "tekken.json": b"{}5",
    "additional_chat_templates/tools.jinja": b"x",
    "model.safetensors.index.json": INDEX,
    "one.safetensors": b"1" * 300_000,
    "two.safetensors": b"2" * 200_000,
}
WHOLE = f"downloading {REPO} (0.5 MB)"
UNREAD = {
    "README.md": b"#",
    "pytorch_model.bin": b"p",
    "consolidated.safetensors": b"c",
    "onnx/model.onnx": b"o",
    "training_args.json": b"{}4",
    "original/tokenizer.model": b"t",
    "additional_chat_templates/readme.md": b"t",
    "modeling_tiny.py": b"import os",
    "tiny.Q4_K_M.gguf": b"g",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        hub.repositories[REPO] = SHARDED | UNREAD
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "http_proxy", "HTTP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield hub


def get(name: str, progress: download.Progress = lambda what, share: None) -> Path:
    return model_folder(name, Path(os.environ["HF_HUB_CACHE"]).parent / "converted", progress)


def cached_blob(hub: FakeHub, file: str) -> Path:
    blob = hub.blob(hub.repositories[REPO][file])
    return Path(os.environ["HF_HUB_CACHE"]) / "models--acme--tiny" / "blobs" / blob


def show_bytes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes files to the disk in smaller pieces, and looks at them more often."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(download, "_LOOK_S", 0.02)


def test_only_what_is_read_is_downloaded_and_only_once(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = get(REPO)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == set(SHARDED)
    assert (folder / "two.safetensors").read_bytes() == SHARDED["two.safetensors"]
    assert sorted(hub.served) == sorted(SHARDED)
    assert get(REPO) == get(f"{REPO}@main") == get(f"{REPO}@{COMMIT}") == folder
    assert get(str(folder.parents[1])) == folder  # the repository's folder in the cache
    assert sorted(hub.served) == sorted(SHARDED)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("it writes to the cache"))
    assert get(REPO) == folder


def test_a_single_file_of_weights(hub: FakeHub) -> None:
    hub.repositories[REPO] = {"config.json": CONFIG, "model.safetensors": b"w", "other.safetensors": b"o"}
    assert (get(REPO) / "model.safetensors").read_bytes() == b"w"
    assert sorted(hub.served) == ["config.json", "model.safetensors"]


def test_progress_counts_bytes(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    show_bytes_soon(monkeypatch)
    hub.gate = threading.Event()
    seen: list[tuple[str, float]] = []

    def progress(what: str, share: float) -> None:
        seen.append((what, share))
        if 0.4 < share < 1 and what == WHOLE:
            hub.gate.set()  # type: ignore[union-attr]

    get(REPO, progress)
    whole = [share for what, share in seen if what == WHOLE]
    assert whole == sorted(whole) and whole[0] == 0 and whole[-1] == 1
    assert any(0.4 < share < 0.6 for share in whole), whole
    assert seen[0][0].startswith("downloading the configuration and tokenizer of acme/tiny")


@pytest.mark.parametrize("how", ["switched off", "unreachable", "ill"])
def test_without_a_network_the_cache_is_used(hub: FakeHub, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = get(REPO)
    if how == "switched off":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    elif how == "unreachable":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    else:
        hub.refusal = (503, "")
        monkeypatch.setattr("time.sleep", lambda seconds: None)
    asked = len(hub.requests)
    assert get(REPO) == folder
    assert how != "switched off" or len(hub.requests) == asked
    with pytest.raises(ModelNotFound, match=r"other is neither a folder nor in the hub's cache, .*(set|reached|503)"):
        get("acme/other")
    cached_blob(hub, "two.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"only partly in the hub's cache \(two.safetensors is missing\)"):
        get(REPO)


@pytest.mark.parametrize(
    ("status", "code", "sentence"),
    [
        (401, "RepoNotFound", r"has no model 'acme/tiny', or it is private: check the spelling.*hf auth login"),
        (404, "RepoNotFound", r"has no model 'acme/tiny'"),
        (403, "GatedRepo", r"acme/tiny is gated: accept its terms at http://127.*/acme/tiny, then log in"),
        (401, "GatedRepo", r"acme/tiny is gated"),
        (400, "", r"refuses acme/tiny with HTTP status 400"),
        (403, "", r"forbids access to acme/tiny: ask its owners"),
        (404, "RevisionNotFound", r"acme/tiny has no revision 'main'"),
    ],
)
def test_what_the_hub_refuses(hub: FakeHub, status: int, code: str, sentence: str) -> None:
    hub.refusal = (status, code)
    with pytest.raises(ModelNotFound, match=sentence) as refused:
        get(REPO)
    assert "\n" not in str(refused.value)
    hub.refusal = None
    folder = get(REPO)
    hub.refusal = (status, code)
    assert get(REPO) == folder  # as huggingface_hub does, but for the sentence in the log


def test_an_unknown_revision(hub: FakeHub) -> None:
    assert get(f"{REPO}@v1").is_dir()
    with pytest.raises(ModelNotFound, match="no revision 'v2': give a branch"):
        get(f"{REPO}@v2")


def test_a_broken_connection_is_resumed(hub: FakeHub) -> None:
    hub.cut.add("one.safetensors")
    assert (get(REPO) / "one.safetensors").read_bytes() == SHARDED["one.safetensors"]
    assert hub.served.count("one.safetensors") == 2


def test_a_truncated_file_is_not_served(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.short.add("one.safetensors")
    with pytest.raises(ModelNotFound, match=r"acme/tiny can't be downloaded: .*run it again") as refused:
        get(REPO)
    assert "\n" not in str(refused.value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match=r"only partly in the hub's cache \(one.safetensors is missing\)"):
        get(REPO)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.short.clear()
    assert (get(REPO) / "one.safetensors").read_bytes() == SHARDED["one.safetensors"]


def test_a_disk_without_room(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = type("Usage", (), {"free": 400_000})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(ModelNotFound, match=r"needs 0.5 MB, but the disk of .* has 0.4 MB left.*HF_HUB_CACHE"):
        get(REPO)
    assert "one.safetensors" not in hub.served
    monkeypatch.undo()
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(ModelNotFound, match=r"hub can't be written \(Not a directory\): set HF_HUB_CACHE"):
        get(REPO)


def test_a_repository_of_ggufs(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner_svc.catalog.source.converted_folder", lambda file, cache, progress: file)
    names = ["tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "mmproj-tiny.gguf", "big/tiny-BF16-00001-of-00002.gguf"]
    names.append("big/tiny-BF16-00002-of-00002.gguf")
    hub.repositories[REPO] = {name: name.encode() for name in names}
    with pytest.raises(ModelNotFound, match=r"acme/tiny has 3 GGUF models; name one of them: big/tiny-BF16-00001-of"):
        get(REPO)
    with pytest.raises(ModelNotFound, match=r"no model 'Q2_K'; it has big/tiny"):
        get(f"{REPO}:Q2_K")
    for wanted, served in [("Q4_K_M", names[:1]), ("tiny-Q8_0.gguf", names[1:2]), ("bf16", names[3:])]:
        hub.served.clear()
        found = get(f"{REPO}:{wanted}")
        assert found.name == Path(served[0]).name and found.read_bytes() == served[0].encode()
        assert sorted(hub.served) == served
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert get(f"{REPO}:{wanted}") == found
        monkeypatch.delenv("HF_HUB_OFFLINE")
    cached_blob(hub, names[4]).unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match=r"partly in .* \(big/tiny-BF16-00002-of-00002.gguf is missing\)"):
        get(f"{REPO}:BF16")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.repositories[REPO] = SHARDED
    with pytest.raises(ModelNotFound, match=r"has no \.gguf file; leave out ':Q8_0'"):
        get(f"{REPO}:Q8_0")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"config.json": CONFIG, "pytorch_model.bin": b"p"}, "pytorch_model.bin is a pickle, which may run code"),
        ({"config.json": CONFIG}, "give a repository of a model in safetensors or GGUF"),
        ({"README.md": b"#"}, "has neither config.json nor a .gguf file"),
        ({"config.json": CONFIG, "model.safetensors.index.json": b"{}"}, "model.safetensors.index.json .* is broken"),
        ({"config.json": CONFIG, "model.safetensors.index.json": INDEX}, "has no one.safetensors, which its"),
    ],
)
def test_repositories_that_are_no_models(hub: FakeHub, files: dict[str, bytes], sentence: str) -> None:
    hub.repositories[REPO] = files
    with pytest.raises(ModelNotFound, match=sentence):
        get(REPO)
    assert "pytorch_model.bin" not in hub.served


def test_weights_of_a_model_that_no_decoder_takes_are_not_downloaded(hub: FakeHub) -> None:
    hub.repositories[REPO] = SHARDED | {"config.json": b"[]"}
    with pytest.raises(UnsupportedModel, match=r"config\.json is a JSON array"):
        get(REPO)
    assert "one.safetensors" not in hub.served


def test_a_signal_leaves_a_download_at_once(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    show_bytes_soon(monkeypatch)
    hub.gate = threading.Event()

    def progress(what: str, share: float) -> None:
        if share > 0.4 and what == WHOLE:
            raise SystemExit

    with pytest.raises(SystemExit):
        get(REPO, progress)
    assert not hub.gate.is_set()
    hub.gate.set()

"""Files with random bytes in their headers, and files that can't be read."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.gguf_conversion import converted_folder
from runner_svc.model.gguf_servable import why_not
from tests.support.thoroughness import count
from tests.support.tiny_gguf import ARCHITECTURES, tiny_gguf, tiny_model, write_tiny_gguf

NUM_FILES = count(3000, in_ci=60)
LENGTHS = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def test_random_headers_are_served_or_refused_with_one_sentence(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    contents = [tiny_gguf(name, tiny_model(name)).content() for name in rng.sample(list(ARCHITECTURES), 3)]
    refused = 0
    for _ in range(NUM_FILES):
        content = bytearray(rng.choice(contents))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(content.index(b"blk.1"))
            if rng.random() < 0.7:
                content[at] ^= 1 << rng.randrange(8)
            else:
                content[at : at + 8] = struct.pack("<Q", rng.choice(LENGTHS))
        path = tmp_path / "garbage.gguf"
        path.write_bytes(content)
        said = why_not(path)
        assert said is None or (said.startswith(f"{path} can't be served: ") and "\n" not in said)
        refused += said is not None
    assert refused > NUM_FILES / 2


def test_a_file_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(Path, "open", denied)
    sentence = rf"{path} can't be served: It can't be read: Permission denied\."
    assert why_not(path) == sentence.replace("\\", "")
    with pytest.raises(UnsupportedModel, match=sentence):
        converted_folder(path, tmp_path / "cache", lambda what, share: None)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    assert why_not(tmp_path / "none.gguf") == f"{tmp_path}/none.gguf can't be served: It can't be read: " + (
        "No such file or directory."
    )

"""Zip file with which a gateway tokenizes for this server: the tokenizer, its chat template and a config.json.

The gateway looks for `config.json` next to `tokenizer.json`; without it, the gateway's requests stall for seconds.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator

from smg_grpc_proto.generated import common_pb2

from roster_protos import plan_pb2

CHUNK_BYTES = 1 << 20
"""Data per message: far below 4 MiB, the default limit of gRPC clients."""

_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Fixed timestamp of each file, so that equal models have equal bundles."""


def model_type(architecture: str) -> str:
    """Returns Hugging Face's `model_type` of an architecture, by its naming rule: "LlamaForCausalLM" is "llama"."""
    return architecture.partition("For")[0].lower()


def special_token_ids(model: plan_pb2.Model) -> dict[str, int]:
    """Returns the ids of the special tokens by role ("bos_token"), except those unknown to the tokenizer."""
    ids = {token["content"]: token["id"] for token in json.loads(model.tokenizer).get("added_tokens", ())}
    return {role: ids[text] for role, text in model.special_tokens.items() if text in ids}


def bundle_chunks(model: plan_pb2.Model, chat_template: str) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Yields the bundle in chunks, in order; the last chunk carries its SHA-256.

    `chat_template`: the template to render with, "" for none.
    """
    data = _zipped(model, chat_template)
    for start in range(0, len(data), CHUNK_BYTES):
        last = start + CHUNK_BYTES >= len(data)
        yield common_pb2.GetTokenizerChunk(
            data=data[start : start + CHUNK_BYTES], sha256=hashlib.sha256(data).hexdigest() if last else ""
        )


def _zipped(model: plan_pb2.Model, chat_template: str) -> bytes:
    files = {
        "tokenizer.json": model.tokenizer,
        "tokenizer_config.json": _json(_tokenizer_config(model, chat_template)),
        "config.json": _json(_config(model)),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _ZIP_EPOCH), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _tokenizer_config(model: plan_pb2.Model, chat_template: str) -> dict[str, object]:
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.context_length,
        **model.special_tokens,
    }
    if chat_template:
        config["chat_template"] = chat_template
    return config


def _config(model: plan_pb2.Model) -> dict[str, object]:
    ids = {f"{role}_id": token for role, token in special_token_ids(model).items()}
    return {
        **ids,
        "architectures": [model.architecture],
        "model_type": model_type(model.architecture),
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context_length,
        "eos_token_id": list(model.eos_token_ids),
    }


def _json(content: dict[str, object]) -> bytes:
    return json.dumps(content).encode()

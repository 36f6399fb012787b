"""Compatibility of runners: what decides answers must be equal, or a request's tokens would depend on its runner.

| in Hello | |
| --- | --- |
| name, architecture, weights_version, and the fingerprints "weights", "rope" and "kv" | equal: they decide the tokens |
| tokenizer, vocabulary, chat template, special and end-of-sequence tokens | equal: text is handled once |
| numerics | equal: it hashes what the bits depend on, and a service promises bits or does not |
| block_size | equal: prefixes are named by whole blocks |
| the fingerprint "numerics" | a difference is logged: a sequence that moves continues within rounding |
| weight_formats | text, which says why weights_version differs |
| context_length, slots, blocks, step limits, depth, tiles, prefix_positions | each runner's own: its capacity |

A fingerprint that a runner does not report is compatible with any other.
"""

from __future__ import annotations

from collections.abc import Iterator

from roster_protos import plan_pb2

_REMEDY = "start it with the same model, or restart the scheduler"
_FLAGS = {
    "weights": "start it with the same --model and --dtype, or restart the scheduler",
    "rope": "give all the same config.json, or restart the scheduler",
    "kv": "start it with the same --kv-cache-dtype, or restart the scheduler",
}


class Likeness:
    """Common properties of the runners of one service: the first one's model, and every fingerprint reported since."""

    def __init__(self) -> None:
        self._model: plan_pb2.Model | None = None
        self._fingerprints: dict[str, str] = {}

    def learn(self, hello: plan_pb2.Hello) -> None:
        """Records a compatible runner that has joined."""
        if self._model is None:
            self._model = hello.model
        for name, value in hello.fingerprints.items():
            self._fingerprints.setdefault(name, value)

    def unlike(self, hello: plan_pb2.Hello, block_size: int | None) -> str:
        """Returns the first difference and its remedy, "" if there is none. `block_size` is that of the other
        runners."""
        return next(self._differences(hello, block_size), "")

    def _differences(self, hello: plan_pb2.Hello, block_size: int | None) -> Iterator[str]:
        if self._model is not None:
            yield from _model_differences(hello.model, self._model)
        for name, remedy in _FLAGS.items():
            theirs, ours = hello.fingerprints.get(name), self._fingerprints.get(name)
            if theirs is not None and ours is not None and theirs != ours:
                yield f"its fingerprint {name!r} is {theirs!r}, this service's {ours!r}: {remedy}"
        if block_size is not None and hello.block_size != block_size:
            yield (
                f"it has KV blocks of {hello.block_size} tokens, the others of {block_size}: "
                "start all with the same --block-size"
            )

    def doubt(self, hello: plan_pb2.Hello) -> str:
        """Returns a sentence that says how its answers may differ by rounding; "" if they don't or it is unknown."""
        theirs, ours = hello.fingerprints.get("numerics"), self._fingerprints.get("numerics")
        if theirs is None or ours is None or theirs == ours:
            return ""
        return f"it computes with {theirs!r}, the others with {ours!r}: answers may differ where logits nearly tie"


def _model_differences(theirs: plan_pb2.Model, ours: plan_pb2.Model) -> Iterator[str]:
    if (theirs.name, theirs.weights_version) != (ours.name, ours.weights_version):
        if theirs.weight_formats != ours.weight_formats:
            formats = [model.weight_formats or "not quantized" for model in (theirs, ours)]
            yield (
                f"its weights are in another format ({formats[0]}) than this service's ({formats[1]}): start it with "
                "the same --model, --quantization and --quantize-head, or restart the scheduler"
            )
        yield (
            f"it serves {theirs.name!r} ({theirs.weights_version}), this service {ours.name!r} "
            f"({ours.weights_version}): {_REMEDY}"
        )
    if theirs.numerics != ours.numerics:
        yield _numerics_difference(theirs.numerics, ours.numerics)
    if theirs.architecture != ours.architecture:
        yield f"its architecture is {theirs.architecture!r}, this service's {ours.architecture!r}: {_REMEDY}"
    if theirs.vocab_size != ours.vocab_size:
        yield f"its vocabulary has {theirs.vocab_size} tokens, this service's {ours.vocab_size}: {_REMEDY}"
    if set(theirs.eos_token_ids) != set(ours.eos_token_ids):
        yield (
            f"its end-of-sequence tokens are {sorted(theirs.eos_token_ids)}, this service's "
            f"{sorted(ours.eos_token_ids)}: {_REMEDY}"
        )
    for what, different in (
        ("tokenizer", theirs.tokenizer != ours.tokenizer),
        ("chat template", theirs.chat_template != ours.chat_template),
        ("set of special tokens", dict(theirs.special_tokens) != dict(ours.special_tokens)),
    ):
        if different:
            yield f"its model's {what} differs from this service's: give all the same files, or restart the scheduler"


def _numerics_difference(theirs: str, ours: str) -> str:
    if not theirs or not ours:
        promise = ["promises" if each else "does not promise" for each in (theirs, ours)]
        return (
            f"it {promise[0]} bits whatever the batch, this service {promise[1]} them: start all with the same "
            "--deterministic, or restart the scheduler"
        )
    return (
        f"its numerics are {theirs}, this service's {ours}: their bits differ, so give all the same files, versions of "
        "torch and processors, or restart the scheduler"
    )

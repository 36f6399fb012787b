"""An untrained byte-level tokenizer: one token per byte, three special tokens, a ChatML template.

The test backends use it in their Model, so that the whole stack, including text, runs without a real model. Ids 0 to
255 are the bytes; any bytes round-trip.
"""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from roster_protos import plan_pb2

IM_START_ID = 256
IM_END_ID = 257
END_OF_TEXT_ID = 258
NUM_TOKENS = 259

SPECIAL_TOKENS = {IM_START_ID: "<|im_start|>", IM_END_ID: "<|im_end|>", END_OF_TEXT_ID: "<|endoftext|>"}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Returns the character for each byte in a byte-level vocabulary, by byte.

    Printable bytes map to themselves, the others to the code points from 256 on, in order. This is GPT-2's table, which
    ByteLevel of the `tokenizers` library uses but does not expose in order.
    """
    printing = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    alphabet = []
    replaced = 0
    for byte in range(256):
        if byte in printing:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(256 + replaced))
            replaced += 1
    return alphabet


def build_byte_tokenizer() -> Tokenizer:
    """Returns the tokenizer: `encode` gives one id per UTF-8 byte and one per special token."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS.values()])
    return tokenizer


def byte_model(name: str, architecture: str, vocab_size: int, context_length: int) -> plan_pb2.Model:
    """Returns a Model message with the byte tokenizer.

    `vocab_size` may exceed the tokenizer's; the additional ids have no text. Raises ValueError if it is smaller.
    """
    if vocab_size < NUM_TOKENS:
        raise ValueError(f"vocab_size is {vocab_size}, must be at least {NUM_TOKENS}, the byte tokenizer's size")
    return plan_pb2.Model(
        name=name,
        architecture=architecture,
        weights_version=f"{name}-1",
        vocab_size=vocab_size,
        context_length=context_length,
        eos_token_ids=[IM_END_ID],
        tokenizer=_tokenizer_json(),
        chat_template=CHAT_TEMPLATE,
        special_tokens={"eos_token": SPECIAL_TOKENS[IM_END_ID], "pad_token": SPECIAL_TOKENS[END_OF_TEXT_ID]},
    )


@cache
def _tokenizer_json() -> bytes:
    return build_byte_tokenizer().to_str().encode()

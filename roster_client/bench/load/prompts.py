"""Prompts for a trace's requests: token ids for Roster's gRPC, text for an OpenAI-compatible endpoint.

Token i of a block is a hash of (block id, i, salt), so equal hash ids of a trace give equal tokens, and its shared
prefixes are shared by the prompts; prompts without hash ids share nothing. Text consists of words that are one token
each: words of the given tokenizer, which make lengths exact, or short English words that are one token in most
tokenizers, which is close enough (reports count the server's tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roster_client.bench.load.workload import PromptMaker, TokenIds
from scheduler_svc.simulator.prompts import FIRST_ORDINARY_TOKEN, prompt_tokens
from scheduler_svc.simulator.trace import Trace

MOST_WORDS = 4096
_WORDS = """
the of and to in is for that on as with by at from it or are this be an was have but not you all they we his her can one
had their there been if more when will would who so no out up into than them its only some time could new these two may
then do first any my now such like our over man me even most made after also did many before must through back years
where much your way well down should because each just those people how too little state good very make world still own
see men work long get here between both life being under never day same another know while last might us great old year
off come since against go came right used take three
"""
PLAIN_WORDS = _WORDS.split()


def token_prompts(vocab_size: int, salt: int) -> PromptMaker:
    """Returns a maker of prompts of ids below `vocab_size`."""
    if vocab_size <= FIRST_ORDINARY_TOKEN:
        raise ValueError(f"a vocabulary of {vocab_size} tokens has no ordinary tokens, which begin at id 256")

    def make(trace: Trace, index: int) -> TokenIds:
        return prompt_tokens(trace, index, vocab_size, salt)

    return make


def text_prompts(words: Sequence[str], salt: int) -> PromptMaker:
    """Returns a maker of prompts of words joined by spaces, one word per token."""
    if len(words) < 2:
        raise ValueError("prompts need at least two different words")

    def make(trace: Trace, index: int) -> str:
        ids = prompt_tokens(trace, index, FIRST_ORDINARY_TOKEN + len(words), salt) - FIRST_ORDINARY_TOKEN
        return " ".join([words[number] for number in ids.tolist()])

    return make


def words_of_tokenizer(path: Path) -> list[str]:
    """Returns words that are one token after another word, from a `tokenizer.json` or a folder that has one.

    Raises ValueError if there is no such file or it has too few words.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist: set --tokenizer to a tokenizer.json, or to a folder with one")
    tokenizer = Tokenizer.from_file(str(file))
    texts = tokenizer.decode_batch([[number] for number in range(tokenizer.get_vocab_size())])
    words = sorted({text.strip() for text in texts if text.strip().isascii() and text.strip().isalpha()})
    alone = len(tokenizer.encode("the", add_special_tokens=False).ids)
    pairs = tokenizer.encode_batch([f"the {word}" for word in words], add_special_tokens=False)
    single = [word for word, pair in zip(words, pairs, strict=True) if len(pair.ids) == alone + 1]
    if len(single) < 100:
        raise ValueError(f"{file} has only {len(single)} words of one token: omit --tokenizer")
    return single[:: max(1, len(single) // MOST_WORDS)]

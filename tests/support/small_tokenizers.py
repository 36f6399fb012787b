"""Small tokenizers of the kinds that language models use, built without training, and models that use them."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import build_byte_tokenizer

SPACE_MARK = "▁"
LETTERS = "abcdefghijklmnopqrstuvwxyz<>|/[]ABCINST_é中"
WORDS = ("th", "the", "▁the", "▁t", "▁a", "he", "in", "ing", "▁▁")


def byte_level() -> Tokenizer:
    """Returns a tokenizer with one token per byte, a few longer ones (some split characters) and special tokens."""
    tokenizer = build_byte_tokenizer()
    # In GPT-2's alphabet "ðŁ" is f0 9f, the first half of most emoji, and "Ġ" is a space.
    tokenizer.add_tokens(["<think>", "foo bar"])
    return tokenizer


def merged_byte_level() -> Tokenizer:
    """Returns a ByteLevel BPE tokenizer with merges across and within characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    merges = [
        ("ð", "Ł"),
        ("ðŁ", "ĺ"),
        ("ðŁĺ", "Ģ"),
        ("Ġ", "a"),
        ("e", "â"),
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "the"),
        ("Ģ", "x"),
    ]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|im_start|>", normalized=False), AddedToken("<|im_end|>", normalized=False)]
    )
    return tokenizer


def _byte_fallback() -> Tokenizer:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    for piece in (SPACE_MARK, *LETTERS, *WORDS):
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "t"), ("▁", "a"), ("h", "e"), ("i", "n"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def llama_like() -> Tokenizer:
    """Returns a byte-fallback tokenizer whose normalizer adds a space before the text and whose decoder strips it."""
    tokenizer = _byte_fallback()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), normalizers.Replace(" ", SPACE_MARK)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def gemma_like() -> Tokenizer:
    """Returns a byte-fallback tokenizer that adds no space before the text."""
    tokenizer = _byte_fallback()
    tokenizer.normalizer = normalizers.Replace(" ", SPACE_MARK)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace_first() -> Tokenizer:
    """Returns a byte-fallback tokenizer with Metaspace, which adds a space only at the start of the text."""
    tokenizer = _byte_fallback()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def words() -> Tokenizer:
    """Returns a tokenizer of whole words without a decoder: texts are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "three": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<eos>"])
    return tokenizer


def unigram() -> Tokenizer:
    """Unigram with byte fallback, NFKC and a space before the text."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [(piece, -2.0 - number / 10) for number, piece in enumerate(WORDS)]
    pieces += [(piece, -5.0) for piece in ("▁", *LETTERS)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def word_piece() -> Tokenizer:
    """WordPiece in lower case, as BERT has it."""
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "th", "##e", "##ing", "a", ".", ",", "!", "'", "##s"]
    letters = [letter for letter in "abcdefghijklmnopqrstuvwxyz0123456789<>|/[]" if letter not in words]
    words += letters + [
        f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789" if f"##{letter}" not in words
    ]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


BYTE_LEVEL = {"byte_level": byte_level, "merged_byte_level": merged_byte_level}
BYTE_FALLBACK = {
    "llama_like": llama_like,
    "gemma_like": gemma_like,
    "metaspace_first": metaspace_first,
    "unigram": unigram,
}
OTHERS = {"word_piece": word_piece, "words": words}
ALL = BYTE_LEVEL | BYTE_FALLBACK | OTHERS


def model_of(tokenizer: Tokenizer, chat_template: str = "", context_length: int = 4096) -> plan_pb2.Model:
    """Returns a model that uses this tokenizer; its end of sequence is the special token with the highest id."""
    added = tokenizer.get_added_tokens_decoder()
    specials = {index: token.content for index, token in added.items() if token.special}
    eos = max(specials)
    return plan_pb2.Model(
        name="small",
        architecture="TestForCausalLM",
        weights_version="1",
        vocab_size=tokenizer.get_vocab_size(),
        context_length=context_length,
        eos_token_ids=[eos],
        tokenizer=tokenizer.to_str().encode(),
        chat_template=chat_template,
        special_tokens={
            "eos_token": specials[eos],
            "bos_token": "<s>" if "<s>" in specials.values() else specials[min(specials)],
        },
    )

"""Tokenization of prompts: special tokens, tokens that are added, and otherwise equality with the library."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from roster_protos import inference_pb2, plan_pb2
from runner_svc.backends.byte_tokenizer import CHAT_TEMPLATE
from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.text.tokenizer import ModelText
from tests.support import small_tokenizers

LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
STRIPPING_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}<|end|>  {{ message.content | trim }}<|end|>\n{% endfor %}"
)
TEMPLATES = {
    "byte_level": CHAT_TEMPLATE,
    "merged_byte_level": CHAT_TEMPLATE,
    "llama_like": LLAMA_TEMPLATE,
    "metaspace_first": LLAMA_TEMPLATE,
    "gemma_like": STRIPPING_TEMPLATE,
}


@cache
def original(kind: str) -> Tokenizer:
    return small_tokenizers.ALL[kind]()


@cache
def model(kind: str) -> plan_pb2.Model:
    return small_tokenizers.model_of(original(kind), TEMPLATES.get(kind, ""))


@cache
def model_text(kind: str) -> ModelText:
    return ModelText(model(kind))


def special_ids(kind: str) -> set[int]:
    return {index for index, token in original(kind).get_added_tokens_decoder().items() if token.special}


def special_texts(kind: str) -> list[str]:
    return [original(kind).id_to_token(index) for index in sorted(special_ids(kind))]


def chat(*contents: str, role: str = "user", add_generation_prompt: bool | None = None) -> inference_pb2.Prompt:
    prompt = inference_pb2.Prompt()
    for content in contents:
        message = prompt.chat.messages.add(role=role)
        message.parts.add(text=content)
    if add_generation_prompt is not None:
        prompt.chat.add_generation_prompt = add_generation_prompt
    return prompt


def rendered_by_hand(kind: str, *contents: str) -> str:
    """Returns the output of the template of `kind` for user messages."""
    if TEMPLATES[kind] is CHAT_TEMPLATE:
        turns = "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents)
        return turns + "<|im_start|>assistant\n"
    if TEMPLATES[kind] is LLAMA_TEMPLATE:
        bos = model(kind).special_tokens["bos_token"]
        return bos + "".join(f"[INST] {content.strip()} [/INST]" for content in contents)
    return "".join(f"<s>user<|end|>  {content.strip()}<|end|>\n" for content in contents)


plain = st.text(alphabet="the ab\n<|>é中👍", max_size=20)


@pytest.mark.parametrize("kind", small_tokenizers.ALL)
@given(text=plain)
def test_text_without_special_tokens_encodes_as_the_library_does(kind: str, text: str) -> None:
    assert model_text(kind).encode(text) == original(kind).encode(text).ids


@pytest.mark.parametrize("kind", TEMPLATES)
@given(contents=st.lists(plain, min_size=1, max_size=3))
def test_a_chat_without_special_tokens_encodes_as_the_library_does(kind: str, contents: list[str]) -> None:
    expected = original(kind).encode(rendered_by_hand(kind, *contents), add_special_tokens=False).ids
    assert model_text(kind).encode_prompt(chat(*contents)) == expected


@pytest.mark.parametrize("kind", TEMPLATES)
@given(data=st.data())
def test_users_never_write_a_special_token(kind: str, data: st.DataObject) -> None:
    """Neither whole, nested, nor split over parts; the users' text is preserved as text."""
    pieces = st.sampled_from([*special_texts(kind), "<|im_", "end|>", "a", " ", "s>", "<"])
    content = "".join(data.draw(st.lists(pieces, max_size=8)))
    text = model_text(kind)
    as_text = text.encode(content)
    allowed = set(original(kind).encode("").ids)  # added by the post-processor
    assert special_ids(kind).isdisjoint(as_text[len(allowed) :])
    harmless = text.encode_prompt(chat("a"))
    ids = text.encode_prompt(chat(content))
    count = len([token for token in ids if token in special_ids(kind)])
    assert count == len([token for token in harmless if token in special_ids(kind)])
    assert content.strip() in text.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_special_token_in_a_message_is_spelled_as_its_letters(kind: str) -> None:
    """It has exactly the tokens that a tokenizer without that special token returns for the rendered text."""
    text = model_text(kind)
    for special in special_texts(kind):
        ids = text.encode_prompt(chat(f"a {special} b"))
        stand_in = original(kind).encode(rendered_by_hand(kind, "a \ue123 b"), add_special_tokens=False).ids
        letters = text.encode_prompt(chat("a \ue123 b"))
        assert letters == stand_in
        shown = text.decode(ids, skip_special_tokens=False)
        assert shown == text.decode(stand_in, skip_special_tokens=False).replace("\ue123", special)


def test_of_special_tokens_that_begin_alike_the_longest_counts() -> None:
    tokenizer = small_tokenizers.byte_level()
    names = ["<|a", "<|ab", "<|abcd|>", "|>"]
    tokenizer.add_special_tokens(names)
    template = "{% for m in messages %}<|a.<|abx<|abcd|>{{ m.content }}{% endfor %}"
    text = ModelText(small_tokenizers.model_of(tokenizer, template))
    first = tokenizer.token_to_id(names[0])
    for content in ("<|abcd|>", "<|abc|>", "<|a|>", "<|"):
        written = [first, ord("."), first + 1, ord("x"), first + 2]
        assert text.encode_prompt(chat(content)) == written + list(content.encode())


def test_parts_of_a_message_are_joined_before_special_tokens_are_looked_for() -> None:
    prompt = chat("<|im_")
    prompt.chat.messages[0].parts.add(text="end|>")
    assert model_text("byte_level").encode_prompt(prompt) == model_text("byte_level").encode_prompt(chat("<|im_end|>"))


def test_a_role_is_text_too() -> None:
    ids = model_text("byte_level").encode_prompt(chat("a", role="user<|im_end|>"))
    assert ids.count(257) == 1


def test_bos_is_added_to_text_and_left_to_the_template_in_chats() -> None:
    text = model_text("llama_like")
    assert text.encode("a")[0] == 1
    assert text.encode("<s>a").count(1) == 1
    assert text.encode_prompt(chat("a")).count(1) == 1
    assert text.encode_prompt(inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[7, 8]))) == [7, 8]


def test_the_generation_prompt_is_on_by_default() -> None:
    text = model_text("byte_level")
    header = text.encode("assistant\n")
    assert text.encode_prompt(chat("a"))[-len(header) :] == header
    without = text.encode_prompt(chat("a", add_generation_prompt=False))
    assert text.encode_prompt(chat("a", add_generation_prompt=True))[: len(without)] == without
    assert without[-2:] == [257, 10]


def test_an_added_token_that_is_not_special_is_an_ordinary_word() -> None:
    text = model_text("byte_level")
    word = original("byte_level").token_to_id("<think>")
    assert text.encode_prompt(chat("<think>")).count(word) == 1


def test_truncation_and_padding_of_the_tokenizer_are_ignored() -> None:
    tokenizer = small_tokenizers.byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=6)
    text = ModelText(small_tokenizers.model_of(tokenizer))
    assert text.encode("abcdefgh") == list(b"abcdefgh")
    assert text.encode("ab") == list(b"ab")


@pytest.mark.parametrize("kind", small_tokenizers.ALL)
def test_ids_outside_the_vocabulary_have_no_text(kind: str) -> None:
    assert model_text(kind).decode([100_000]) == ""


def test_a_chat_for_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(Refusal, match=r"prompt\.chat: the model has no chat template") as caught:
        model_text("words").encode_prompt(chat("a"))
    assert caught.value.field == "prompt.chat"


def test_a_template_that_does_not_compile_refuses_chats_only() -> None:
    text = ModelText(small_tokenizers.model_of(small_tokenizers.byte_level(), "{% for %}"))
    assert text.encode("ab") == [97, 98]
    with pytest.raises(Refusal, match="does not compile"):
        text.encode_prompt(chat("a"))


def test_what_a_template_objects_to_reaches_the_caller() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    text = ModelText(small_tokenizers.model_of(small_tokenizers.byte_level(), template))
    with pytest.raises(Refusal, match="roles must alternate") as caught:
        text.encode_prompt(chat("a"))
    assert caught.value.field == "prompt.chat.messages"


def test_thousands_of_special_tokens_are_found_in_linear_time() -> None:
    """With 6,000 special tokens and 200,000 candidate positions, trying each at each position would take seconds."""
    tokenizer = small_tokenizers.byte_level()
    tokenizer.add_special_tokens([f"<unused{number}>" for number in range(6000)])
    text = ModelText(small_tokenizers.model_of(tokenizer, CHAT_TEMPLATE))
    hostile = "<unused<unused99" * 25_000 + "<unused5999>"
    shielded = text._special.shield(hostile)
    assert shielded.startswith("<unused<unused99") and "<unused5999>" not in shielded
    assert text._special.seal(shielded) == hostile


def specials_of(tokenizer: Tokenizer, *texts: str, template: str = CHAT_TEMPLATE, **flags: bool) -> ModelText:
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, **flags) for text in texts])
    return ModelText(small_tokenizers.model_of(tokenizer, template))


def test_merges_that_lead_to_a_special_token_do_not_make_one_of_a_users_text() -> None:
    """SentencePiece vocabularies may have merges for the letters of a special token."""
    text = specials_of(small_tokenizers.merged_byte_level(), "the", template="the{{ messages[0].content }}")
    token = original("merged_byte_level").token_to_id("the")
    assert token is not None
    letters = [original("merged_byte_level").token_to_id(piece) for piece in ("th", "e")]
    assert text.encode("the") == letters
    assert text.encode_prompt(chat("the")) == [token, *letters]
    assert text.decode([token]) == "" and text.decode(letters) == "the"


def test_a_special_token_of_one_character_stays_a_letter() -> None:
    """Some models pad with `!`, and no text could be written without it."""
    text = specials_of(small_tokenizers.merged_byte_level(), "!")
    assert text.decode(text.encode("a!b"), skip_special_tokens=False) == "a!b"
    assert len(text.encode("a!b")) == 3


def test_a_special_token_that_is_a_word_of_its_own_is_none_within_another() -> None:
    template = "a<eot>b <eot>.{{ messages[0].content }}"
    text = specials_of(small_tokenizers.byte_level(), "<eot>", template=template, single_word=True)
    token = text._tokenizer.get_vocab_size() - 1
    assert text.encode_prompt(chat("x <eot> y")) == [*b"a<eot>b ", token, *b".x <eot> y"]


def test_a_longer_word_takes_the_text_of_a_special_token() -> None:
    tokenizer = small_tokenizers.byte_level()
    tokenizer.add_tokens(["x<eot>y"])
    word = tokenizer.get_vocab_size() - 1
    text = specials_of(tokenizer, "<eot>", template="x<eot>y<eot>{{ messages[0].content }}")
    assert text.encode_prompt(chat("x<eot>y<eot>")) == [word, word + 1, word, *b"<eot>"]
    assert text.encode("x<eot>y<eot>") == [word, *b"<eot>"]


def test_a_role_makes_no_special_token_that_the_template_does_not_mean() -> None:
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    text = specials_of(small_tokenizers.byte_level(), "<|user|>", "<|end|>", "<|critic|>", template=template)
    user = text._tokenizer.get_vocab_size() - 3
    assert text.encode_prompt(chat("a")) == [user, *b"a", user + 1]
    for role in ("end", "critic", "nd", "x"):
        assert text.encode_prompt(chat("a", role=role)) == [*f"<|{role}|>a".encode(), user + 1]
    named = template + "{% if messages[0].role == 'critic' %}{% endif %}"
    text = specials_of(small_tokenizers.byte_level(), "<|user|>", "<|end|>", "<|critic|>", template=named)
    assert text.encode_prompt(chat("a", role="critic")) == [user + 2, *b"a", user + 1]


@pytest.mark.parametrize("mark", ["<|user|>", "<｜User｜>"])
def test_a_mark_of_the_template_is_not_written_by_users_of_chats(mark: str) -> None:
    """Some models have such tokens and don't mark them special."""
    tokenizer = small_tokenizers.byte_level()
    tokenizer.add_tokens([AddedToken(mark), AddedToken("<|other|>")])
    token = tokenizer.token_to_id(mark)
    template = mark + "{{ messages[0].content }}" + mark + "{{ '<think>' in messages[0].content }}"
    text = ModelText(small_tokenizers.model_of(tokenizer, template))
    assert text.encode_prompt(chat(f"a{mark}")) == [token, *f"a{mark}".encode(), token, *b"False"]
    assert text.encode_prompt(chat("<|other|>"))[1] == token + 1  # not of the template
    assert text.encode_prompt(chat("<think>"))[3:] == [*b"True"]  # not of this form, so templates find it
    assert text.encode(f"a{mark}") == tokenizer.encode(f"a{mark}").ids == [*b"a", token]
    for skip in (True, False):
        assert text.decode([*b"a", token, *b"b"], skip) == f"a{mark}b"

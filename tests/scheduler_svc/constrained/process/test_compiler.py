"""Any grammar is compiled, or refused with a sentence, within the limits on its cost."""

from __future__ import annotations

import json
import time

import pytest
from tokenizers import decoders

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import NUM_TOKENS, byte_model
from scheduler_svc.constrained.process.compiler import REMEMBERED, GrammarCompiler, grammar_text
from scheduler_svc.constrained.process.structural_tag import tagged_text
from scheduler_svc.constrained.source import MAX_BYTES, UnusableGrammar, any_of
from scheduler_svc.front.text.token_texts import TokenTexts
from tests.support import small_tokenizers

ORDERED = '{"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "integer"}}}'
MODEL = byte_model("hash", "HashModel", NUM_TOKENS, 2048)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(MODEL)


def matches(compiler: GrammarCompiler, kind: str, text: str, output: str) -> bool:
    """Returns whether the whole output is allowed and may end there."""
    matcher = compiler.compile(grammar_text(kind, text))
    tokens = list(output.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("kind", "text", "yes", "no"),
    [
        ("regex", "(foo|ba+r)[0-9]?", ["foo", "baaar7"], ["", "fo", "bar77", "xfoo"]),
        ("grammar", 'start: "(" start ")" | "x"', ["x", "((x))"], ["", "(x", "x)"]),
        ("grammar", 'root ::= "a" root "b" | "c"', ["c", "aacbb"], ["ac", "cb"]),
        ("json_schema", '{"type": "array", "items": {"type": "integer"}}', ["[]", "[1, 2]"], ["[1,2]", "[ ]", '["a"]']),
        ("json_schema", '{"type": "object", "properties": {"a": {}}, "required": ["a"]}', ['{"a": null}'], ["{}"]),
        ("json_schema", ORDERED, ['{"z": 1, "a": 2}', '{"a": 2}'], ['{"a": 2, "z": 1}']),
        (
            "json_schema",
            '{"enum": ["a", 1], "x-guidance": {"whitespace_flexible": true}}',
            ['"a"', "1"],
            ["a", "2"],
        ),
    ],
)
def test_the_three_kinds(compiler: GrammarCompiler, kind: str, text: str, yes: list[str], no: list[str]) -> None:
    assert [output for output in yes if not matches(compiler, kind, text, output)] == []
    assert [output for output in no if matches(compiler, kind, text, output)] == []


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", "", "it is empty"),
        ("json_schema", '{"type": "objct"}', "Invalid type: objct"),
        ("json_schema", '{"type":', "can't be read"),
        ("json_schema", '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"$ref": "https://example.com/x"}', "does not fetch"),
        ("json_schema", "false", "Expecting object schema"),
        ("json_schema", '{"a":' * 200 + "1" + "}" * 200, "recursion limit"),
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "a" * (MAX_BYTES + 1), "use at most 65536"),
        ("grammar", "start: missing", 'unknown name: "missing"'),
        ("grammar", "start: " + "(" * 200 + '"a"' + ")" * 200, "too deeply nested"),
    ],
)
def test_what_can_not_be_used_is_refused_with_a_sentence(
    compiler: GrammarCompiler, kind: str, text: str, why: str
) -> None:
    with pytest.raises(UnusableGrammar) as refused:
        compiler.compile(grammar_text(kind, text))
    assert why in str(refused.value) and len(str(refused.value)) < 400 and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(a{1,1000}){1,1000}"),
        ("regex", "(.*a.*b.*c.*d.*e.*f.*g.*h){40}"),
        ("regex", "(((((((.{1,50}x){1,50}y){1,50}z){1,50}w){1,50}v){1,50}u){1,50}t)"),
        ("regex", "|".join(f"(a*){{{count}}}b" for count in range(1, 1000))),
        ("grammar", 'start: x{1,1000}\nx: y{1,1000}\ny: "a"'),
        ("json_schema", json.dumps({"allOf": [{"type": "string", "pattern": f"^.*{c}.*$"} for c in "abcdefghijkl"]})),
        (
            "json_schema",
            json.dumps({"type": "array", "minItems": 10**5, "maxItems": 10**6, "items": {"type": "string"}}),
        ),
        ("json_schema", json.dumps({"enum": [f"{'x' * 10}{n}" for n in range(2000)]})),
    ],
)
def test_what_explodes_is_bounded(compiler: GrammarCompiler, kind: str, text: str) -> None:
    """It is refused, or compiled with its first mask, within seconds of this thread's CPU time."""
    began = time.thread_time()
    try:
        compiler.compile(grammar_text(kind, text)).compute_bitmask()
    except UnusableGrammar as error:
        assert str(error)
    assert time.thread_time() - began < 10


def test_a_grammar_is_compiled_once_and_its_matchers_are_not_shared(compiler: GrammarCompiler) -> None:
    first, second = (compiler.compile(grammar_text("regex", "ab")) for _ in range(2))
    assert first.consume_token(ord("a"))
    assert second.try_consume_tokens([ord("b")]) == 0
    for number in range(REMEMBERED + 1):
        compiler.compile(grammar_text("regex", f"a{{{number + 1}}}"))
    assert len(compiler._compiled) == REMEMBERED


def test_a_model_without_an_end_allows_no_constraint() -> None:
    model = plan_pb2.Model()
    model.CopyFrom(MODEL)
    del model.eos_token_ids[:]
    with pytest.raises(UnusableGrammar, match="no end-of-sequence token"):
        GrammarCompiler(model).compile(grammar_text("regex", "a"))


def test_one_of_some_texts(compiler: GrammarCompiler) -> None:
    grammar = any_of(["yes", 'no "really"'])
    assert matches(compiler, "grammar", grammar, 'no "really"') and not matches(compiler, "grammar", grammar, "no")


def test_structural_tags_constrain_what_is_inside(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    structure = {"begin": "<call=weather>", "schema": schema, "end": "</call>"}
    grammar = tagged_text(json.dumps({"structures": [structure], "triggers": ["<call"]}))
    assert matches(compiler, "grammar", grammar, "no call at all")
    assert matches(compiler, "grammar", grammar, 'well: <call=weather>{"city":"Oslo"}</call> so') or matches(
        compiler, "grammar", grammar, 'well: <call=weather>{"city": "Oslo"}</call> so'
    )
    assert not matches(compiler, "grammar", grammar, "<call=weather>Oslo</call>")
    for bad in ("[]", "{}", '{"structures": [], "triggers": []}', '{"structures": [{"begin": "<a>"}], "triggers": []}'):
        with pytest.raises(UnusableGrammar):
            tagged_text(bad)


@pytest.mark.parametrize("kind", [*small_tokenizers.BYTE_LEVEL, *small_tokenizers.BYTE_FALLBACK, "metaspace_alone"])
def test_a_mask_and_the_text_of_an_answer_have_the_same_letters(kind: str) -> None:
    """Each token's bytes in the grammar library are those that clients receive within an answer."""
    tokenizer = small_tokenizers.ALL["unigram" if kind == "metaspace_alone" else kind]()
    if kind == "metaspace_alone":
        tokenizer.decoder = decoders.Metaspace()
    model = small_tokenizers.model_of(tokenizer)
    built, special = GrammarCompiler(model)._built_tokenizer(), json.loads(model.tokenizer)["added_tokens"]
    texts = TokenTexts(tokenizer, {}, skip_special_tokens=True)
    named = kind == "metaspace_alone"  # then the library's bytes are names in the text
    for token in range(model.vocab_size):
        text = texts[token]
        expected = text.encode() if isinstance(text, str) else text
        if token in {one["id"] for one in special} or expected == b"\xff" or (named and expected.startswith(b"<0x")):
            continue
        assert built.decode_bytes([token]) == expected

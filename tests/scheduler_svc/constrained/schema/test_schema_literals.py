"""Numbers that the grammar library changes, or that crash it, are refused with their path; all others are exact.

ROSTER_TEST_FULL=1 checks each rule against the library itself, also if it crashes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from scheduler_svc.constrained.process.structural_tag import tagged_text
from scheduler_svc.constrained.schema.schema_literals import check_literals
from scheduler_svc.constrained.source import UnusableGrammar
from tests.support.grammar_trials import GrammarTrials
from tests.support.schema_numbers import NUMBERS, outcome, singles
from tests.support.thoroughness import FULL, count


@pytest.fixture(scope="module")
def checked() -> Iterator[GrammarTrials]:
    with GrammarTrials() as trials:
        yield trials


def refusal(schema: str) -> str:
    """Returns why a schema is refused; "" if it is not."""
    try:
        check_literals("json_schema", schema)
    except UnusableGrammar as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("schema", "path", "number"),
    [
        ('{"type": "integer", "const": -1e300}', "const", "-1e300"),
        ('{"type": "integer", "const": 1e300}', "const", "1e300"),
        ('{"type": "integer", "minimum": -9223372036854775808, "maximum": -9223372036854775808}', "minimum", "-92"),
        ('{"properties": {"x": {"const": 18446744073709551615}}}', "properties.x.const", "18446744073709551615"),
        ('{"items": {"enum": [1, {"a": [9007199254740993]}]}}', "items.enum[1].a[0]", "9007199254740993"),
        ('{"$defs": {"n": {"type": "integer", "exclusiveMaximum": 1e18}}}', "$defs.n.exclusiveMaximum", "1e18"),
        ('{"minimum": -9223372036854775808, "exclusiveMinimum": true, "type": "integer"}', "minimum", "-92"),
        ('{"anyOf": [true, {"type": "integer", "maximum": 18446744073709551615}]}', "anyOf[1].maximum", "184"),
        ('{"type": "number", "minimum": 9.726280643121349}', "minimum", "9.726280643121349"),
        ('{"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}', "exclusiveMinimum", "0"),
        ('{"minimum": -1.25, "exclusiveMaximum": -1}', "exclusiveMaximum", "-1"),
        ('{"multipleOf": 2147483648}', "multipleOf", "2147483648"),
        ('{"multipleOf": 500000000}', "multipleOf", "500000000"),
        ('{"multipleOf": 1000003}', "multipleOf", "1000003"),
        ('{"multipleOf": 65537}', "multipleOf", "65537"),
        ('{"allOf": [{"multipleOf": 65521}, {"multipleOf": 65519}]}', "allOf[0].multipleOf", "65521"),
        ('{"allOf": [{"type": "integer"}, {"const": -1e300}]}', "allOf[1].const", "-1e300"),
        (
            '{"properties": {"a": {"type": "integer"}}, "patternProperties": {"a": {"const": -1e300}}}',
            "patternProp",
            "-1",
        ),
        ('{"type": "integer", "$ref": "#/x/y", "x": {"y": {"const": -1e300}}}', "x.y.const", "-1e300"),
        ('{"type": "integer", "$ref": "#/default", "default": {"const": -1e300}}', "default.const", "-1e300"),
        ('{"type": "integer", "$ref": "#/enum/0", "enum": [{"maximum": -1e300, "minimum": -1e300}]}', "enum[0]", "-1e"),
    ],
)
def test_numbers_that_are_changed_are_refused_by_name(schema: str, path: str, number: str) -> None:
    assert refusal(schema).startswith(path) and f": {number}" in refusal(schema), refusal(schema)
    assert "can't be enforced exactly" in refusal(schema) and len(refusal(schema)) < 300
    with pytest.raises(UnusableGrammar, match="can't be enforced exactly"):
        check_literals("json_schema", schema)
    with pytest.raises(UnusableGrammar, match="can't be enforced exactly"):
        check_literals("grammar", f'start: %json // a comment\n {schema} | "a"')


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ('{"type": "integer", "type": "string"}', '"type" appears twice'),
        ('{"const": NaN}', "NaN is not valid JSON"),
        ('{"minimum": -Infinity}', "-Infinity is not valid JSON"),
        ('{"default": 1e999999999}', "1e999999999 is too large"),
        ('{"const": 1e-999999999}', "would become 0"),
        ('{"const": 1e-99999999999999999999}', "is too small"),
        ('{"const": ' + "9" * 10**4 + "}", "is too large"),
        ('{"const": 0.' + "9" * 10**4 + "}", "would become 1"),
        ('{"a":' * 30_000 + "1" + "}" * 30_000, "nested too deeply"),
        ("[" * 60_000, "nested too deeply"),
        ('{"const": 1', "can't be read"),
    ],
)
def test_what_is_no_schema_is_refused_with_a_sentence(schema: str, why: str) -> None:
    assert why in refusal(schema) and len(refusal(schema)) < 300, refusal(schema)[:1000]


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ('{"const": 0.1}', ["0.1"], ["0.10000000000000001", "0"]),
        ('{"const": 1e300}', ["1" + "0" * 300], ["1" + "0" * 299, "1" + "0" * 299 + "1"]),
        ('{"const": -1e300}', ["-1" + "0" * 300], ["1" + "0" * 300]),
        ('{"type": "integer", "maximum": 9223372036854775807}', ["9223372036854775807"], ["9223372036854775808"]),
        ('{"type": "integer", "exclusiveMaximum": 9223372036854775808}', ["9223372036854775807"], [str(2**63)]),
        ('{"type": "integer", "minimum": -9007199254740992}', ["-9007199254740992"], ["-9007199254740993"]),
        ('{"const": 9223372036854775807}', ["9223372036854775807"], ["9223372036854775806"]),
        ('{"type": "string", "const": "a", "minimum": -1e300, "multipleOf": 1000003}', ['"a"'], ["1"]),
        ('{"type": ["string", "null"], "enum": ["a", null, 18446744073709551615]}', ['"a"', "null"], ["1"]),
        ('{"default": 18446744073709551615, "examples": [-1e300], "type": "integer"}', ["1"], ['"a"']),
        (
            '{"properties": {"minimum": {"const": 5}, "const": {"maximum": 7}}, "type": "object"}',
            ['{"minimum": 5}'],
            [],
        ),
        ('{"type": "array", "maxItems": 9007199254740993, "items": {"const": 1}}', ["[1, 1]"], ["[2]"]),
        ('{"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1e6}', ["0.25", "1000000"], ["0.255"]),
        ('{"type": "integer", "multipleOf": 65536}', ["0", "131072"], ["65535"]),
        ('{"type": "integer", "multipleOf": 400000000}', ["0", "1200000000"], ["1200000001"]),
        ('{"type": "integer", "minimum": 0, "maximum": 1, "anyOf": [{"const": 1}, {"const": 2}]}', ["1"], ["0", "2"]),
        ('{"exclusiveMinimum": 0, "exclusiveMaximum": 1, "type": "number"}', ["0.5", "0.01"], ["0", "1", "0.0"]),
        (
            '{"properties": {"a": {"type": "integer"}, "b": {"const": 1e300}}, "additionalProperties": false}',
            ["{}"],
            [],
        ),
    ],
)
def test_what_the_library_keeps_still_works(checked: GrammarTrials, schema: str, yes: list[str], no: list[str]) -> None:
    trial = checked.run("json_schema", schema, [*yes, *no])
    assert trial.accepted == [True] * len(yes) + [False] * len(no), trial


@pytest.mark.parametrize("quoted", [False, True])
def test_schemas_in_structural_tags_are_checked_as_they_are_written(quoted: bool) -> None:
    schema = '{"properties": {"x": {"const": 0.1000000000000000055}}}'
    structure = f'{{"begin": "<a>", "schema": {json.dumps(schema) if quoted else schema}, "end": ""}}'
    with pytest.raises(UnusableGrammar, match=r"x.const: 0.1000000000000000055 can't be enforced exactly"):
        tagged_text(f'{{"structures": [{structure}], "triggers": ["<a"]}}')


def test_a_percent_sign_in_a_string_is_no_schema() -> None:
    check_literals("grammar", 'start: "%json is no schema" | "{"')
    check_literals("grammar", 'start: "%json {" /x/')


def test_each_number_under_each_keyword_is_exact_or_refused(checked: GrammarTrials) -> None:
    cases = singles()
    for schema, numbers in random.Random(1).sample(cases, count(len(cases), in_ci=200)):
        assert outcome(checked, schema, numbers) in ("exact", "refused"), schema


def test_two_bounds_are_exact_or_refused(checked: GrammarTrials) -> None:
    rng = random.Random(2)
    for _ in range(count(2_000, in_ci=60)):
        low, high = sorted(rng.choices(NUMBERS, k=2), key=float)
        typed = rng.choice(('"type": "integer", ', '"type": "number", ', ""))
        lower, upper = rng.choice(("minimum", "exclusiveMinimum")), rng.choice(("maximum", "exclusiveMaximum"))
        schema = f'{{{typed}"{lower}": {low}, "{upper}": {high}}}'
        assert outcome(checked, schema, [low, high]) in ("exact", "refused"), schema


def test_types_and_numbers_that_meet_are_exact_or_refused(checked: GrammarTrials) -> None:
    rng = random.Random(3)
    for _ in range(count(1_000, in_ci=40)):
        parts, numbers = [], rng.choices(NUMBERS, k=3)
        for number in numbers:
            keyword = rng.choice(("const", "minimum", "maximum", "exclusiveMaximum"))
            parts.append(json.loads(json.dumps({keyword: "?", **rng.choice(({}, {"type": "integer"}))})))
            parts[-1] = json.dumps(parts[-1]).replace('"?"', number)
        schema = '{"allOf": [' + ", ".join(parts) + "]}"
        assert outcome(checked, schema, numbers) in ("exact", "refused"), schema


@pytest.mark.skipif(not FULL, reason="some crash the library, and each crash costs a second")
def test_no_rule_is_stricter_than_the_library_needs() -> None:
    with GrammarTrials(raw=True) as raw:
        strict = [
            schema for schema, numbers in singles() if refusal(schema) and outcome(raw, schema, numbers) == "exact"
        ]
        assert strict == [] and raw.deaths > 20

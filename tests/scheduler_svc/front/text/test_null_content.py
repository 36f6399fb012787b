"""Templates for the gateway: null as a message's content is "" where the template can't take null, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from runner_svc.backends.byte_tokenizer import CHAT_TEMPLATE
from scheduler_svc.front.text.chat_template import ChatTemplate
from scheduler_svc.front.text.null_content import with_null_content

USER = {"role": "user", "content": "hi"}
CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
LOOP, END = "{% for m in messages %}", "{% endfor %}"
NONE_MEANS_CALL = (
    LOOP
    + "{% if m.content is none %}CALL {{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}"
    + END
)
BRANCH = LOOP + "{% if m.tool_calls %}CALL{% else %}{{ m.role + m.content }}{% endif %}" + END
TRUTH = LOOP + "{{ m.role }}{% if m.content %}:{{ m.content }}{% endif %}" + END


def rendered(template: str, *messages: dict[str, Any]) -> str:
    mended = with_null_content(template, ChatTemplate(template, {}).render)
    return ChatTemplate(mended, {}).render([USER, *messages], True)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LOOP + "{{ m.role }}:{{ m.content }};" + END, BRANCH])
@pytest.mark.parametrize("said", [{"content": None}, {}])
@pytest.mark.parametrize("role", ["assistant", "tool", "user", "system"])
def test_null_and_no_content_are_empty_where_the_template_takes_neither(
    template: str, said: dict[str, None], role: str
) -> None:
    empty = {"role": role, "content": ""}
    assert rendered(template, {"role": role, **said}) == ChatTemplate(template, {}).render([USER, empty], True)
    calls = {"role": role, "tool_calls": CALLS}
    expected = ChatTemplate(template, {}).render([USER, calls | empty], True)
    assert rendered(template, calls | said) == expected


def test_a_template_that_handles_null_sees_it() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": CALLS}
    assert rendered(NONE_MEANS_CALL, called) == "hiCALL f"
    assert rendered(BRANCH, called) == "userhiCALL"
    assert rendered(TRUTH, called) == "user:hiassistant"
    assert with_null_content(TRUTH, ChatTemplate(TRUTH, {}).render) == TRUTH


@pytest.mark.parametrize("template", ["{{ raise_exception('never') }}", "{{ messages[0].content }}", "no messages"])
def test_a_template_for_which_it_makes_no_difference_is_unchanged(template: str) -> None:
    assert with_null_content(template, ChatTemplate(template, {}).render) == template

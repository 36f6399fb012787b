"""The Jinja dialect of chat templates, against `transformers` where it is installed."""

from __future__ import annotations

import re
from datetime import datetime

import pytest

from scheduler_svc.front.text.chat_template import ChatTemplate, ChatTemplateError

MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": " 1 < 2 & \"quoted\" 'é' {{ 7 * 7 }} {% raw %}"},
    {"role": "assistant", "content": "yes"},
]

TEMPLATES = {
    "blocks are trimmed": "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content | trim }}\n"
    "    {% endif %}\n{% endfor %}\n",
    "json": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ messages[0] | tojson(sort_keys=true) }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 1 %}{% continue %}{% endif %}"
    "{{ m.role }}{% break %}{% endfor %}",
    "generation blocks": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "tools are absent": "{% if tools is none and documents is none and not tools %}none{% endif %}",
    "special tokens": "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    "{% if add_generation_prompt %}>{% endif %}",
    "absent variables are empty": "[{{ nothing }}]{% if nothing is defined %}x{% endif %}",
}


def render(source: str, add_generation_prompt: bool = True) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(MESSAGES, add_generation_prompt)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_renders_as_transformers_does(name: str, add_generation_prompt: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = utils.render_jinja_template(
        conversations=[MESSAGES],
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert render(TEMPLATES[name], add_generation_prompt) == expected[0]


def test_messages_are_data_and_never_templates() -> None:
    assert render("{{ messages[1].content }}") == MESSAGES[1]["content"]


def test_the_date_is_that_of_now() -> None:
    before = datetime.now().strftime("%Y-%m-%d")
    shown = render("{{ strftime_now('%Y-%m-%d') }}")
    assert shown in (before, datetime.now().strftime("%Y-%m-%d"))


def test_a_template_can_refuse() -> None:
    with pytest.raises(ChatTemplateError, match=re.escape("cannot render these messages: no system messages")):
        render("{{ raise_exception('no system messages') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_what_fails_or_escapes_is_an_error_with_a_reason(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot render"):
        render(source)


def test_a_template_that_does_not_compile_says_so() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_rendering_leaves_the_messages_alone() -> None:
    messages = [{"role": "user", "content": "a"}]
    ChatTemplate("{% for m in messages %}{{ m.pop('content') if false else '' }}{% endfor %}", {}).render(
        messages, True
    )
    assert messages == [{"role": "user", "content": "a"}]

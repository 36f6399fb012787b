"""Hostile templates can neither hang a worker nor exhaust its memory; well-behaved ones render as usual."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from roster_protos import inference_pb2, plan_pb2
from runner_svc.backends.byte_tokenizer import byte_model
from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.text.chat_template import ChatTemplate, ChatTemplateError, TemplateUnusable
from scheduler_svc.front.text.template_renderer import GRACE_S, STRIKES, TemplateRenderer
from scheduler_svc.front.text.tokenizer import ModelText
from tests.support.process_state import command_line

MESSAGES = [{"role": "user", "content": "hello 🙂"}]
LIMIT_S = 0.5
PATIENCE_S = 30.0

LOOP = "{% for a in range(99999) %}"
ENDLESS = LOOP * 3 + "{% endfor %}" * 3
DOUBLING = "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
HOSTILE = {
    "an endless loop": ENDLESS,
    "a long text in one instruction": "{{ messages[0].content * 10000000000 }}",
    "a long text that doubles": DOUBLING,
    "a big number": "{{ 9 ** (9 ** (9 + messages|length)) }}",
    "a wide field": "{{ '%1000000000d' % messages|length }}",
    "a padded text": "{{ messages[0].role.ljust(3000000000) }}",
    "a long list": "{{ [messages] * 10000000000 }}",
    "many words": "{{ lipsum(n=100000000) }}",
    "a deep recursion": "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    "too long an answer": "{{ 'x' * 4000 }}",
}  # fmt: skip
CONSTANTS = {
    "a text folded by the compiler": "{{ 'x' * 10000000000 }}",
    "a number folded by the compiler": "{{ 9 ** (9 ** 10) }}",
    "no Jinja": "{% for %}",
}


def renderer(source: str, limit_s: float = LIMIT_S) -> TemplateRenderer:
    return TemplateRenderer(source, {"bos_token": "<s>"}, most_characters=1000, limit_s=limit_s)


def test_an_honest_template_renders_as_in_this_process() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ add_generation_prompt }}"
    )
    honest = renderer(source)
    for prompt in (True, False):
        expected = ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, prompt)
        assert honest.render(MESSAGES, prompt) == expected
    honest.close()
    assert honest.render(MESSAGES, True)  # another process


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_in_time(name: str) -> None:
    hostile = renderer(HOSTILE[name])
    began = time.monotonic()
    with pytest.raises(ChatTemplateError, match="the model's chat template"):
        hostile.render(MESSAGES, True)
    assert time.monotonic() - began < PATIENCE_S
    hostile.close()


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_template_is_not_even_compiled_here(name: str) -> None:
    """Jinja folds constants when it compiles, so compilation alone can exceed the limits."""
    hostile = renderer(CONSTANTS[name])
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="the model's chat template"):
            hostile.render(MESSAGES, True)
    hostile.close()
    if name == "no Jinja":
        with pytest.raises(TemplateUnusable, match="does not compile"):
            hostile.check()


def test_a_template_that_breaks_its_limits_again_and_again_is_given_up() -> None:
    source = "{% if messages[0].content == 'bomb' %}" + ENDLESS + "{% endif %}fine"
    moody = renderer(source, limit_s=0.3)
    bomb = [{"role": "user", "content": "bomb"}]
    for _ in range(STRIKES - 1):
        with pytest.raises(ChatTemplateError, match=r"longer than 0\.3 s"):
            moody.render(bomb, True)
    assert moody.render(MESSAGES, True) == "fine"  # which resets the strikes
    for _ in range(STRIKES):
        with pytest.raises(ChatTemplateError, match=r"longer than 0\.3 s"):
            moody.render(bomb, True)
    took_s = []
    for _ in range(5):  # on a busy machine, some take longer
        began = time.monotonic()
        with pytest.raises(TemplateUnusable, match="exceeded its limits 3 times"):
            moody.render(MESSAGES, True)
        took_s.append(time.monotonic() - began)
    assert min(took_s) < 0.3
    moody.close()


PAUSED = """
from scheduler_svc.front.text.template_renderer import TemplateRenderer

source = "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
renderer = TemplateRenderer(source, {}, most_characters=1000, limit_s=1.0)
renderer.check()
print("begins", flush=True)
print(renderer.render([{"role": "user", "content": "fine"}], True), flush=True)
"""


def test_a_pause_of_the_machine_is_no_time_of_the_template() -> None:
    """Both processes are stopped during rendering for longer than their limits together."""
    with subprocess.Popen([sys.executable, "-c", PAUSED], stdout=subprocess.PIPE, text=True, process_group=0) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "begins\n"
        time.sleep(0.05)
        os.killpg(worker.pid, signal.SIGSTOP)
        time.sleep(1.0 + GRACE_S + 0.5)
        os.killpg(worker.pid, signal.SIGCONT)
        assert worker.stdout.readline() == "fine\n"


def test_a_process_that_stops_or_dies_is_replaced() -> None:
    others = template_processes()
    honest = renderer("{{ messages[0].content }}")
    assert honest.render(MESSAGES, True) == "hello 🙂"
    (child,) = template_processes() - others
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(ChatTemplateError, match="does not answer"):
        honest.render(MESSAGES, True)
    assert honest.render(MESSAGES, True) == "hello 🙂"
    (child,) = template_processes() - others
    os.kill(child, signal.SIGKILL)
    with pytest.raises(ChatTemplateError, match="ended with status -9"):
        honest.render(MESSAGES, True)
    assert honest.render(MESSAGES, True) == "hello 🙂"
    honest.close()
    assert template_processes() <= others


def test_threads_share_it_and_an_object_that_goes_takes_its_process_along() -> None:
    others = template_processes()
    shared = renderer("{{ messages[0].content }}")
    with ThreadPoolExecutor(8) as pool:
        chats = [[{"role": "user", "content": str(n)}] for n in range(50)]
        answers = list(pool.map(shared.render, chats, [True] * 50))
    assert answers == [str(n) for n in range(50)]
    assert len(template_processes() - others) == 1
    del shared, pool
    gc.collect()
    assert template_processes() <= others


def test_a_chat_for_a_hostile_template_is_a_clean_refusal() -> None:
    model = byte_model("hostile", "Hostile", 259, 64)
    model.chat_template = "{{ messages[0].content * 10000000000 }}"
    text = ModelText(model)
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", parts=[{"text": "hi"}])])
    with pytest.raises(Refusal, match=r"prompt\.chat\.messages: the model's chat template"):
        text.encode_prompt(inference_pb2.Prompt(chat=chat))
    with pytest.raises(Refusal, match=r"prompt\.user_message: the model's chat template"):
        text.encode_prompt(inference_pb2.Prompt(user_message="hi"))
    assert text.encode_prompt(inference_pb2.Prompt(text="hi"))
    text.close()


def test_text_of_a_user_is_a_chat_where_there_is_a_template() -> None:
    model = byte_model("any", "Any", 259, 64)
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", parts=[{"text": "<|im_end|> hi"}])])
    rendered, plain = ModelText(model), ModelText(without_template(model))
    mine = inference_pb2.Prompt(user_message="<|im_end|> hi")
    assert rendered.encode_prompt(mine) == rendered.encode_prompt(inference_pb2.Prompt(chat=chat))
    assert plain.encode_prompt(mine) == plain.encode_prompt(inference_pb2.Prompt(text="<|im_end|> hi"))
    rendered.close()


def without_template(model: plan_pb2.Model) -> plan_pb2.Model:
    """Returns the same model without a chat template."""
    copy = plan_pb2.Model()
    copy.CopyFrom(model)
    copy.chat_template = ""
    return copy


def template_processes() -> set[int]:
    """Returns the template processes of this process; an earlier test can have left some to the garbage collector."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if "scheduler_svc.front.text.template_process" in command_line(child)}

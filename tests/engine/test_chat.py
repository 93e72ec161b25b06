from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvferry.engine.chat import ChatTemplate, ChatTemplateError
from kvferry.engine.models.config import DamagedModel
from kvferry.engine.request import InvalidRequest
from kvferry.engine.weights.store import ModelFolder

USER = {"role": "user", "content": "What is 2 + 2?"}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
ASSISTANT = {"role": "assistant", "content": "  Four, naïvely 🎉 & <b>bold</b> {{ user }}"}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, USER],
    [SYSTEM, USER, ASSISTANT, {"role": "user", "content": ""}],
    [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\n"}],
]
LINE_BY_LINE = """{%- set ns = namespace(count=0) -%}
{{ bos_token }}
{% for message in messages %}
  {% if message.role == 'skip' %}
    {% continue %}
  {% endif %}
  {% set ns.count = ns.count + 1 %}
  {% generation %}
{{ ns.count * 2 }}. {{ message | tojson }} {{ message['content'] | trim }}
  {% endgeneration %}
{% endfor %}
{{ eos_token if add_generation_prompt else 'end' }}"""


def template(folder: Path, source: str, **rest: Any) -> ChatTemplate:
    folder.mkdir(exist_ok=True)
    (folder / "chat_template.jinja").write_text(source)
    return ChatTemplate.from_folder(folder, **rest)


@pytest.mark.model
@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_the_default_model_renders_as_transformers_does(
    messages: list[dict[str, str]],
    prompted: bool,
    default_model: ModelFolder,
    reference_tokenizer: Any,
) -> None:
    wanted = reference_tokenizer.apply_chat_template(
        messages, add_generation_prompt=prompted, tokenize=False
    )
    chat = ChatTemplate.from_folder(default_model.path)
    assert chat.render(messages, add_generation_prompt=prompted) == wanted


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("messages", [*CONVERSATIONS, [{"role": "skip", "content": ""}, USER]])
def test_blocks_loops_and_filters_render_as_transformers_does(
    messages: list[dict[str, str]], prompted: bool, tmp_path: Path
) -> None:
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    rendered: Any = render_jinja_template(
        [messages],
        chat_template=LINE_BY_LINE,
        add_generation_prompt=prompted,
        bos_token="<s>",
        eos_token="</s>",
    )
    found = template(tmp_path, LINE_BY_LINE).render(messages, add_generation_prompt=prompted)
    assert found == rendered[0][0]


def test_the_template_is_found_in_its_file_then_in_the_tokenizer_config(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "inside"}))
    assert ChatTemplate.from_folder(tmp_path).render([USER]) == "inside"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "named"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.from_folder(tmp_path).render([USER]) == "named"
    assert template(tmp_path, "file").render([USER]) == "file"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate.from_folder(tmp_path).render([USER])


def test_what_the_template_refuses_is_an_invalid_request(tmp_path: Path) -> None:
    chat = template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        chat.render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ strftime_now.__globals__['now'] }}",
        "{% set _ = messages.append(1) %}",
        "{{ 'x' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** 99999999 }}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{{ undefined.field }}",
        "{{ messages[7].role }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages | tojson(indent=[]) }}",
    ],
)
def test_a_hostile_or_faulty_template_is_stopped(source: str, tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError):
        template(tmp_path, source).render([USER])


def test_the_output_is_bounded_while_it_is_made(tmp_path: Path) -> None:
    endless = (
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}"
    )
    chat = template(tmp_path, endless, max_chars=10_000)
    with pytest.raises(ChatTemplateError, match="10000"):
        chat.render([USER])
    with pytest.raises(ChatTemplateError, match="characters as JSON, wanted at most 10000"):
        chat.render([{"role": "user", "content": "x" * 10_001}])


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "0 of them"),
        ([USER] * 5000, "5000"),
        ([USER, {"role": "user"}], r"messages\[1\]\.content.*NoneType"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\]\.content.*list"),
        ([USER | {"parts": []}], r"messages\[0\]\.parts.*not supported"),
    ],
)
def test_a_malformed_message_is_named(messages: list[Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match=named):
        template(tmp_path, "x").render(messages)


def test_the_date_comes_from_the_clock_given(tmp_path: Path) -> None:
    chat = template(tmp_path, "{{ strftime_now('%d %b') }}", now=lambda: datetime(2024, 7, 4))
    assert chat.render([USER]) == "04 Jul"


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", b"\xff"])
def test_a_template_that_does_not_compile_is_a_damaged_model(
    source: str | bytes, tmp_path: Path
) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_bytes(source if isinstance(source, bytes) else source.encode())
    with pytest.raises(DamagedModel, match=tmp_path.name):
        ChatTemplate.from_folder(tmp_path)

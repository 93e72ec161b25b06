"""Chat templates render what transformers renders, or refuse what it refuses."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from kvferry.engine.chat import MAX_TOOL_CALLS, MAX_TOOLS, ChatTemplate, ChatTemplateError
from kvferry.engine.chat_template import MAX_SOURCE_CHARS, check_compiles
from kvferry.engine.models.errors import DamagedModel
from kvferry.engine.request import InvalidRequest
from kvferry.engine.weights.store import ModelFolder
from tests.engine.chat_templates import (
    ASSISTANT,
    CALL,
    CHATML,
    CONVERSATIONS,
    SPECIAL,
    SYSTEM,
    TEMPLATES,
    USER,
    WEATHER,
)

PLAIN = ["one", "system", "turns", "begun", "empty", "nothing yet", "markup", "thought"]
MODES: dict[str, dict[str, Any]] = {
    "prompted": {"add_generation_prompt": True},
    "bare": {"add_generation_prompt": False},
    "continued": {"add_generation_prompt": False, "continue_final_message": True},
}


@pytest.fixture(scope="module")
def chats() -> Iterator[dict[str, ChatTemplate]]:
    made = {name: ChatTemplate({"default": text}, SPECIAL) for name, text in TEMPLATES.items()}
    yield made
    for chat in made.values():
        chat.close()


def template(folder: Path, source: str, **rest: Any) -> ChatTemplate:
    folder.mkdir(exist_ok=True)
    (folder / "chat_template.jinja").write_text(source)
    return ChatTemplate.from_folder(folder, **rest)


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """What transformers renders; None if it refuses."""
    variables: dict[str, Any] = {**SPECIAL, **options.pop("template_args", {}), **options}
    try:
        rendered: Any = render_jinja_template([messages], chat_template=source, **variables)
    except Exception:
        return None
    return str(rendered[0][0])


def ours(chat: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """What we render; None if the conversation is refused."""
    try:
        return chat.render(messages, **options)
    except ChatTemplateError:
        return None


# --- as transformers does ----------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PLAIN)
def test_the_default_model_renders_as_transformers_does(
    name: str, mode: str, default_model: ModelFolder, reference_tokenizer: Any
) -> None:
    messages, options = CONVERSATIONS[name], MODES[mode]
    wanted = reference_tokenizer.apply_chat_template(messages, tokenize=False, **options)
    chat = ChatTemplate.from_folder(default_model.path)
    assert chat.render(messages, **options) == wanted


@pytest.mark.parametrize("tools", [None, [], [WEATHER], [WEATHER, {"any": ["thing"]}]])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_kind_of_template_renders_as_transformers_does(
    name: str,
    messages: list[dict[str, Any]],
    mode: str,
    tools: list[dict[str, Any]] | None,
    chats: dict[str, ChatTemplate],
) -> None:
    options: dict[str, Any] = {**MODES[mode], "tools": tools}
    assert ours(chats[name], messages, **options) == theirs(TEMPLATES[name], messages, **options)


def test_the_comparison_compares_texts_of_every_template() -> None:
    for name, source in TEMPLATES.items():
        for mode, options in MODES.items():
            texts = [theirs(source, messages, **options) for messages in CONVERSATIONS.values()]
            assert len({text for text in texts if text is not None}) >= 4, (name, mode)
    assert theirs(TEMPLATES["mistral"], CONVERSATIONS["wrong order"]) is None
    assert theirs(TEMPLATES["llama"], CONVERSATIONS["twice"]) is None


CONTENT = st.text(max_size=12) | st.sampled_from(["  x \n", "\n", "<think>a</think> b", "{{ x }}"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
CALLS = st.builds(
    lambda name, arguments: {"function": {"name": name, "arguments": arguments}},
    st.text(max_size=4),
    OBJECTS | st.text(max_size=4),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": CONTENT},
        optional={
            "tool_calls": st.lists(CALLS, min_size=1, max_size=2),
            "tool_call_id": st.text(min_size=1, max_size=4),
            "name": st.text(min_size=1, max_size=4),
        },
    ),
    min_size=1,
    max_size=5,
)


@given(
    st.sampled_from(sorted(TEMPLATES)),
    MESSAGES,
    st.sampled_from(sorted(MODES)),
    st.none() | st.lists(OBJECTS, min_size=1, max_size=2),
    st.fixed_dictionaries({}, optional={"enable_thinking": st.booleans(), "mood": VALUES}),
)
def test_any_conversation_renders_as_transformers_does(
    chats: dict[str, ChatTemplate],
    name: str,
    messages: list[dict[str, Any]],
    mode: str,
    tools: list[dict[str, Any]] | None,
    args: dict[str, Any],
) -> None:
    options: dict[str, Any] = {**MODES[mode], "tools": tools, "template_args": args}
    assert ours(chats[name], messages, **options) == theirs(TEMPLATES[name], messages, **options)


# --- continuing --------------------------------------------------------------------------------


def test_a_continued_message_ends_the_text(chats: dict[str, ChatTemplate]) -> None:
    begun = [USER, {"role": "assistant", "content": "The sum is "}]
    text = chats["chatml"].render(begun, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nThe sum is ")
    trimmed = chats["mistral"].render(begun, continue_final_message=True)
    assert trimmed.endswith("[/INST] The sum is"), "this template trims contents"


def test_the_generation_prompt_is_there_unless_a_message_is_continued(
    chats: dict[str, ChatTemplate],
) -> None:
    chat, prompt = chats["chatml"], "<|im_start|>assistant\n"
    assert chat.render([USER]).endswith(prompt)
    assert not chat.render([USER], add_generation_prompt=False).endswith(prompt)
    assert chat.render([USER], continue_final_message=True).endswith(USER["content"])
    with pytest.raises(ChatTemplateError, match=r"chat\.add_generation_prompt.*continue_final"):
        chat.render([USER], add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ messages[0].content }}", "not in the rendered text"),
        ("{{ messages[-1].content[:3] }}", "not in the rendered text"),
        ("{{ messages[-1].content | lower }}", "not in the rendered text"),
        ("{{ messages[-1].role }}", "reads no content"),
    ],
)
def test_a_message_that_the_template_changes_cannot_be_continued(
    source: str, named: str, tmp_path: Path
) -> None:
    chat = template(tmp_path, source)
    messages = [USER, ASSISTANT]
    with pytest.raises(ChatTemplateError, match=f"continue_final_message.*{named}"):
        chat.render(messages, continue_final_message=True)
    assert theirs(source, messages, continue_final_message=True) is None


# --- which template ----------------------------------------------------------------------------


def test_the_template_is_found_in_its_file_then_in_the_tokenizer_config(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "inside"}))
    assert ChatTemplate.from_folder(tmp_path).render([USER]) == "inside"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "named"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.from_folder(tmp_path).render([USER]) == "named"
    assert template(tmp_path, "file").render([USER]) == "file"


@pytest.mark.parametrize("in_files", [True, False])
def test_requests_with_tools_take_the_template_for_tools(in_files: bool, tmp_path: Path) -> None:
    sources = {"default": "plain", "tool_use": "tools", "rag": "rag"}
    if in_files:
        (tmp_path / "chat_template.jinja").write_text(sources.pop("default"))
        (tmp_path / "additional_chat_templates").mkdir()
        for name, source in sources.items():
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(source)
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "unused"}')
    else:
        listed = [{"name": name, "template": source} for name, source in sources.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    chat = ChatTemplate.from_folder(tmp_path)
    assert chat.render([USER]) == "plain"
    assert chat.render([USER], tools=[WEATHER]) == "tools"


def test_models_without_a_template_that_fits_say_so(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate.from_folder(tmp_path).render([USER])
    chat = ChatTemplate({"tool_use": "tools", "rag": "rag"}, {})
    assert chat.render([USER], tools=[WEATHER]) == "tools"
    with pytest.raises(ChatTemplateError, match="templates are rag, tool_use"):
        chat.render([USER])


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x", b"\xff", "{{ x | nofilter }}", "{% break %}", "{{ 1 }" * 9999]
)
def test_a_template_that_does_not_compile_is_a_damaged_model(
    source: str | bytes, tmp_path: Path
) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_bytes(source if isinstance(source, bytes) else source.encode())
    with pytest.raises(DamagedModel, match=tmp_path.name):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' | center(300000000) }}",
        "{{ '%300000000s' % 'x' }}",
        "{{ 'x' * 300000000 }}",
        "{% autoescape 'x' | center(300000000) %}{% endautoescape %}",
    ],
)
def test_a_template_is_checked_without_evaluating_any_of_it(source: str) -> None:
    tracemalloc.start()
    try:
        check_compiles(source + "{% autoescape false %}{% endautoescape %}")
        _, peak = tracemalloc.get_traced_memory()
    except ValueError:  # may be refused, but must not be evaluated
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 << 20


def test_a_template_too_large_is_a_damaged_model(tmp_path: Path) -> None:
    with pytest.raises(DamagedModel, match=str(MAX_SOURCE_CHARS)):
        template(tmp_path, "x" * (MAX_SOURCE_CHARS + 1))


# --- what is refused ---------------------------------------------------------------------------


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
        "{{ dict.__class__ | string ~ dict.__init__.__globals__ }}",
        "{% set _ = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__x = 1 %}",
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update(role='x') %}",
        "{{ 'x' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** 99999999 }}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{{ undefined.field }}",
        "{{ messages[7].role }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ 'a' * 'b' }}",
        "{{ messages | tojson(indent=[]) }}",
        "{{ '\\ud800' }}",
    ],
)
def test_a_hostile_or_faulty_template_is_stopped(source: str, tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match=r"^chat: the (model's template|rendered text)"):
        template(tmp_path, source).render([USER])


def test_the_output_is_bounded_while_it_is_made(tmp_path: Path) -> None:
    endless = (
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}"
    )
    chat = template(tmp_path, endless, max_chars=10_000)
    with pytest.raises(ChatTemplateError, match="10000"):
        chat.render([USER])


@pytest.mark.parametrize(
    "large",
    [
        {"messages": [{"role": "user", "content": "x" * 10_001}]},
        {"messages": [USER], "tools": [{"x": "x" * 10_001}]},
        {"messages": [USER], "template_args": {"x": "x" * 10_001}},
        {"messages": [USER | {"tool_calls": [{"x": "x" * 10_001}]}]},
    ],
    ids=["content", "tools", "args", "calls"],
)
def test_everything_sent_counts_towards_the_limit(large: dict[str, Any], tmp_path: Path) -> None:
    chat = template(tmp_path, "x", max_chars=10_000)
    with pytest.raises(ChatTemplateError, match="characters as JSON, wanted at most 10000"):
        chat.render(**large)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], r"chat\.messages: 0 of them"),
        ([USER] * 5000, "5000"),
        ([USER, {"role": "user"}], r"chat\.messages\[1\]\.content.*NoneType"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "", "content": "x"}], r"messages\[0\]\.role: empty"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\]\.content.*list"),
        ([USER | {"parts": []}], r"messages\[0\]\.parts.*not supported"),
        ([USER | {"name": 5}], r"messages\[0\]\.name: got int"),
        ([USER | {"tool_call_id": None}], r"messages\[0\]\.tool_call_id: got NoneType"),
        ([USER | {"tool_calls": CALL}], r"messages\[0\]\.tool_calls: got dict, wanted a list"),
        ([USER, USER | {"tool_calls": [CALL, 5]}], r"messages\[1\]\.tool_calls\[1\]: got int"),
        ([USER | {"tool_calls": [CALL] * (MAX_TOOL_CALLS + 1)}], str(MAX_TOOL_CALLS + 1)),
        ([USER | {"tool_calls": [{"x": {1, 2}}]}], "cannot be written as JSON"),
    ],
)
def test_a_malformed_message_is_named(messages: list[Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match=named):
        template(tmp_path, "x").render(messages)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tools": [WEATHER, "weather"]}, r"chat\.tools\[1\]: got str, wanted an object"),
        ({"tools": [WEATHER] * (MAX_TOOLS + 1)}, f"{MAX_TOOLS + 1} of them"),
        *(
            ({"template_args": {"x": 1, name: "y"}}, rf"chat\.template_args: got '{name}'")
            for name in ("messages", "tools", "add_generation_prompt", "bos_token", "cls_token")
        ),
    ],
)
def test_malformed_options_are_named(options: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match=named):
        template(tmp_path, "x").render([USER], **options)


def test_template_arguments_are_variables_of_any_name(tmp_path: Path) -> None:
    chat = template(tmp_path, "{{ self2 }} {{ thinking }} {{ list[0].x }}")
    args = {"self2": "a", "thinking": False, "list": [{"x": 1.5}], "self": 1, "context": 2}
    assert chat.render([USER], template_args=args) == "a False 1.5"


def test_the_date_comes_from_the_clock_given(tmp_path: Path) -> None:
    chat = template(tmp_path, "{{ strftime_now('%d %b') }}", now=lambda: datetime(2024, 7, 4))
    assert chat.render([USER]) == "04 Jul"


def test_a_message_sent_is_not_changed(tmp_path: Path) -> None:
    messages = [dict(SYSTEM), dict(USER)]
    template(tmp_path, CHATML).render(messages, continue_final_message=True)
    assert messages == [SYSTEM, USER]

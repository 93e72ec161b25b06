"""Chat templates of the kinds that models have, written for the tests, and what they render."""

from __future__ import annotations

from typing import Any

CHATML = """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' -}}
{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' -}}
{% endif %}"""

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {{- "<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson(sort_keys=true, separators=(',', ':')) }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not
           (message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- macro say(role, content) -%}
    {{- '<|im_start|>' + role + '\\n' + content }}
{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- say(message.role, message.content) + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {% generation %}
        {%- set content = content -%}
        {{- say('assistant', content) }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson(ensure_ascii=true) }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
        {% endgeneration %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response id="' + message.tool_call_id | default('none') + '">\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {%- continue %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

MISTRAL = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""

# Less what a model has than what the language has.
LANGUAGE = """{%- set ns = namespace(count=0) -%}
{{ bos_token }}
{% for message in messages %}
  {% if message.role == 'tool' %}
    {% continue %}
  {% endif %}
  {% set ns.count = ns.count + 1 %}
  {% set shown = 'outside' %}
  {% generation %}
{% set shown = 'inside' %}
{{ ns.count * 2 }}. {{ message | tojson }} {{ message['content'] | trim }} {{ '-' * 3 }}
  {% endgeneration %}
  {{ shown }} {{ dict(a=1, b=message.role).items() | list }} {{ 2 ** 3 }} {{ documents is none }}
  {% if ns.count > 4 %}{% break %}{% endif %}
{% endfor %}
{{ dict.fromkeys('ab', 0) | tojson(indent=2, separators=(', ', ':')) }} {{ tools | tojson }}
{{ mood | default('none') }} {{ eos_token if add_generation_prompt else 'end' }}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "language": LANGUAGE,
}
SPECIAL: dict[str, str] = {"bos_token": "<s>", "eos_token": "</s>"}

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What it is like in a place — très <simple> & 'quoted'",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALL: dict[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"place": "Zürich", "days": [1, 2.5, None, True]}},
}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
USER = {"role": "user", "content": "What is 2 + 2?"}
ASSISTANT = {"role": "assistant", "content": "  Four, naïvely 🎉 & <b>bold</b> {{ user }}\n "}
CALLING: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"sky": "blue"}', "tool_call_id": "call00001", "name": "w"}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ASSISTANT, USER],
    "begun": [SYSTEM, USER, ASSISTANT],
    "empty": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": ""}],
    "nothing yet": [USER, {"role": "assistant", "content": ""}],
    "markup": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\n"}],
    "called": [USER, CALLING, RESULT, ASSISTANT, USER],
    "answering": [SYSTEM, USER, CALLING, RESULT, RESULT],
    "twice": [USER, {**ASSISTANT, "tool_calls": [CALL, CALL]}, RESULT, RESULT],
    "wrong order": [USER, USER],
    "thought": [USER, {"role": "assistant", "content": "<think>hm</think>\n\nYes"}, USER],
    "another role": [{"role": "developer", "content": "x"}, USER],
}

"""The HTTP door of a served cluster, through OpenAI's own client: real processes, real tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from kvferry.cluster.client import Client
from tests.system.pools import assert_quiet, counters
from tests.system.processes import Served, eventually
from tests.system.test_serving import ENDLESS, GREEDY, PROMPT

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
CHAT: Any = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def http(served: Served) -> Iterator[OpenAI]:
    url = f"http://{served.ready['http']}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0) as connected:
        yield connected


def test_both_doors_serve_the_same_model_and_text(http: OpenAI, client: Client) -> None:
    assert [model.id for model in http.models.list()] == [MODEL]
    ours = client.generate_text(PROMPT, **GREEDY, logprobs=2)
    options: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    theirs = http.completions.create(**options, logprobs=2, extra_body={"ignore_eos": True})
    (choice,) = theirs.choices
    assert choice.text == ours.text == " n o p q r s t u v w x y"
    assert choice.logprobs is not None and theirs.usage is not None
    wanted = [entry.logprob for entry in ours.logprobs]
    assert choice.logprobs.token_logprobs == pytest.approx(wanted, abs=1e-3)
    assert "".join(choice.logprobs.tokens or ()) == choice.text
    assert choice.logprobs.text_offset == list(range(0, 24, 2))
    assert [len(top) for top in choice.logprobs.top_logprobs or ()] == [2] * 12
    assert theirs.usage.prompt_tokens == ours.usage.prompt_tokens == 13


def test_a_chat_streams_what_it_answers_whole(http: OpenAI, client: Client) -> None:
    ours = client.generate_text(chat=CHAT, temperature=0.0, max_tokens=12)
    options: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 12, "temperature": 0}
    whole = http.chat.completions.create(**options).choices[0]
    chunks = list(http.chat.completions.create(**options, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.message.content == ours.text
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == ours.finish_reason


def test_a_seed_repeats_an_output_and_a_bias_forces_one(http: OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "n": 2, "temperature": 1.5}
    first, again, other = (
        [choice.text for choice in http.completions.create(**options, seed=seed).choices]
        for seed in (1, 1, 2)
    )
    assert first == again != other and first[0] != first[1]
    (token,) = http.post("/../tokenize", body={"prompt": "!"}, cast_to=dict[str, Any])["tokens"]
    forced = http.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=3, temperature=0, logit_bias={str(token): 100}
    )
    assert forced.choices[0].text == "!!!"


def test_closing_a_stream_gives_its_blocks_back(http: OpenAI, client: Client) -> None:
    before = counters(client).aborted
    stream = http.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=ENDLESS["max_tokens"],
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    stream.close()
    eventually(
        "it is cancelled", lambda: counters(client).aborted, lambda aborted: aborted == before + 1
    )
    assert_quiet(client)

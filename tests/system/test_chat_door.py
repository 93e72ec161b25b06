"""Conversations through the gRPC door: their own threads, typed errors, and no process left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from kvferry.cluster import router_node
from kvferry.cluster.client import Client
from kvferry.cluster.errors import NotReady
from kvferry.engine.chat import HelperUnavailable
from kvferry.engine.chat_pool import MAX_HELPERS
from kvferry.engine.request import InvalidRequest
from kvferry.protos import kvferry_pb2 as pb
from kvferry.protos.kvferry_pb2_grpc import InferenceStub
from tests.engine.tiny_tokenizers import byte_level
from tests.stack import LONG_S, Stack, eventually

SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'attack' %}" + SLOW + "{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ mood }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with Stack(tmp_path) as running:
        yield running


def said(content: str, role: str = "user") -> pb.ChatInput:
    return pb.ChatInput(messages=[pb.ChatMessage(role=role, content=content)])


def test_every_part_of_a_conversation_reaches_the_prompt(stack: Stack) -> None:
    with Client(stack.endpoint) as client:
        completion = client.generate_text(
            chat=[
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "tool_calls": [{"c": 1}]},
                {"role": "tool", "content": "d "},
            ],
            tools=[{"e": "é"}],
            template_args={"mood": "calm"},
            add_generation_prompt=False,
            max_tokens=1,
            echo_prompt_token_ids=True,
        )
    text = '<user>a<assistant>b[{"c": 1}]<tool>d [{"e": "é"}]calm'
    assert list(completion.prompt_token_ids) == stack.node.intake.tokenizer.encode(text)


def test_tokenizing_and_generating_see_the_same_prompt(stack: Stack) -> None:
    chat = said("The answer is ", "assistant")
    chat.continue_final_message = True
    with grpc.insecure_channel(stack.endpoint) as channel, Client(stack.endpoint) as client:
        stub = InferenceStub(channel)
        ids = stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=LONG_S).token_ids
        completion = client.generate_text(
            chat=[{"role": "assistant", "content": "The answer is "}],
            continue_final_message=True,
            max_tokens=1,
            echo_prompt_token_ids=True,
        )
    assert list(ids) == list(completion.prompt_token_ids)
    assert list(ids) == stack.node.intake.tokenizer.encode("<assistant>The answer is ")


def test_slow_conversations_hold_up_no_text_and_end_with_the_door(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with Stack(tmp_path) as stack, grpc.insecure_channel(stack.endpoint) as channel:
        stub = InferenceStub(channel)
        # more than asyncio's own threads, and each for the whole limit
        slow = [
            stub.Tokenize.future(pb.TokenizeRequest(chat=said("attack")), timeout=LONG_S)
            for _ in range(MAX_HELPERS * 24)
        ]
        first = eventually("a slow one ends", lambda: [call for call in slow if call.done()])[0]
        assert first.code() is grpc.StatusCode.INVALID_ARGUMENT
        for _ in range(5):
            assert stub.Tokenize(pb.TokenizeRequest(text="hello"), timeout=LONG_S).token_ids
        assert not all(call.done() for call in slow)
        helpers = stack.node.intake._chat_template.helpers
        pids = helpers.pids()
        assert 1 <= len(pids) <= MAX_HELPERS
    assert helpers.pids() == [] and not any(psutil.pid_exists(pid) for pid in pids)


def test_a_conversation_too_slow_is_an_invalid_request(stack: Stack) -> None:
    with Client(stack.endpoint) as client:
        with pytest.raises(InvalidRequest, match=r"template was ended after 2 s"):
            client.generate_text(chat=[{"role": "user", "content": "attack"}], max_tokens=1)
        calm = [{"role": "user", "content": "calm"}]
        assert client.generate_text(chat=calm, max_tokens=1).usage.completion_tokens == 1


def test_more_conversations_than_may_wait_are_told_to_come_again(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_node, "MAX_WAITING_CHATS", 2)
    with grpc.insecure_channel(stack.endpoint) as channel:
        stub = InferenceStub(channel)
        calls = [
            stub.Tokenize.future(pb.TokenizeRequest(chat=said("attack")), timeout=LONG_S)
            for _ in range(6)
        ]
        codes = [call.code() for call in calls]
    assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT}


def test_a_template_that_cannot_be_run_is_no_fault_of_the_conversation(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(conversation: object) -> str:
        raise HelperUnavailable("no process can be started")

    monkeypatch.setattr(stack.node.intake, "chat_text", broken)
    with Client(stack.endpoint) as client, pytest.raises(NotReady, match="no process"):
        client.generate_text(chat=[{"role": "user", "content": "a"}], max_tokens=1)

"""The generated code is what the proto gives, and the contract's numbers stay what they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.protos import kvferry_pb2 as pb
from kvferry.protos import kvferry_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("kvferry_pb2.py", "kvferry_pb2.pyi", "kvferry_pb2_grpc.py")


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("grpc_tools")
    out = tmp_path_factory.mktemp("generated")
    flags = [f"--{kind}={out}" for kind in ("python_out", "grpc_python_out", "pyi_out")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *flags, "kvferry/protos/kvferry.proto"],
        cwd=ROOT,
        check=True,
    )
    return out / "kvferry" / "protos"


@pytest.mark.parametrize("name", GENERATED)
def test_regenerating_changes_nothing(name: str, regenerated: Path) -> None:
    committed = (ROOT / "protos" / name).read_text(encoding="utf-8")
    assert committed == (regenerated / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("service", ["Inference", "Cluster"])
def test_typing_stub_names_every_method(service: str) -> None:
    stub = (ROOT / "protos" / "kvferry_pb2_grpc.pyi").read_text(encoding="utf-8")
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name[service].methods}
    for name in (f"{service}Stub", f"{service}AsyncStub", f"{service}Servicer"):
        body = stub.split(f"class {name}:", 1)[1].split("\nclass ", 1)[0].split("\n@", 1)[0]
        listed = {m for m in methods if f"    {m}:" in body or f"def {m}(" in body}
        assert listed == methods, name
    assert hasattr(kvferry_pb2_grpc, f"add_{service}Servicer_to_server")


def numbers(message: str) -> dict[str, int]:
    return {f.name: f.number for f in pb.DESCRIPTOR.message_types_by_name[message].fields}


def in_order(*names: str) -> dict[str, int]:
    return {name: at for at, name in enumerate(names, start=1)}


def test_methods_are_the_published_ones() -> None:
    services = {
        name: [method.name for method in service.methods]
        for name, service in pb.DESCRIPTOR.services_by_name.items()
    }
    assert services == {
        "Inference": ["Generate", "Resume", "Cancel", "Tokenize", "ListModels"],
        "Cluster": ["Status", "Audit", "Drain", "Scale"],
    }


def test_request_field_numbers_are_the_published_ones() -> None:
    assert numbers("GenerateRequest") == in_order(
        *("request_id", "model", "text", "token_ids", "chat", "sampling", "cache_salt"),
        *("priority", "tenant", "adapter", "resume_grace_s", "first_output_index"),
        "echo_prompt_token_ids",
    )
    assert numbers("SamplingParams") == in_order(
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "n", "stop"),
        *("stop_token_ids", "ignore_eos", "include_stop_str_in_output", "logprobs"),
        *("logit_bias", "skip_special_tokens", "bad_words", "prompt_logprobs"),
        *("num_beams", "length_penalty", "early_stopping"),
    )
    assert numbers("ChatInput") == in_order(
        *("messages", "tools", "continue_final_message", "add_generation_prompt", "template_args"),
    )
    assert numbers("ChatMessage") == in_order(
        *("role", "content", "tool_calls", "tool_call_id", "name"),
    )


def test_stream_field_numbers_are_the_published_ones() -> None:
    assert numbers("GenerateResponse") == in_order("request_id", "accepted", "delta", "finished")
    assert numbers("Delta") == in_order(
        *("branch", "index", "token_ids", "text", "logprobs", "prompt_logprobs"),
    )
    published = in_order(
        *("branch", "finish_reason", "stop_reason", "usage", "timing", "transfer", "attempt"),
        "is_last",
    )
    assert published.items() <= numbers("Finished").items()
    assert numbers("Usage") == in_order("prompt_tokens", "cached_tokens", "completion_tokens")


def test_block_class_has_the_documents_name_on_the_wire_too() -> None:
    assert pb.Block.DESCRIPTOR.fields_by_name["block_class"].json_name == "class"

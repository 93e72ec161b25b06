"""The proxy asks prefill for the KV and decode for the tokens."""

from __future__ import annotations

import json

import pytest

from benchmarks.peers.completions_api import peer_request
from benchmarks.peers.hand_over import decode_request, prefill_request
from kvferry.cluster.loadgen.http_target import request_body

REQUEST = json.loads(request_body(peer_request([1, 2, 3], 64), "m", {})[1])
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": 5600}


def test_prefill_makes_one_token_and_keeps_the_kv() -> None:
    asked = prefill_request(REQUEST)
    assert asked["prompt"] == [1, 2, 3]
    assert asked["max_tokens"] == 1
    assert asked["stream"] is False
    assert "stream_options" not in asked  # refused where nothing is streamed
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert asked["kv_transfer_params"]["do_remote_prefill"] is False


def test_decode_gets_the_clients_request_and_where_the_kv_lies() -> None:
    asked = decode_request(REQUEST, {"choices": [], "kv_transfer_params": PARAMS})
    assert asked == {**REQUEST, "kv_transfer_params": PARAMS}


@pytest.mark.parametrize("prefilled", [{}, {"kv_transfer_params": None}])
def test_decode_without_kv_is_an_error(prefilled: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="without kv_transfer_params"):
        decode_request(REQUEST, prefilled)


def test_the_clients_request_is_left_as_it_was() -> None:
    before = dict(REQUEST)
    prefill_request(REQUEST)
    decode_request(REQUEST, {"kv_transfer_params": PARAMS})
    assert before == REQUEST

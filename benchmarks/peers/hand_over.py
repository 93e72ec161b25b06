"""What a proxy says to vLLM's prefill and decode servers: two requests for each one of a client.

Pure: bodies of the completions API in and out. Imports nothing, because it runs in the peer's
environment.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

# What is not known yet is there all the same: the connector reads every key.
_PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_request(request: Json) -> Json:
    """The client's request for the prefill server: one token, not streamed, KV kept for decode."""
    body = {key: value for key, value in request.items() if key != "stream_options"}
    return {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": dict(_PREFILL_PARAMS)}


def decode_request(request: Json, prefilled: Json) -> Json:
    """The client's request for the decode server, with where the prefill server's KV lies.

    Raises ValueError if the prefill server did not keep it.
    """
    params = prefilled.get("kv_transfer_params")
    if not params:
        raise ValueError(f"the prefill server answered without kv_transfer_params: {prefilled}")
    return {**request, "kv_transfer_params": params}

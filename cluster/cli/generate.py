"""``kvferry generate``: stream one prompt's continuation."""

from __future__ import annotations

import argparse
import sys
import time

from kvferry.cluster.cli.command import Command, Result
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import add_endpoint, add_json
from kvferry.cluster.cli.logprobs_view import show_logprobs
from kvferry.cluster.cli.sampling_flags import add_sampling, sampling_options
from kvferry.cluster.cli.signals import CancelOnInterrupt
from kvferry.cluster.client import Client, GenerateStream
from kvferry.cluster.client_stream import Transcript
from kvferry.cluster.errors import Cancelled, ClusterUnreachable
from kvferry.cluster.reports.documents import Outcome, request_json
from kvferry.kv_cache.errors import KVFerryError
from kvferry.protos import kvferry_pb2 as pb


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user's message of a chat"
    )
    add_sampling(parser)
    add_endpoint(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> Result:
    """Stream the text to standard output, or collect it for the document."""
    options = sampling_options(args)
    options["echo_prompt_token_ids"] = args.json
    if args.chat:
        options["chat"] = [{"role": "user", "content": args.prompt}]
    transcript = Transcript(time.monotonic())
    stream: GenerateStream | None = None
    error: KVFerryError | KeyboardInterrupt | None = None
    with Client(args.endpoint) as client:
        try:
            stream = client.generate(None if args.chat else args.prompt, **options)
            with stream, CancelOnInterrupt(stream.close) as interrupt:
                error = _followed(stream, transcript, interrupt, show=not args.json)
        except (KVFerryError, KeyboardInterrupt) as exc:
            error = exc
    request_id = "" if stream is None else stream.request_id
    if isinstance(error, ClusterUnreachable) and not request_id:
        raise error
    if not args.json:
        _summarize(transcript)
        show_logprobs(transcript)
        return Result(error=error)
    reason = Cancelled("interrupted") if isinstance(error, KeyboardInterrupt) else error
    outcome = Outcome(args.prompt, request_id, transcript, reason)
    return Result(fields={"requests": [request_json(outcome)]}, error=error)


def _followed(
    stream: GenerateStream, transcript: Transcript, interrupt: CancelOnInterrupt, *, show: bool
) -> KeyboardInterrupt | None:
    """Follow a stream to its end; an interrupt that cancelled it is returned."""
    try:
        _follow(stream, transcript, show=show)
    except Cancelled:
        if not interrupt.received:
            raise
        return KeyboardInterrupt()
    return None


def _follow(stream: GenerateStream, transcript: Transcript, *, show: bool) -> None:
    for event in stream:
        transcript.add(event, time.monotonic())
        if show and isinstance(event, pb.Delta) and event.text:
            print(event.text, end="", flush=True)


def _summarize(transcript: Transcript) -> None:
    """End the line; tell a person at a terminal how it went."""
    if transcript.text:
        print(flush=True)
    finished = transcript.finished
    if finished is None or not sys.stderr.isatty():
        return
    words = [f"{finished.usage.completion_tokens} tokens", finished.finish_reason]
    if finished.timing.HasField("ttft_s"):
        words.append(f"first token after {finished.timing.ttft_s:.2f} s")
    if finished.timing.HasField("tpot_s"):
        words.append(f"{finished.timing.tpot_s * 1000:.0f} ms per token")
    print(f"[{', '.join(words)}]", file=sys.stderr)


COMMAND = Command(configure, Document("generate", ("requests",)))

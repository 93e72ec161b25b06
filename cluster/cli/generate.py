"""``kvferry generate``: stream one prompt's continuation."""

from __future__ import annotations

import argparse
import sys
import time

from kvferry.cluster.cli.command import Command, Result
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import add_endpoint, add_json, json_objects, security_of
from kvferry.cluster.cli.logprobs_view import show_logprobs
from kvferry.cluster.cli.sampling_flags import add_sampling, sampling_options
from kvferry.cluster.cli.signals import CancelOnInterrupt
from kvferry.cluster.client import Client, GenerateStream
from kvferry.cluster.client_stream import GenerateOptions, Transcript
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
    parser.add_argument(
        "--system", metavar="TEXT", help="a system message before the prompt; implies --chat"
    )
    parser.add_argument(
        "--assistant-prefix",
        metavar="TEXT",
        help="how the assistant's answer begins, to be continued; implies --chat",
    )
    parser.add_argument(
        "--tools",
        metavar="FILE",
        type=json_objects,
        help="a JSON file with a list of tools for the model's chat template; implies --chat",
    )
    parser.add_argument(
        "--cache-salt",
        metavar="TEXT",
        help="share cached KV only with requests of this salt (default: none)",
    )
    parser.add_argument(
        "--priority",
        metavar="N",
        type=int,
        help="lower comes earlier, if the server serves by priority (default: 0)",
    )
    add_sampling(parser)
    add_endpoint(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> Result:
    """Stream the text to standard output, or collect it for the document."""
    options = sampling_options(args)
    options["echo_prompt_token_ids"] = args.json
    if args.cache_salt is not None:
        options["cache_salt"] = args.cache_salt
    if args.priority is not None:
        options["priority"] = args.priority
    options.update(_conversation(args))
    transcript = Transcript(time.monotonic())
    one = options.get("n", 1) == 1
    stream: GenerateStream | None = None
    error: KVFerryError | KeyboardInterrupt | None = None
    with Client(args.endpoint, security=security_of(args)) as client:
        try:
            stream = client.generate(None if "chat" in options else args.prompt, **options)
            with stream, CancelOnInterrupt(stream.close) as interrupt:
                error = _followed(stream, transcript, interrupt, show=one and not args.json)
        except (KVFerryError, KeyboardInterrupt) as exc:
            error = exc
    request_id = "" if stream is None else stream.request_id
    if isinstance(error, ClusterUnreachable) and not request_id:
        raise error
    if not args.json:
        if not one:
            _show_branches(transcript)
        _summarize(transcript)
        show_logprobs(transcript)
        return Result(error=error)
    reason = Cancelled("interrupted") if isinstance(error, KeyboardInterrupt) else error
    outcome = Outcome(args.prompt, request_id, transcript, reason)
    return Result(fields={"requests": [request_json(outcome)]}, error=error)


def _conversation(args: argparse.Namespace) -> GenerateOptions:
    """The prompt as a conversation, if one was asked for."""
    prefix, tools = args.assistant_prefix, args.tools
    if not args.chat and args.system is None and prefix is None and tools is None:
        return {}
    said = [("system", args.system), ("user", args.prompt), ("assistant", prefix)]
    options: GenerateOptions = {
        "chat": [{"role": role, "content": text} for role, text in said if text is not None]
    }
    if prefix is not None:
        options["continue_final_message"] = True
    if tools is not None:
        options["tools"] = tools
    return options


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


def _show_branches(transcript: Transcript) -> None:
    """Print every branch's text under its number: streamed they would mix."""
    for number, branch in sorted(transcript.branches.items()):
        if branch.output_token_ids:
            print(f"[{number}] {branch.text}", flush=True)


def _summarize(transcript: Transcript) -> None:
    """End the line; tell a person at a terminal how it went."""
    if transcript.text and len(transcript.branches) == 1:
        print(flush=True)
    finished = transcript.finished
    if finished is None or not sys.stderr.isatty():
        return
    reasons = {branch.finish_reason for branch in transcript.branches.values()}
    words = [f"{finished.usage.completion_tokens} tokens", *sorted(reasons)]
    if finished.timing.HasField("ttft_s"):
        words.append(f"first token after {finished.timing.ttft_s:.2f} s")
    if finished.timing.HasField("tpot_s"):
        words.append(f"{finished.timing.tpot_s * 1000:.0f} ms per token")
    print(f"[{', '.join(words)}]", file=sys.stderr)


COMMAND = Command(configure, Document("generate", ("requests",)))

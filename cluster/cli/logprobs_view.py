"""Log-probabilities for people: a table on standard error, beside the text on standard output."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvferry.cluster.client_stream import Transcript
from kvferry.cluster.reports.documents import likeliest
from kvferry.protos import kvferry_pb2 as pb


def show_logprobs(transcript: Transcript) -> None:
    """Print those of the prompt, then those of the output; nothing if none came."""
    console = Console(stderr=True)
    for heading, first, entries in (
        ("prompt", 1, transcript.prompt_logprobs),
        ("output", 0, transcript.logprobs),
    ):
        if entries:
            console.print(_table(heading, first, entries))


def _table(heading: str, first: int, entries: Sequence[pb.TokenLogprobs]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(heading, justify="right")
    for name in ("token id", "logprob"):
        table.add_column(name, justify="right")
    table.add_column("likeliest", overflow="fold")
    for place, entry in enumerate(entries, first):
        top = "  ".join(f"{token_id} {logprob:.3f}" for token_id, logprob in likeliest(entry))
        table.add_row(str(place), str(entry.token_id), f"{entry.logprob:.3f}", top)
    return table

"""What a person sees of the demo: texts as they grow, then what each request moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvferry.cluster.cli.blocks import show_pools
from kvferry.cluster.reports.common import Json
from kvferry.cluster.reports.documents import Outcome
from kvferry.protos import kvferry_pb2 as pb

PROMPT_WIDTH = 60


class DemoView:
    """Writes to ``console``; at a terminal the texts grow while the context manager is open."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._texts: dict[str, str] = {}
        self._live = Live(console=console, transient=True, auto_refresh=False)

    def ready(self, startup_s: float, endpoint: str) -> None:
        """The cluster serves."""
        self._console.print(f"ready after {startup_s:.1f} s at {endpoint}\n")

    def streaming(self, prompt: str, text: str) -> None:
        """More text of one prompt has come."""
        self._texts[prompt] = text
        if self._console.is_terminal:
            lines = [_line(prompt, text) for prompt, text in self._texts.items()]
            self._live.update(Group(*lines), refresh=True)

    def summary(self, outcomes: Sequence[Outcome], totals: Json, pools: Sequence[pb.Pool]) -> None:
        """Every request's text and figures, their totals, and the pools afterwards."""
        for outcome in outcomes:
            self._console.print(_line(outcome.prompt, outcome.transcript.text))
            self._console.print(_figures(outcome))
        self._console.print(
            "{completion_tokens} tokens of {num_requests} requests; {blocks_moved} blocks, "
            "{bytes_moved} bytes moved; {preemptions} preemptions\n".format(**totals)
        )
        show_pools(pools, self._console)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()


def _line(prompt: str, text: str) -> Text:
    short = prompt if len(prompt) <= PROMPT_WIDTH else f"{prompt[:PROMPT_WIDTH]}…"
    return Text.assemble((short, "bold"), text)


def _figures(outcome: Outcome) -> Text:
    finished = outcome.transcript.finished
    if outcome.error is not None or finished is None:
        return Text(f"  {type(outcome.error).__name__}: {outcome.error}\n", style="red")
    timing, transfer = finished.timing, finished.transfer
    ttft = f"{timing.ttft_s:.2f} s" if timing.HasField("ttft_s") else "an unknown time"
    return Text(
        f"  {finished.prefill_worker} → {finished.decode_worker}: "
        f"{finished.usage.prompt_tokens} prompt tokens in {finished.num_prefill_chunks} chunks, "
        f"{transfer.blocks_moved} blocks ({transfer.bytes_moved} bytes) moved, "
        f"first token after {ttft}\n",
        style="dim",
    )

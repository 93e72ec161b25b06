"""``kvferry loadgen report`` and ``compare``: what documents say, drawn and in words."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.cluster.cli.command import Result, RunFailed
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import add_json, people
from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.experiments.comparing import compare, failed_only_in_b, worse_than
from kvferry.cluster.loadgen.experiments.renewing import renewed
from kvferry.cluster.loadgen.report.curves import all_charts
from kvferry.cluster.loadgen.report.page import report
from kvferry.cluster.loadgen.report.png import require_plots, write_pngs

COMPARE = Document(
    "loadgen_compare",
    (
        "level",
        "a",
        "b",
        "pairs",
        "only_in_a",
        "only_in_b",
        "failed",
        "words",
        "fail_if_worse",
        "worse",
    ),
)


def add_report_files(group: argparse._ActionsContainer) -> None:
    """``--html`` and ``--png``."""
    group.add_argument(
        "--html", metavar="FILE", type=Path, help="write the report, one page (default: none)"
    )
    group.add_argument(
        "--png",
        metavar="FOLDER",
        type=Path,
        help="write the plots as PNG files; needs the extra 'plots' (default: none)",
    )


def check_report_files(args: argparse.Namespace) -> None:
    """Before anything is measured for them. Raises PlotsMissing, BadLoad."""
    if args.png is not None:
        require_plots()
    for path in (args.html, getattr(args, "out", None)):
        if path is not None and not path.absolute().parent.is_dir():
            raise BadLoad(f"{path}: there is no folder {path.absolute().parent}")


def write_readable(path: Path, text: str) -> None:
    """Write a file whole or not at all, to be read by whom the user's mask allows."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def write_report(document: Mapping[str, Any], args: argparse.Namespace) -> None:
    """The files that the flags ask for."""
    if args.html is not None:
        write_readable(args.html, report(document))
    if args.png is not None:
        write_pngs(all_charts(document), args.png)


def configure_report(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``report``."""
    parser.add_argument("document", type=Path, help="JSON of loadgen run or loadgen sweep")
    add_report_files(parser)
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> Result:
    """Draw a document that was measured earlier, and say its verdicts, by today's definitions."""
    if args.html is None and args.png is None:
        raise BadLoad("report: nothing to write, wanted --html or --png")
    check_report_files(args)
    document = _read(args.document)
    write_report(document, args)
    console = people(args)
    for verdict in document.get("verdicts") or []:
        words = ": ".join(part for part in (verdict["variant"], verdict["words"]) if part)
        console.print(words, markup=False)
    return Result()


def configure_compare(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``compare``."""
    parser.epilog = (
        "Repeats of the same requests are compared pair by pair. Without two repeats on each side "
        "nothing is known of noise, and the figures stand without a judgement."
    )
    parser.add_argument("a", type=Path, help="JSON of loadgen run or loadgen sweep")
    parser.add_argument("b", type=Path, help="another one, of the same kind")
    parser.add_argument(
        "--fail-if-worse",
        metavar="PERCENT",
        type=float,
        help="exit with 1 if B is worse at any figure, beyond noise and by more than so much of A, "
        "or if requests failed in B where none did in A (default: never)",
    )
    add_json(parser)
    parser.set_defaults(run=run_compare)


def run_compare(args: argparse.Namespace) -> Result:
    """B beside A."""
    fields = compare(_read(args.a), _read(args.b))
    percent = args.fail_if_worse
    worse = worse_than(fields["pairs"], percent) if percent is not None else []
    fields |= {
        "fail_if_worse": percent,
        "worse": [
            {"label": each.label, "figure": each.figure, "percent": each.percent} for each in worse
        ],
    }
    console = people(args)
    for pair in fields["pairs"]:
        console.print(f"{pair['label']}:", markup=False)
        for row in pair["figures"]:
            console.print(f"  {row['words']}", markup=False)
    for line in fields["words"]:
        console.print(line, markup=False)
    for side in ("a", "b"):
        if fields[f"only_in_{side}"]:
            console.print(f"only in {side.upper()}: {'; '.join(fields[f'only_in_{side}'])}")
    console.print(
        f"Each interval holds with {fields['level']:.0%}; of twenty figures that do not differ, "
        "one seems to."
    )
    failed = failed_only_in_b(fields["failed"])
    if percent is not None and failed:
        return Result(
            fields, RunFailed(f"{failed[0]['label']} failed in B: {failed[0]['message']}")
        )
    if not worse:
        return Result(fields)
    first = worse[0]
    how = "by any measure" if first.percent is None else f"by {first.percent:.1f} %"
    return Result(
        fields,
        RunFailed(
            f"B is worse at {len(worse)} figures by more than {percent:g} %; "
            f"the first: {first.label}: {first.figure}, {how}"
        ),
    )


def _read(path: Path) -> dict[str, Any]:
    """A document, its figures made again from its requests. Raises BadLoad."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadLoad(f"{path}: cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise BadLoad(f"{path}: holds no document, wanted JSON of loadgen run or loadgen sweep")
    try:
        return renewed(document)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadLoad(
            f"{path}: is no whole document of loadgen run or loadgen sweep: "
            f"{type(error).__name__}: {error}"
        ) from error

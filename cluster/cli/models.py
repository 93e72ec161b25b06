"""``kvferry models``: what is in the model store, and fetching into it."""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from typing import Any

from rich.filesize import decimal
from rich.table import Table

from kvferry.cluster.cli.command import Command, Result
from kvferry.cluster.cli.document import Document
from kvferry.cluster.cli.flags import add_json, people
from kvferry.cluster.cli.progress import ProgressLine


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser(
        "list", help="known models, fetched or not, and those in the Hugging Face cache"
    )
    listing.set_defaults(run=run_list)
    pulling = actions.add_parser("pull", help="fetch a model")
    pulling.add_argument(
        "name",
        metavar="NAME|HF_ID",
        help="a name that 'models list' shows, ORG/NAME of the Hugging Face Hub, or one GGUF file "
        "of it, ORG/NAME/FILE.gguf",
    )
    pulling.add_argument(
        "--revision", metavar="REV", help="branch, tag or commit on the Hub (default: main)"
    )
    pulling.set_defaults(run=run_pull)
    for sub in (listing, pulling):
        add_json(sub)


def run_list(args: argparse.Namespace) -> Result:
    """Show every known model and where it lies."""
    models = [_entry(model) for model in _store().list_models(cache_dir())]
    _show(models, args)
    return Result(fields={"models": models})


def run_pull(args: argparse.Namespace) -> Result:
    """Fetch one model unless it is there."""
    store = _store()
    with ProgressLine(quiet=args.json) as progress:
        found = store.pull(args.name, cache_dir(), progress.stage, args.revision)
    models = [_entry(m) for m in store.list_models(cache_dir()) if m.folder == found.path]
    _show(models, args)
    return Result(fields={"models": models})


def _store() -> Any:
    """The model store, loaded when it is used: it brings torch."""
    return import_module("kvferry.engine.weights.store")


def cache_dir() -> Any:
    """The cache folder that the environment names."""
    return _store().default_cache_dir(os.environ)


def _entry(model: Any) -> dict[str, Any]:
    folder = None if model.folder is None else str(model.folder)
    return {
        "name": model.name,
        "path": folder,
        "source": model.source,
        "size_bytes": model.num_bytes if folder is not None else None,
    }


def _show(models: list[dict[str, Any]], args: argparse.Namespace) -> None:
    if args.json:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("model", "size", "source", "folder"):
        table.add_column(heading, overflow="fold")
    for model in models:
        size = "not fetched" if model["path"] is None else decimal(model["size_bytes"])
        table.add_row(model["name"], size, model["source"], model["path"] or "")
    people(args).print(table)


COMMAND = Command(configure, Document("models", ("models",)))

"""``make parity``: every kind of model beside transformers; prints the table of docs/models.md."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

from kvferry.engine.weights.catalog import DEFAULT_MODEL
from kvferry.engine.weights.store import default_cache_dir, resolve_model
from tests.model_fixture import read_reference
from tests.parity.subjects import likelihoods, random_row, real_row
from tests.parity.table import as_json, markdown, write
from tests.parity.variants import VARIANTS


def main() -> None:
    """Compare all models and print, or write, what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.add_argument("--write", action="store_true", help="also write docs/models.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    for kind in VARIANTS:
        print(f"{kind} ...", file=sys.stderr)
        with TemporaryDirectory() as folder:
            rows.append(random_row(kind, Path(folder)))
    print("the default model ...", file=sys.stderr)
    model = resolve_model(DEFAULT_MODEL, None, default_cache_dir(os.environ))
    theirs = read_reference(model)
    rows.append(real_row(theirs, model))
    found = likelihoods(theirs, model)
    print(as_json(rows, found) if options.json else markdown(rows, found))
    if options.write:
        write(markdown(rows, found))


if __name__ == "__main__":
    main()

"""Resolves one model in a process of its own and prints what came out as JSON.

``huggingface_hub`` reads its environment once, when it is loaded. Arguments: the store's folder,
a JSON object of further arguments of ``ModelStore.resolve``, or with ``pull`` of that.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvferry.engine.models.config import ModelConfig
from kvferry.engine.models.errors import ModelError
from kvferry.engine.weights.store import ModelStore


def main(cache: str, arguments: str) -> None:
    """Print path, name and revision of the model, or the error, and the progress reports."""
    reports: list[tuple[str, int, int]] = []
    store = ModelStore(Path(cache))
    said: dict[str, Any] = {}
    how = json.loads(arguments)
    find = store.pull if how.pop("pull", False) else store.resolve
    try:
        found = find(progress=lambda *r: reports.append(r), **how)
        said |= {"path": str(found.path), "name": found.name}
        said |= {"revision": ModelConfig.from_folder(found.path).revision}
        said |= {"listed": [asdict(model) for model in store.stored()]}
    except ModelError as error:
        said |= {"error": type(error).__name__, "message": str(error)}
    said["heavy"] = sorted({"torch", "transformers"} & set(sys.modules))
    print(json.dumps(said | {"reports": reports}, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])

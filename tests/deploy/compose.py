"""The Compose file's shape, as far as ours uses it, and what promtool is given to read.

Written by hand from the Compose specification: the schema it publishes is not on the package index.
A field that is not here is refused: where the file needs it, look it up and add it.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "array", "items": TEXT}
DURATION: Schema = {"type": "string", "pattern": r"^(\d+(ms|us|s|m|h))+$"}

SERVICE: Schema = {
    "type": "object",
    "required": ["image"],
    "properties": {
        "build": {
            "type": "object",
            "required": ["context"],
            "properties": {
                "context": TEXT,
                "dockerfile": TEXT,
                "target": TEXT,
                "args": {"type": "object", "additionalProperties": TEXT},
            },
            "additionalProperties": False,
        },
        "image": TEXT,
        "command": TEXTS,
        "entrypoint": TEXTS,
        "user": TEXT,
        "init": {"type": "boolean"},
        "ports": {
            "type": "array",
            "items": {"type": "string", "pattern": r"^127\.0\.0\.1:\d+:\d+$"},
        },
        "volumes": {
            "type": "array",
            "items": {"type": "string", "pattern": r"^[^:]+:/[^:]+(:ro)?$"},
        },
        "environment": {"type": "object", "additionalProperties": TEXT},
        "shm_size": {"type": "string", "pattern": r"^\d+[bkmg]$"},
        "cap_drop": TEXTS,
        "security_opt": TEXTS,
        "depends_on": TEXTS,
        "stop_grace_period": DURATION,
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
        "healthcheck": {
            "type": "object",
            "required": ["test"],
            "properties": {
                "test": TEXTS,
                "interval": DURATION,
                "timeout": DURATION,
                "start_period": DURATION,
                "retries": {"type": "integer", "minimum": 1},
            },
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}

SCHEMA: Schema = {
    "type": "object",
    "required": ["services"],
    "properties": {
        "name": TEXT,
        "services": {"type": "object", "additionalProperties": SERVICE},
        "volumes": {
            "type": "object",
            "additionalProperties": {"type": "object", "maxProperties": 0},
        },
    },
    "additionalProperties": False,
}

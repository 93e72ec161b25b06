"""What can be wrong with a model's files.

Errors::

    KVFerryError
      ModelError
        UnsupportedModel   the checkpoint is whole, but asks for something we do not compute
        DamagedModel       a file is missing, truncated, or holds what it must not
"""

from __future__ import annotations

from kvferry.kv_cache.errors import KVFerryError


class ModelError(KVFerryError):
    """A model's files cannot be used; names the file."""


class UnsupportedModel(ModelError):
    """The checkpoint asks for something the decoder does not compute; names what is supported."""


class DamagedModel(ModelError):
    """A model file is missing, truncated or holds impossible values; names file and place."""

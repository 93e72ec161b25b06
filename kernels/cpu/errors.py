"""Errors of the compiled kernels.

ImportError
└── ExtensionUnusable
    ├── ExtensionMissing
    └── ExtensionStale
ValueError
├── InvalidKernelArgument (kernels.errors)
└── UnknownIsa
"""

from __future__ import annotations

from kvferry.kernels.errors import InvalidKernelArgument

__all__ = [
    "ExtensionMissing",
    "ExtensionStale",
    "ExtensionUnusable",
    "InvalidKernelArgument",
    "UnknownIsa",
]


class ExtensionUnusable(ImportError):
    """The compiled kernels cannot be used; says why and how to build them."""


class ExtensionMissing(ExtensionUnusable):
    """They have not been built, or cannot be loaded."""


class ExtensionStale(ExtensionUnusable):
    """They were built from other sources than those beside them."""


class UnknownIsa(ValueError):
    """An instruction set that was not built or that this processor lacks; names those there are."""

"""What every family of kernels raises."""

from __future__ import annotations


class InvalidKernelArgument(ValueError):
    """An argument is not what a kernel takes; names it, what it is and what was wanted.

    Nothing has been written.
    """

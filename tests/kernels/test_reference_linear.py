"""What the plain linears may not do where a step is captured in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.kernels import reference

FROM_THE_HOST = ("lift_fresh", "scalar_tensor", "_local_scalar_dense", "ScalarOther", "ScalarSelf")


class NothingFromTheHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what copies a number to a device or waits for one."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(part in str(func) for part in FROM_THE_HOST):
            raise AssertionError(f"{func} meets the host")
        return func(*args, **(kwargs or {}))


def nothing_from_the_host() -> TorchDispatchMode:
    return NothingFromTheHost()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_linear_can_be_captured(dtype: Any) -> None:
    weight = torch.randn(12, 8)
    linear = reference.linear(weight, torch.randn(12), dtype)
    x = torch.randn(3, 8).to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    with nothing_from_the_host():
        found = linear(x)
    assert found.shape == (3, 12)


def test_the_watch_sees_a_number_that_comes_from_the_host() -> None:
    with pytest.raises(AssertionError, match="meets the host"), nothing_from_the_host():
        torch.randn(3).new_tensor(2.0)

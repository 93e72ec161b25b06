"""Which device, which kernels, and how much memory: asked for, found, or refused with advice."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvferry.engine import kernel_choice
from kvferry.engine.device.choice import DeviceUnavailable, choose_device
from kvferry.engine.kernel_choice import KernelsUnavailable, choose_gpu_kernels, choose_kernels
from kvferry.engine.pool_sizing import device_memory_limit
from kvferry.kernels import reference


@pytest.mark.parametrize(
    ("wanted", "has_cuda", "found"),
    [
        ("auto", True, "cuda"),
        ("auto", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_a_device_is_what_is_asked_for_or_what_there_is(
    wanted: str, has_cuda: bool, found: str
) -> None:
    assert choose_device(wanted, "decode", lambda: has_cuda) == found


def test_cuda_where_there_is_none_is_refused_with_what_to_change() -> None:
    with pytest.raises(DeviceUnavailable, match=r"set decode\.device to cpu, or install") as caught:
        choose_device("cuda", "decode", lambda: False)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("wanted", ["auto", "triton"])
def test_a_gpu_computes_with_triton(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    family = ModuleType("family_of_kernels")
    monkeypatch.setitem(sys.modules, family.__name__, family)
    monkeypatch.setattr(kernel_choice, "TRITON_FAMILY", family.__name__)
    chosen = choose_gpu_kernels(wanted, "sm_90")
    assert (chosen.kernels, chosen.implementation, chosen.isa) == (family, "triton", "sm_90")


@pytest.mark.parametrize("wanted", ["auto", "triton"])
def test_a_gpu_without_triton_is_refused_with_advice(
    monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    monkeypatch.setattr(kernel_choice, "TRITON_FAMILY", "no_such_family_of_kernels")
    with pytest.raises(KernelsUnavailable, match=r"Install triton .* debug\.kernels to reference"):
        choose_gpu_kernels(wanted, "sm_90")


def test_plain_torch_computes_anywhere() -> None:
    chosen = choose_gpu_kernels("reference", "sm_80")
    assert (chosen.kernels, chosen.implementation) == (reference, "reference")


def test_kernels_of_the_other_device_are_refused() -> None:
    with pytest.raises(KernelsUnavailable, match="kernels cpu compute on the CPU"):
        choose_gpu_kernels("cpu", "sm_90")
    with pytest.raises(KernelsUnavailable, match="kernels triton compute on a GPU"):
        choose_kernels("triton")


def test_a_worker_has_its_share_of_a_device_or_what_others_have_left_of_it() -> None:
    alone = device_memory_limit(free=70, total=80, weights_bytes=8, share=1.0)
    assert alone == 78, "2 are CUDA's"
    assert device_memory_limit(free=70, total=80, weights_bytes=8, share=0.5) == 40
    assert device_memory_limit(free=20, total=80, weights_bytes=8, share=0.5) == 28

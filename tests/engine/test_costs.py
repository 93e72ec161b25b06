"""The price of computing again against that of copying, as measured."""

from __future__ import annotations

from kvferry.engine.costs import MeasuredCosts


def measured(compute: float, out: float, back: float) -> MeasuredCosts:
    """Prices of a token, of a byte out, of a byte back."""
    costs = MeasuredCosts()
    costs.computed(10, 10 * compute)
    costs.offloaded(100, 100 * out)
    costs.restored(100, 100 * back)
    return costs


def test_what_is_not_known_is_tried() -> None:
    costs = MeasuredCosts()
    assert costs.prefers_offload(1, 1 << 40, 1 << 40)
    costs.computed(1, 1e-9)
    costs.offloaded(1, 1.0)
    assert costs.prefers_offload(1, 1 << 40, 1 << 40), "copying back was not measured"


def test_the_cheaper_way_is_chosen() -> None:
    costs = measured(compute=1.0, out=0.25, back=0.25)
    assert costs.prefers_offload(num_tokens=10, bytes_out=20, bytes_in=20)
    assert not costs.prefers_offload(num_tokens=10, bytes_out=21, bytes_in=20)
    assert costs.prefers_offload(num_tokens=10, bytes_out=0, bytes_in=20), "it is there already"


def test_averages_follow_what_is_measured() -> None:
    costs = measured(compute=1.0, out=1.0, back=1.0)
    for _ in range(50):
        costs.computed(10, 30.0)
        costs.restored(10, 5.0)
    assert costs.compute_s_per_token is not None and costs.restore_s_per_byte is not None
    assert 2.99 < costs.compute_s_per_token < 3.0
    assert 0.5 < costs.restore_s_per_byte < 0.51
    assert costs.offload_s_per_byte == 1.0


def test_what_took_no_time_or_did_nothing_measures_nothing() -> None:
    costs = MeasuredCosts()
    costs.computed(10, 0.0)
    costs.offloaded(0, 1.0)
    assert costs.compute_s_per_token is None and costs.offload_s_per_byte is None


def test_one_slow_copy_does_not_decide_for_ever() -> None:
    costs = measured(compute=1.0, out=10.0, back=0.1)
    tries = 0
    while not costs.prefers_offload(10, 10, 10):
        tries += 1
        assert tries < 200
    assert tries > 50

"""The check of queries finds what is wrong with one."""

from __future__ import annotations

import pytest

from tests.deploy.queries import metrics_of, problems


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("kvferry_worker_redy == 0", ["kvferry_worker_redy is not exported"]),
        ("rate(kvferry_e2e_request_latency_seconds[5m])", ["is not exported"]),
        ("kvferry_worker_ready_total", ["is not exported"]),
        ('kvferry_worker_ready{worker="x"}', ["kvferry_worker_ready has no label worker"]),
        ('sum(kvferry_kv_blocks{class=~"a|b", kind!="c"})', ["has no label kind"]),
        ("sum by (worker_id, connector) (kvferry_kv_blocks)", ["nothing has the label connector"]),
        ("sum by (le) (kvferry_iteration_tokens_count)", ["nothing has the label le"]),
        ('up{model_name="m"} == 0', ["up has no label model_name"]),
        ("sum by (le) (rate(kvferry_iteration_tokens_bucket[5m]))", []),
        ('sum by (job) (up{job="kvferry"}) > 0 and on (job) kvferry_info', []),
    ],
)
def test_problems(expression: str, expected: list[str]) -> None:
    found = problems(expression)
    assert len(found) == len(expected)
    assert all(want in have for want, have in zip(expected, found, strict=True))


def test_every_series_of_an_expression_is_seen() -> None:
    expression = 'sum(rate(kvferry_kv_evictions_total{role="decode"}[5m])) / sum(up) * 2e3'
    assert set(metrics_of(expression)) == {"kvferry_kv_evictions_total", "up"}

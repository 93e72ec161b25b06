from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engine.weights.store import ModelFolder
from tests.house.source import ROOT
from tests.parity.measure import LENGTHS, NUM_TOKENS, TokensCompared, nll_per_token
from tests.parity.subjects import REAL_TITLE, Row, likelihoods, random_row, real_row
from tests.parity.table import block, replaced, titles_of
from tests.parity.variants import TRAINED_LEN, VARIANTS, WINDOW

COMPARED = len(LENGTHS) * NUM_TOKENS


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two spinning OpenMP threads on two busy cores are slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_equal(row: Row) -> None:
    assert row.logits.largest > 5
    assert row.logits.difference < 1e-5 * row.logits.largest
    passed_over = row.tokens.passed_over
    assert row.tokens == TokensCompared(COMPARED, COMPARED, COMPARED, passed_over)
    assert passed_over <= len(LENGTHS)  # or the reference is all near ties


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_random_model_equals_transformers_colocated_and_disaggregated(
    kind: str, tmp_path: Path
) -> None:
    assert_equal(random_row(kind, tmp_path))


@pytest.mark.model
def test_the_default_model_equals_transformers_colocated_and_disaggregated(
    default_model: ModelFolder, reference_model: Any
) -> None:
    assert_equal(real_row(reference_model, default_model))


@pytest.mark.model
def test_the_likelihood_of_a_text_equals_that_of_transformers(
    default_model: ModelFolder, reference_model: Any
) -> None:
    exact, rounded = likelihoods(reference_model, default_model)
    assert exact.num_tokens >= 200
    assert abs(exact.ours - exact.theirs) < 1e-4
    assert abs(rounded.ours - rounded.theirs) < 0.02


def test_prompts_reach_beyond_every_window_and_every_trained_length() -> None:
    assert max(LENGTHS) > max(WINDOW, TRAINED_LEN)
    assert WINDOW % 16


def test_the_likelihood_is_the_mean_over_all_tokens_but_the_first() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, torch.inf], [9.0, 9.0]])
    logits[1, 1] = 50.0
    assert nll_per_token(logits, [0, 1, 1]) == pytest.approx(torch.tensor(2.0).log().item() / 2)


def test_the_page_lists_exactly_the_variants() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    wanted = [variant.title for variant in VARIANTS.values()]
    assert titles_of(block(page)) == [*wanted, REAL_TITLE]


def test_a_new_table_takes_the_place_of_the_old_one() -> None:
    page = "before\n<!-- parity: begin -->\nold\n<!-- parity: end -->\nafter\n"
    assert block(replaced(page, "new")) == "new"
    assert replaced(page, "new").startswith("before\n")
    assert replaced(page, "new").endswith("\nafter\n")
    with pytest.raises(ValueError, match="parity: begin"):
        replaced("no marks", "new")

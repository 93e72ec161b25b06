"""docs/parameters.md names every field, flag, default and bound as the code has them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from kvferry.cluster import sampling_fields
from kvferry.cluster.cli.sampling_flags import add_sampling
from kvferry.engine.request import MAX_BEAM_STOP_TOKEN_IDS, MAX_BEAMS, SamplingParams
from kvferry.protos import kvferry_pb2 as pb

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parameters.md"
ROW = re.compile(r"\| `(\w+)` \|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|")
DEFAULT = SamplingParams()


def rows() -> dict[str, tuple[str, str, str]]:
    """Flag, range and default of each field."""
    found = [ROW.fullmatch(line) for line in PAGE.read_text().splitlines()]
    return {m[1]: (m[2].strip(), m[3].strip(), m[4].strip()) for m in found if m is not None}


def test_every_field_of_the_contract_has_its_row() -> None:
    assert set(rows()) == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}


def test_every_flag_is_on_the_page() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_sampling(parser)
    flags = {action.option_strings[0] for action in parser._actions}
    named = {flag for text, _, _ in rows().values() for flag in re.findall(r"--[a-z-]+", text)}
    assert named == flags


@pytest.mark.parametrize("name", sorted(set(SamplingParams.__dataclass_fields__) - {"seed"}))
def test_the_default_is_the_code_s(name: str) -> None:
    stated = rows()[name][2].split(" ")[0]
    value = getattr(DEFAULT, name)
    if value is None or value == ():
        assert stated == "none"
    elif isinstance(value, str):
        assert stated.strip("`") == value
    elif isinstance(value, bool):
        assert stated == str(value).lower()
    else:
        assert float(stated) == value


def test_the_bounds_in_number_are_the_code_s() -> None:
    length = f"1 to {sampling_fields.MAX_STOP_STRING_LENGTH} characters"
    assert rows()["stop"][1] == f"{sampling_fields.MAX_STOP_STRINGS} strings of {length}"
    assert rows()["bad_words"][1] == f"{sampling_fields.MAX_BAD_WORDS} strings of {length}"
    assert f"at most {sampling_fields.MAX_LOGIT_BIASES}" in rows()["logit_bias"][1]
    assert rows()["num_beams"][1] == f"1 to {MAX_BEAMS}"
    assert f"At most {MAX_BEAM_STOP_TOKEN_IDS} `stop_token_ids`" in PAGE.read_text()
    for name in ("logprobs", "prompt_logprobs"):
        assert rows()[name][1] == f"0 to {sampling_fields.MAX_LOGPROBS}"

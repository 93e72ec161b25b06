"""Every command, flag and configuration key in ``deploy/`` and its pages is one that exists."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from kvferry.cluster.config import Config, load_config
from tests.deploy.commands import is_checked, problems, simple_commands, unknown_flags
from tests.house.source import ROOT

DEPLOY = ROOT / "deploy"
PAGES = sorted((ROOT / "docs" / "deploy").glob("*.md"))
YAML_FILES = sorted(
    path
    for folder in ("compose", "kubernetes", "ray", "serve")
    for path in (DEPLOY / folder).rglob("*.yaml")
)
FILES = [*PAGES, *YAML_FILES, DEPLOY / "container" / "Dockerfile"]
TOOLS = r"(?:kvferry|ray|serve|make) "


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def readme_section() -> str:
    """What the README says of deploying."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Deploy$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    return str(section)


def strings_of(value: Any) -> Iterator[str]:
    """Shell texts of a YAML document: every string, and every list of words as one command."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from strings_of(each)
    elif isinstance(value, list):
        if value and all(isinstance(each, str) for each in value):
            yield shlex.join(value)
        for each in value:
            yield from strings_of(each)


def shell_texts(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    elif path.suffix == ".yaml":
        for document in yaml.safe_load_all(text):
            yield from strings_of(document)
    else:
        for words in re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE):
            yield shlex.join(json.loads(words))


def commands_in(path: Path) -> list[list[str]]:
    found = []
    for text in shell_texts(path):
        if re.search(rf"(?:^|[/\s;&\"]){TOOLS}", text):
            found += [words for words in simple_commands(text) if is_checked(words)]
    return found


def mentions_in(text: str) -> list[list[str]]:
    """Commands in backticks or in comments."""
    found = re.findall(rf"`({TOOLS}[^`]+)`", text)
    found += re.findall(rf"^# +({TOOLS}.*)$", text, re.MULTILINE)
    return [shlex.split(each.partition(" > ")[0]) for each in found]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_command_is_one_that_its_parser_takes(path: Path) -> None:
    assert [problem for words in commands_in(path) for problem in problems(words)] == []


@pytest.mark.parametrize("path", [*FILES, ROOT / "deploy" / "README"], ids=name_of)
def test_every_command_that_is_mentioned_exists_and_has_its_flags(path: Path) -> None:
    text = path.read_text(encoding="utf-8") if path.exists() else readme_section()
    assert [problem for words in mentions_in(text) for problem in unknown_flags(words)] == []


def test_commands_are_found_where_they_stand() -> None:
    """A search that finds nothing would find no fault."""
    for path, least in (
        ("docs/deploy/local.md", 9),
        ("docs/deploy/aws.md", 7),
        ("docs/deploy/kubernetes.md", 2),
        ("deploy/ray/aws.yaml", 5),
        ("deploy/kubernetes/rayservice.yaml", 3),
        ("deploy/compose/compose.yaml", 1),
        ("deploy/container/Dockerfile", 1),
    ):
        assert len(commands_in(ROOT / path)) >= least, path


@pytest.mark.parametrize(
    "text",
    [
        "kvferry serv --config x",
        "kvferry serve --confg x",
        "cd x && kvferry loadgen run --endpoint nowhere",
        "RAY_AUTH_MODE=token ~/venv/bin/ray start --hed",
        'ray exec --tmux x.yaml "kvferry status --jsn"',
        "serve deplo x.yaml",
        "echo $(kvferry stat)",
        "make wheels",
    ],
)
def test_a_planted_mistake_is_found(text: str) -> None:
    assert [problem for words in simple_commands(text) for problem in problems(words)]


@pytest.mark.parametrize("text", ["kvferry serve --htp", "ray exec --tmuxx", "kvferry downn"])
def test_a_planted_mistake_in_a_mention_is_found(text: str) -> None:
    assert unknown_flags(shlex.split(text))


# --- the configuration


def configurations() -> dict[str, str]:
    """KVFerry's own YAML, by where it stands."""
    found = {}
    for path in YAML_FILES:
        if path.name == "kvferry.yaml" and path.parent.name != "serve":
            found[name_of(path)] = path.read_text(encoding="utf-8")
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if document.get("kind") == "ConfigMap":
                found[name_of(path)] = document["data"]["kvferry.yaml"]
    return found


@pytest.mark.parametrize("name", sorted(configurations()))
def test_every_configuration_is_one_that_loads(name: str, tmp_path: Path) -> None:
    path = tmp_path / "kvferry.yaml"
    path.write_text(configurations()[name], encoding="utf-8")
    config = load_config(path)
    assert config.replicas().prefill >= 1


def keys_of(model: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = f"{above}.{name}" if above else name
        yield key
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation, key)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_key_that_is_mentioned_exists(path: Path) -> None:
    known = set(keys_of(Config))
    sections = "|".join(Config.model_fields)
    text = path.read_text(encoding="utf-8")
    mentioned = set(re.findall(rf"[`{{ ]((?:{sections})(?:\.[a-z_]+)+)[`: ]", text))
    assert mentioned - known - {"serve.yaml", "model.md"} == set()

"""How the configuration is read: a YAML file, then overrides, then every check at once.

Values are checked before anything starts: an unknown key is an error that names its path and the
nearest known key, and a key that only a later version fills is refused by name, so that no key is
ever silently ignored.

Knows nothing of environment variables or flags (``cluster.cli`` gives those as overrides) and
imports neither torch, ray nor grpc. Keys and defaults are in ``cluster.config_schema``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from kvferry.cluster.config_schema import Config, Replicas
from kvferry.cluster.config_types import parse_duration, parse_size
from kvferry.kv_cache.errors import KVFerryError

__all__ = ["Config", "ConfigError", "Replicas", "load_config", "parse_duration", "parse_size"]


class ConfigError(KVFerryError):
    """The configuration cannot be used: names each key, the value it got and the one it wanted."""

    exit_code = 2
    is_one_line = False


# Keys and values that are spoken for and that a later version fills.
_LATER_KEYS = {
    "": ("slo",),
    "cache": ("hash_seed",),
    "transfer": ("max_unsent_blocks",),
    "router": ("replicas", "max_resume_grace", "conditional_prefill"),
    "tenants.*": ("weight",),
}
_LATER_VALUES = {
    "transfer.connector": ("nixl",),
    "router.policy": ("round_robin", "random", "prefix_affinity", "cost"),
}
# Setting one of these by override takes back the file's choice of the others.
_ALTERNATIVES = {
    "model.name": ("model.path", "model.revision"),
    "model.path": ("model.name", "model.revision"),
    "cache.num_blocks": ("cache.memory",),
    "cache.memory": ("cache.num_blocks",),
}


def load_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> Config:
    """Read and check the configuration.

    Args:
        path: YAML file; None takes the defaults.
        overrides: values that stand before the file's, by dotted key (``{"prefill.replicas": 2}``);
            None as a value means that the flag was not given.

    Raises:
        ConfigError: the file cannot be read, or keys or values are wrong; all of them are named.
    """
    data = {} if path is None else _read_yaml(Path(path))
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    for key, value in given.items():
        _override(data, key, value)
        for other in _ALTERNATIVES.get(key, ()):
            if other not in given:
                _override(data, other, None)
    problems = list(_wrong_keys(data, Config))
    if not problems:
        try:
            return Config.model_validate(data)
        except ValidationError as error:
            problems = [_wrong_value(dict(entry)) for entry in error.errors()]
    source = "configuration" if path is None else str(path)
    raise ConfigError(f"{source}: " + f"\n{source}: ".join(problems))


class _Loader(yaml.SafeLoader):
    """YAML without tags, and without a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for at, key in enumerate(keys) if key in keys[:at]), None)
        if twice is not None:
            line = node.start_mark.line + 1
            raise yaml.YAMLError(f"key {twice!r} stands twice in the mapping at line {line}")
        return super().construct_mapping(node, deep=deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            data = yaml.load(file, Loader=_Loader)  # a safe loader: no tags
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: got {type(data).__name__}, wanted a mapping of sections")
    return {key: {} if value is None else value for key, value in data.items()}


def _override(data: dict[str, Any], key: str, value: object) -> None:
    """Set dotted ``key`` in ``data``, in place; None takes it out."""
    *sections, name = key.split(".")
    for section in sections:
        below = data.setdefault(section, {})
        if not isinstance(below, dict):
            return  # the file is wrong there; the check names it
        data = below
    data[name] = value
    if value is None:
        del data[name]


def _sections(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """Keys of a section, each with the section below it, if it is one."""
    return {
        name: field.annotation
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        else None
        for name, field in model.model_fields.items()
    }


def _entry(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The section that a mapping of sections, by names that the user chooses, is made of."""
    kinds = get_args(model.model_fields[name].annotation)
    last = kinds[-1] if kinds else None
    return last if isinstance(last, type) and issubclass(last, BaseModel) else None


def _known_keys(model: type[BaseModel], section: str = "") -> Iterator[str]:
    for name, below in _sections(model).items():
        key = _join(section, name)
        yield key
        if below is not None:
            yield from _known_keys(below, key)
        if (entry := _entry(model, name)) is not None:
            yield from _known_keys(entry, _join(key, "NAME"))


def _wrong_keys(
    data: Mapping[Any, Any], model: type[BaseModel], section: str = ""
) -> Iterator[str]:
    """A message for each key that is unknown or not supported yet, and for each later value."""
    known = _sections(model)
    later = _LATER_KEYS.get(section, ())
    if section.startswith("tenants."):
        later = _LATER_KEYS["tenants.*"]
    for name, value in data.items():
        key = _join(section, name)
        if name in later:
            yield f"{key}: not supported yet in this version; leave it out"
        elif name not in known:
            yield f"{key}: unknown key; {_nearest(section, str(name), list(known))}"
        elif isinstance(value, str) and value in _LATER_VALUES.get(key, ()):
            choices = " or ".join(get_args(model.model_fields[name].annotation))
            yield f"{key}: {value!r} is not supported yet in this version; use {choices}"
        elif (below := known[name]) is not None and isinstance(value, Mapping):
            yield from _wrong_keys(value, below, key)
        elif (entry := _entry(model, name)) is not None and isinstance(value, Mapping):
            for each, section_below in value.items():
                if isinstance(section_below, Mapping):
                    yield from _wrong_keys(section_below, entry, _join(key, each))


def _join(section: str, name: object) -> str:
    return f"{section}.{name}" if section else str(name)


def _nearest(section: str, name: str, siblings: list[str]) -> str:
    """A hint at the key that was meant: one of the same section, else of any."""
    for match in difflib.get_close_matches(name, siblings, n=1):
        return f"did you mean {_join(section, match)}?"
    by_name = {key.rpartition(".")[2]: key for key in reversed(list(_known_keys(Config)))}
    for match in difflib.get_close_matches(name, by_name, n=1, cutoff=0.75):
        return f"did you mean {by_name[match]}?"
    return f"{section or 'the file'} has {', '.join(siblings)}"


def _wrong_value(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors as ``key: got VALUE: what is wrong``."""
    message = str(error["msg"]).removeprefix("Value error, ").replace("Input should", "should")
    if error["type"] == "model_type":
        message = "wanted a mapping of keys"
    location = ".".join(str(part) for part in error["loc"])
    return f"{location}: got {error['input']!r}: {message}" if location else message

"""The whole configuration, and how settings get into it.

Owns: Config, the YAML file, the types of values. An unknown key or a bad value is a ConfigError
with the key and the fix. Flags beat the file, the file beats the defaults.
Must not: read the environment, touch a device or load a model.

A flag is a field's name with dashes (`--chunk-tokens 512`). The YAML file has the same names under
their section:

    model: {model: smollm2}
    scheduler: {policy: multiplex, split: 1}
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from counterpoint.config.checks import ConfigError
from counterpoint.config.sections import (
    ClusterConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)

MAX_INT = 2**63  # whole numbers are below it
TYPE_NAMES: dict[Any, str] = {
    int: "a whole number below 2**63",
    float: "a number",
    bool: "true or false",
    str: "a text",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)

    def replace(self, **flags: Any) -> Config:
        """A copy with flat settings (`chunk_tokens=256`) put into their sections.

        Raises ConfigError for an unknown name or a bad value.
        """
        changes: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for key, value in flags.items():
            changes[section_of(key)][key] = checked_value(key, value)
        return Config(
            **{
                name: dataclasses.replace(getattr(self, name), **values)
                for name, values in changes.items()
            }
        )


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "device": DeviceConfig,
    "scheduler": SchedulerConfig,
    "server": ServerConfig,
    "cluster": ClusterConfig,
}


def from_mapping(tree: Mapping[str, Any], where: str = "config") -> Config:
    """A Config from a nested mapping (a parsed YAML file). Raises ConfigError for the first key
    that is unknown or wrong."""
    flags: dict[str, Any] = {}
    for section, settings in tree.items():
        if section not in SECTIONS:
            raise ConfigError(f"{where}: unknown section {section!r}{_hint(section, SECTIONS)}")
        if settings is None:  # an empty section, or only comments in it
            continue
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"{where}: section {section!r} must be a mapping of settings, not "
                f"{type(settings).__name__}"
            )
        known = [field.name for field in dataclasses.fields(SECTIONS[section])]
        for key, value in settings.items():
            if key not in known:
                raise ConfigError(f"{where}: unknown key {section}.{key}{_hint(key, known)}")
            flags[key] = value
    try:
        return Config().replace(**flags)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def from_file(path: str) -> Config:
    """Read a YAML file. Raises ConfigError if it can't be read, isn't YAML or has a bad key."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.safe_load(file) or {}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: the file must hold sections ({', '.join(SECTIONS)})")
    return from_mapping(tree, path)


def section_of(key: str) -> str:
    for name, section in SECTIONS.items():
        if key in section.__dataclass_fields__:
            return name
    known = [name for section in SECTIONS.values() for name in section.__dataclass_fields__]
    raise ConfigError(f"unknown setting {key!r}{_hint(key, known)}")


def checked_value(key: str, value: Any) -> Any:
    """`value` if it has the type of setting `key`; an int may stand for a float.

    Raises ConfigError otherwise.
    """
    section = SECTIONS[section_of(key)]
    wanted = typing.get_type_hints(section)[key]
    options = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return value
        elif option in (int, float):
            if _is_number(value, option):
                return option(value)
        elif type(value) is option or (option is types.NoneType and value is None):
            return value
    names = [
        "one of " + ", ".join(map(str, typing.get_args(option)))
        if typing.get_origin(option) is Literal
        else TYPE_NAMES[option]
        for option in options
        if option is not types.NoneType
    ]
    shown = repr(value) if section.__dataclass_fields__[key].repr else "wrong"
    raise ConfigError(f"{key} is {shown}: it must be {' or '.join(names)}")


def _is_number(value: Any, kind: type) -> bool:
    if type(value) is int:
        return abs(value) < MAX_INT
    return kind is float and type(value) is float and not math.isnan(value)


def _hint(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(key), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"

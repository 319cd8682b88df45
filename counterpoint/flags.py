"""The settings of config/ as command-line flags.

Owns: how a setting's name, type, default and help become a flag. A given flag beats the file, even
with its default value; a flag that is not given leaves the file's value alone.
Must not: know what a command does.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

from cyclopts import Group, Parameter

from counterpoint.config import SECTIONS, Config, from_file

POSITIONAL = "model"  # this setting is also a command's argument, unless it has one of its own


def config_flags(*sections: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a command `function(*its own flags*, config)`.

    The command gets --config and a flag per setting of `sections` in place of the parameter
    `config`, which receives the resulting Config. A call with bad settings raises ConfigError.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature, names = _signature_with_flags(function, sections)

        @functools.wraps(function)
        def command(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            path = given.pop("config", None)
            changes = {name: given.pop(name) for name in names & given.keys()}
            base = from_file(path) if path is not None else Config()
            config = base.replace(
                **{name: value for name, value in changes.items() if value is not None}
            )
            return function(config=config, **given)

        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return command

    return decorate


def _signature_with_flags(
    function: Callable[..., Any], sections: tuple[str, ...]
) -> tuple[inspect.Signature, set[str]]:
    """The command's signature, and the names of its parameters that are settings."""
    hints = typing.get_type_hints(function, include_extras=True)
    own = [p for p in inspect.signature(function).parameters.values() if p.name != "config"]
    flags = [
        flag_parameter(section, field)
        for section in sections
        for field in dataclasses.fields(SECTIONS[section])
    ]
    if any(p.kind is p.POSITIONAL_OR_KEYWORD for p in own):  # its own argument comes first
        flags = [p.replace(kind=p.KEYWORD_ONLY) for p in flags]
    file = Parameter(
        help="YAML file of settings; flags beat it", group=Group("Settings", sort_key=1)
    )
    parameters = [
        *(p for p in flags if p.kind is p.POSITIONAL_OR_KEYWORD),
        *(p.replace(annotation=hints[p.name]) for p in own),
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, file],
        ),
        *(p for p in flags if p.kind is p.KEYWORD_ONLY),
    ]
    return inspect.Signature(parameters), {p.name for p in flags}


def flag_parameter(section: str, field: dataclasses.Field[Any]) -> inspect.Parameter:
    """The parameter of one setting. None means that the flag was not given."""
    words = str(field.metadata["help"])
    if field.default is not None:
        default = str(field.default)
        words += f" [default: {default.lower() if isinstance(field.default, bool) else default}]"
    kind = typing.get_type_hints(SECTIONS[section])[field.name]
    group = Group(section.capitalize(), sort_key=2 + list(SECTIONS).index(section))
    positional = field.name == POSITIONAL
    about = Parameter(help=words, group=group, show_default=False)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD if positional else inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, about],
    )

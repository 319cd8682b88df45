"""The settings of config.py as command-line flags.

Owns: how a setting's name, type, default and help become a flag. Promises: a flag that is given beats the file, even with its
default, and one that is not given leaves it alone; every setting of a section is there, so nothing is said twice.
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

TITLES = {
    "model": "Model",
    "device": "Device",
    "scheduler": "Scheduler",
    "server": "Server",
    "cluster": "Cluster",
}
POSITIONAL = "model"  # the setting that is also the argument of a command that has no other


def config_flags(*sections: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a command `function(*its own flags*, config)`: gives it --config and the flags of `sections` in place of its
    parameter `config`, which gets the Config they make. Calling the command raises ConfigError if they can't."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function)
        hints = typing.get_type_hints(function, include_extras=True)
        flags = [
            flag_parameter(section, field)
            for section in sections
            for field in dataclasses.fields(SECTIONS[section])
        ]
        if any(
            p.kind is p.POSITIONAL_OR_KEYWORD for p in own.parameters.values() if p.name != "config"
        ):  # an argument of its own comes first
            flags = [p.replace(kind=p.KEYWORD_ONLY) for p in flags]
        file = Parameter(
            help="YAML file of settings; flags beat it", group=Group("Settings", sort_key=1)
        )
        parameters = [
            *(p for p in flags if p.kind is p.POSITIONAL_OR_KEYWORD),
            *(
                p.replace(annotation=hints[p.name])
                for p in own.parameters.values()
                if p.name != "config"
            ),
            inspect.Parameter(
                "config",
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[str | None, file],
            ),
            *(p for p in flags if p.kind is p.KEYWORD_ONLY),
        ]
        signature = inspect.Signature(parameters)
        names = {parameter.name for parameter in flags}

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
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def flag_parameter(section: str, field: dataclasses.Field[Any]) -> inspect.Parameter:
    """The parameter of one setting. None means that it was not given."""
    words = str(field.metadata["help"])
    if field.default is not None:
        words += f" [default: {str(field.default).lower() if isinstance(field.default, bool) else field.default}]"
    kind = typing.get_type_hints(SECTIONS[section])[field.name]
    group = Group(TITLES[section], sort_key=2 + list(TITLES).index(section))
    positional = field.name == POSITIONAL
    about = Parameter(help=words, group=group, show_default=False)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD if positional else inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, about],
    )

"""What a setting is, and the checks that settings and flags share.

Owns: ConfigError and the wording of a refused value: its name, the value, what to write instead.
Must not: read the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A setting is unknown or wrong. The message names it and says what to write instead."""


def setting(
    default: Any,
    help: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    secret: bool = False,
) -> Any:
    """A field of a section. `above` and `at_least` bound its value; a `secret` is never shown."""
    metadata = {"help": help, "above": above, "at_least": at_least}
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


def check_bounds(section: Any) -> None:
    """Raises ConfigError for the first number of `section` outside its bounds. NaN is outside."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        above, at_least = field.metadata["above"], field.metadata["at_least"]
        if value is None:
            continue
        if above is not None and not value > above:
            raise ConfigError(f"{field.name} is {value}: it must be more than {above}")
        if at_least is not None and not value >= at_least:
            raise ConfigError(f"{field.name} is {value}: it must be {at_least} or more")


def require_writable(name: str, path: str | Path | None) -> None:
    """Raises ConfigError if no file can be written at `path`. None and - (standard output) pass.

    Call it before the work whose result goes into the file.
    """
    if path is None or str(path) == "-":
        return
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"{name} is {path}: that is a folder; name a file in it")
    if not file.parent.is_dir():
        raise ConfigError(f"{name} is {path}: there is no folder {file.parent}; create it first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{name} is {path}: no permission to write there")


@contextlib.contextmanager
def name_file_in_errors(path: str | Path) -> Iterator[None]:
    """An OSError while the file is written (a full disk) names the file, as one at opening does."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def parse_host_port(name: str, value: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT or [HOST]:PORT. Raises ConfigError."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{name} is {value!r}: it must be HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)

"""Which processes see each other, and whether one has ended.

Owns: the name of a host. Promises: equal names mean that a process of the one can look at those of the other by number.
Must not: import torch or numpy.
"""

from __future__ import annotations

import os
import secrets
import select
import sys
from functools import cache
from pathlib import Path


@cache
def host_name() -> str:
    """The same for processes that share a kernel and its process numbers, different for others."""
    if not sys.platform.startswith("linux"):
        return secrets.token_hex(8)
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def watch_process(pid: int, host: str) -> int:
    """A descriptor that tells when process `pid` of `host` has ended (see `has_ended`); -1 if that can't be seen from here."""
    if host != host_name() or not sys.platform.startswith("linux"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def has_ended(process: int) -> bool:
    return bool(select.select([process], [], [], 0)[0])

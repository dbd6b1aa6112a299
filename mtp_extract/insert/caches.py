"""The runtime's caches of packed weights, which lie beside a bundle and outlive what they were made from.

LiteRT-LM (XNNPACK) names one ``NAME_MTIME_SIZE…xnnpack_cache``, with the time in whole seconds: a file of the same
name, size and second is taken for the one it packed, and the old matrices are used with the new norms.
"""

from __future__ import annotations

import os
from pathlib import Path

from mtp_extract.errors import few
from mtp_extract.io.source import LocalSource, Source

_ENDING = "xnnpack_cache"


def _caches_of(target: Path) -> list[str]:
    """Names of caches that are of a file called as ``target`` is."""
    with os.scandir(target.absolute().parent) as entries:
        return sorted(e.name for e in entries if e.name.startswith(target.name) and e.name.endswith(_ENDING))


def freshen(stage: Path, target: Path, source: Source) -> None:
    """Give ``stage``, which becomes ``target``, a time of change that no cache and no older file has."""
    status = stage.stat()
    taken = {os.fstat(source.fileno).st_mtime_ns // 10**9} if isinstance(source, LocalSource) else set()
    if target.exists():
        taken.add(target.stat().st_mtime_ns // 10**9)
    second, names = status.st_mtime_ns // 10**9, _caches_of(target)
    while second in taken or any(f"_{second}_" in name for name in names):
        second += 1
    if second != status.st_mtime_ns // 10**9:
        os.utime(stage, ns=(status.st_atime_ns, second * 10**9))


def stale_caches(target: Path) -> list[str]:
    """A note on caches beside ``target`` that were made from what had its name before."""
    names = _caches_of(target)
    if not names:
        return []
    return [f"Delete {few(names)}: the runtime packed them from an older file of this name."]

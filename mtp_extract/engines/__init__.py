"""What generates text from prompts: the loop of this package, and servers.

Names are imported when they are first used: a server needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtp_extract.engines.local import LocalEngine
    from mtp_extract.engines.protocol import Engine
    from mtp_extract.engines.server import Server

__all__ = ["Engine", "LocalEngine", "Server"]

_HOMES = {"Engine": "protocol", "LocalEngine": "local", "Server": "server"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

"""The HTTP library under huggingface_hub: which it is, what its errors mean, what it may log.

huggingface_hub's own session does the talking, for the Hub and for plain URLs: proxies, certificates, offline mode and
a client that an application installed apply here as they do there.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from mtp_extract.errors import MtpExtractError, SourceError, escape

_LOGIN = "log in (hf auth login) or set HF_TOKEN"
STATUSES = {
    401: f"the Hub does not accept the token: {_LOGIN}",
    403: "the token does not give access to the repository",
    404: "there is no such file: check the address",
    416: "the file is empty, or has become shorter",
}
"""What a status means, of the Hub's where its answer does not say more."""

_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_OFFLINE = (
    "offline mode is on (HF_HUB_OFFLINE) and the Hub's cache lacks it. Unset it, or give the path of a local copy"
)
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")
_SECONDS = re.compile(r"[0-9]{1,9}")
_URL = re.compile(r"(https?://)(?:[^\s/?@'\"]+@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?")

# By name, as an application may have given huggingface_hub a client of another library. The first decides.
_MEANINGS = {
    "OfflineModeIsEnabled": _OFFLINE,
    "LocalEntryNotFoundError": _OFFLINE,
    "GatedRepoError": f"the repository is gated: accept its terms on its page on the Hub, then {_LOGIN}",
    "RevisionNotFoundError": "the repository has no such revision: check what follows the @",
    "RemoteEntryNotFoundError": "the repository has no such file: check the path",
    "DisabledRepoError": "the Hub has disabled access to the repository",
    "RepositoryNotFoundError": f"there is no such repository, or it is private: check the name, or {_LOGIN}",
    "TooManyRedirects": "the server redirects in circles",
    "UnsupportedProtocol": "the address, or where the server redirects to, is none of http:// or https://",
    "InvalidURL": "the address, or where the server redirects to, is none that can be requested",
    "ValueError": "the server's answer cannot be read, or it redirects to what is no address",
    "TimeoutException": "the server does not answer in time",
    "ConnectError": "the server cannot be reached",
    "ProxyError": "the server cannot be reached",
    "TransportError": "the connection was lost, or what came over it is not HTTP",
}
_PASSING = ("TimeoutException", "ConnectError", "ProxyError", "TransportError")


def http_library() -> ModuleType:
    """The HTTP library that huggingface_hub is built on: httpx, httpx2 or what comes after them."""
    from huggingface_hub.errors import HfHubHTTPError

    # Not of its session, which an application may have replaced: of the error that all of its errors are.
    return importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])


class FaultError(SourceError):
    """Something that may go away.

    Attributes:
        what: it is, without the name of what was asked for.
        wait: seconds the server asked to be left alone; None if it did not say.
    """

    def __init__(self, name: str, what: str, wait: float | None = None) -> None:
        super().__init__(f"{name}: {what}. Run it again.")
        self.what, self.wait = what, wait


@contextmanager
def faults(name: str) -> Iterator[None]:
    """Turn what the HTTP library and huggingface_hub raise inside into a FaultError or a SourceError.

    What a server wrote is never repeated in a message: it may quote the request, and with it a token.

    Raises:
        FaultError: it may go away.
        SourceError: it will not.
    """
    hide_queries()
    try:
        yield
    except MtpExtractError:
        raise
    except Exception as error:
        answer = getattr(error, "response", None)
        status = answer.status_code if answer is not None else 0
        if answer is not None and status in _BUSY:
            what = "limits the rate of requests" if status == 429 else "is not available"
            wait = answer.headers.get("retry-after", "").strip()
            # Of a Retry-After, seconds count and no date.
            seconds = float(wait) if _SECONDS.fullmatch(wait) else None
            raise FaultError(name, f"the server {what} ({status})", seconds) from None
        kinds = {kind.__name__ for kind in type(error).__mro__}
        kind = next((kind for kind in _MEANINGS if kind in kinds), None)
        if kind is None and not status:
            raise  # a fault of ours
        meaning = _MEANINGS[kind] if kind else STATUSES.get(status, f"the server answered {status}")
        if kind not in _PASSING:
            raise SourceError(f"{name}: {meaning}.") from None
        why = f": {_ERRNO.sub('', escape(error))}" if meaning.endswith("reached") else ""
        raise FaultError(name, meaning + why) from None


def hide_queries() -> None:
    """Keep signed URLs out of the logs of the HTTP library, whatever level the application logs at."""
    library = http_library().__name__
    core = library.replace("httpx", "httpcore")
    parts = (f"{core}.{part}" for part in ("connection", "http11", "http2", "proxy"))
    for name in (library, *parts, "huggingface_hub.utils._http"):
        logging.getLogger(name).addFilter(_hide)  # adding it twice adds it once


def _hide(record: logging.LogRecord) -> bool:
    """Cut queries, where signatures and tokens live, and logins from the URLs that an HTTP library logs."""
    record.msg, record.args = _URL.sub(r"\1\2", record.getMessage()), ()
    return True

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
    404: "there is no such file or revision: check the address",
    416: "the file is empty, or has become shorter",
}
"""What a status means, of the Hub's where its answer does not say more."""

_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_URL = re.compile(r"(https?://)(?:[^\s/?@'\"]+@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?")
_OFFLINE = "offline mode is on (HF_HUB_OFFLINE): name what the Hub's cache has, a bundle as ORG/NAME/FILE, or unset it"
_NO_ADDRESS = "the address is none of http:// or https://, or the server redirects to what is none, or in circles"

# By name, as an application may have given huggingface_hub a client of another library. The first decides.
_LASTING = {
    **dict.fromkeys(("OfflineModeIsEnabled", "LocalEntryNotFoundError"), _OFFLINE),
    "GatedRepoError": f"the repository is gated: accept its terms on its page on the Hub, then {_LOGIN}",
    "RepositoryNotFoundError": f"there is no such repository, or it is private: check the name, or {_LOGIN}",
    **dict.fromkeys(("TooManyRedirects", "UnsupportedProtocol", "InvalidURL", "ValueError"), _NO_ADDRESS),
}
_PASSING = {
    "TimeoutException": "the server does not answer in time",
    **dict.fromkeys(("ConnectError", "ProxyError"), "the server cannot be reached"),
    "TransportError": "the connection was lost, or what came over it is not HTTP",
}


def http_library() -> ModuleType:
    """The HTTP library that huggingface_hub is built on: httpx, httpx2 or what comes after them."""
    from huggingface_hub.errors import HfHubHTTPError

    # Not of its session, which an application may have replaced: of the error that all of its errors are.
    return importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])


class FaultError(SourceError):
    """Something that may go away; ``what`` says it without the name of what was asked for."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}. Run it again.")
        self.what = what


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
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in _BUSY:
            what = "limits the rate of requests" if status == 429 else "is not available"
            raise FaultError(name, f"the server {what} ({status})") from None
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if why := next((why for kind, why in _LASTING.items() if kind in kinds), STATUSES.get(status)):
            raise SourceError(f"{name}: {why}.") from None
        if why := next((why for kind, why in _PASSING.items() if kind in kinds), ""):
            raise FaultError(name, f"{why}: {escape(error)}" if why.endswith("reached") else why) from None
        if status:
            raise SourceError(f"{name}: the server answered {status}.") from None
        raise  # a fault of ours


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

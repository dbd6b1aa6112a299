"""The HTTP library under huggingface_hub: import it, explain its errors, keep secrets out of its logs.

All requests, to the Hub and to plain URLs, go through huggingface_hub's session. So proxies, certificates, offline mode
and a client that an application installed apply to them.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from mtp_extract.errors import MtpExtractError, SourceError, escape

_LOGIN = "log in (hf auth login) or set HF_TOKEN"
STATUSES = {
    401: f"the Hub does not accept the token: {_LOGIN}",
    403: f"the token does not give access to the repository, or there is none: {_LOGIN}",
    404: "there is no such file or revision: check the address",
    416: "the file is empty, or has become shorter",
}
"""HTTP status → its meaning, where the Hub's answer does not say more."""

_BUSY = dict.fromkeys((408, 425, 500, 502, 503, 504), "is not available") | {429: "limits the rate of requests"}
_URL = re.compile(r"(https?://)(?:[^\s/?@'\"]+@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?")
_SECRET = re.compile(r"\b(?:hf_\w+|Bearer\s+\S+)")
_LONGEST_WORDS = 400  # characters of what a server says
_OFFLINE = "offline mode is on (HF_HUB_OFFLINE): name what the Hub's cache has, a bundle as ORG/NAME/FILE, or unset it"
_GATED = f"the repository is gated: accept its terms on its page on the Hub, then {_LOGIN}"
_NO_REPOSITORY = f"there is no such repository, or it is private: check the name, or {_LOGIN}"
_NO_ADDRESS = (
    "the address is damaged, or the server redirects to one that is not https:// or http://, or in circles: check "
    "the address"
)
_NO_HUB = "the answer lacks the Hub's headers: check HF_ENDPOINT, or a proxy that drops headers"


def import_http_library() -> ModuleType:
    """Import the HTTP library of huggingface_hub: httpx2, or httpx before its version 2."""
    import huggingface_hub

    return importlib.import_module("httpx" if huggingface_hub.__version__.startswith("1.") else "httpx2")


class FaultError(SourceError):
    """An error that may go away when the request is repeated; ``what`` is its text without the name of the file."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}. Run it again.")
        self.what = what


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Turn errors of the HTTP library and of huggingface_hub into FaultError or SourceError.

    A server's own words are quoted only from the Hub's header: a body may repeat the request, and with it a token.

    Raises:
        FaultError: the error may go away.
        SourceError: it will not.
    """
    hide_queries()
    try:
        yield
    except MtpExtractError:
        raise
    except Exception as error:
        from huggingface_hub.errors import LocalEntryNotFoundError

        # After any error of the Hub its client looks into its cache, and raises that the file is not there.
        cause: BaseException = error
        while isinstance(cause, LocalEntryNotFoundError) and cause.__cause__ is not None:
            cause = cause.__cause__
        why, is_passing = _explain_error(cause)
        if why:
            raise (FaultError(name, why) if is_passing else SourceError(f"{name}: {why}.")) from None
        raise  # a bug of this package


def _explain_error(error: BaseException) -> tuple[str, bool]:
    """Return the meaning of ``error``, and whether it may go away; "" if it is no error of the Hub or of HTTP."""
    from huggingface_hub import errors

    http, response = import_http_library(), get_response(error)
    if (status := getattr(response, "status_code", 0)) in _BUSY:
        return f"the server {_BUSY[status]} ({status})", True
    rows: tuple[tuple[Any, str, bool], ...] = (  # the first decides
        (http.TimeoutException, "the server does not answer in time", True),
        ((http.ConnectError, http.ProxyError), f"the server cannot be reached: {escape(error)}", True),
        (http.UnsupportedProtocol, _NO_ADDRESS, False),
        (http.TransportError, "the connection was lost, or what came over it is not HTTP", True),
        ((errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError), _OFFLINE, False),
        (errors.GatedRepoError, _GATED, False),
        (errors.RepositoryNotFoundError, _NO_REPOSITORY, False),
        (errors.FileMetadataError, _NO_HUB, False),
        ((errors.HfHubHTTPError, http.HTTPStatusError), _explain_status(response), False),
        ((http.TooManyRedirects, http.InvalidURL, ValueError), _NO_ADDRESS, False),
    )
    return next(((why, passes) for kinds, why, passes in rows if isinstance(error, kinds)), ("", False))


def _explain_status(response: Any) -> str:
    """Return the meaning of a status that will not go away; "" without a response."""
    if response is None:
        return ""
    status = response.status_code
    # Any other refusal may have many reasons, such as a setting of the token: the Hub's words say which.
    words = "" if status in (401, 404, 416) else read_hub_message(response)
    return STATUSES.get(status, f"the server answered {status}") + (f". The Hub says: {words}" if words else "")


def get_response(error: BaseException) -> Any:
    """Return the response that ``error`` is about; None if it is about none."""
    from huggingface_hub.errors import HfHubHTTPError

    return error.response if isinstance(error, (HfHubHTTPError, import_http_library().HTTPStatusError)) else None


def read_hub_message(response: Any) -> str:
    """Return the Hub's message in the header of a refusal, without secrets; "" if there is none."""
    return mask_secrets(response.headers.get("X-Error-Message", "")).rstrip(".")


def mask_secrets(text: str, token: str = "") -> str:
    """Return ``text`` in one line without ``token`` or any other token, and URLs without logins and queries."""
    masked = text.replace(token, "…") if token else text
    masked = _URL.sub(r"\1\2", _SECRET.sub("…", masked))
    return escape(" ".join(masked.split()), _LONGEST_WORDS)


def hide_queries() -> None:
    """Keep signed URLs out of the logs of the HTTP library, at every level."""
    library = import_http_library().__name__
    core = library.replace("httpx", "httpcore")
    parts = (f"{core}.{part}" for part in ("connection", "http11", "http2", "proxy"))
    for name in (library, *parts, "huggingface_hub.utils._http"):
        logging.getLogger(name).addFilter(_hide_secrets)  # adding it twice adds it once


def _hide_secrets(record: logging.LogRecord) -> bool:
    """Remove queries of URLs, where signatures stand, logins and tokens from a log record."""
    record.msg, record.args = _SECRET.sub("…", _URL.sub(r"\1\2", record.getMessage())), ()
    return True

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
from typing import Any

from mtp_extract.errors import MtpExtractError, SourceError, escape

_LOGIN = "log in (hf auth login) or set HF_TOKEN"
STATUSES = {
    401: f"the Hub does not accept the token: {_LOGIN}",
    403: f"the token does not give access to the repository, or there is none: {_LOGIN}",
    404: "there is no such file or revision: check the address",
    416: "the file is empty, or has become shorter",
}
"""What a status means, of the Hub's where its answer does not say more."""

_BUSY = dict.fromkeys((408, 425, 500, 502, 503, 504), "is not available") | {429: "limits the rate of requests"}
_URL = re.compile(r"(https?://)(?:[^\s/?@'\"]+@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?")
_SECRET = re.compile(r"\b(?:hf_\w+|Bearer\s+\S+)")
_LONGEST_WORDS = 400  # characters of what a server says
_OFFLINE = "offline mode is on (HF_HUB_OFFLINE): name what the Hub's cache has, a bundle as ORG/NAME/FILE, or unset it"
_GATED = f"the repository is gated: accept its terms on its page on the Hub, then {_LOGIN}"
_NO_REPOSITORY = f"there is no such repository, or it is private: check the name, or {_LOGIN}"
_NO_ADDRESS = "the address is none of http:// or https://, or the server redirects to what is none, or in circles"
_NO_HUB = "the answer lacks what the Hub says of a file: check HF_ENDPOINT, or a proxy that drops headers"


def http_library() -> ModuleType:
    """The HTTP library that huggingface_hub is built on: httpx2, and before its version 2 httpx."""
    import huggingface_hub

    return importlib.import_module("httpx" if huggingface_hub.__version__.startswith("1.") else "httpx2")


class FaultError(SourceError):
    """Something that may go away; ``what`` says it without the name of what was asked for."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}. Run it again.")
        self.what = what


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Turn what the HTTP library and huggingface_hub raise inside into a FaultError or a SourceError.

    Of what a server wrote, only what the Hub says in a header is repeated: a body may quote the request, and with it a
    token.

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
        from huggingface_hub.errors import LocalEntryNotFoundError

        # Whatever goes wrong at the Hub, its client looks into its cache then, and raises that this lacks the file.
        cause: BaseException = error
        while isinstance(cause, LocalEntryNotFoundError) and cause.__cause__ is not None:
            cause = cause.__cause__
        why, is_passing = _explain_error(cause)
        if why:
            raise (FaultError(name, why) if is_passing else SourceError(f"{name}: {why}.")) from None
        raise  # a fault of ours


def _explain_error(error: BaseException) -> tuple[str, bool]:
    """What ``error`` is, in words, and whether it may go away; no words where it is none of the Hub or of HTTP."""
    from huggingface_hub import errors

    http, response = http_library(), response_of(error)
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
    """What the status of ``response`` means, which is no passing one; nothing without a response."""
    if response is None:
        return ""
    status = response.status_code
    # What else is refused may have any reason, such as a setting of the token.
    words = "" if status in (401, 404, 416) else words_of_hub(response)
    return STATUSES.get(status, f"the server answered {status}") + (f". The Hub says: {words}" if words else "")


def response_of(error: BaseException) -> Any:
    """The answer whose status ``error`` is about; None where it is about none."""
    from huggingface_hub.errors import HfHubHTTPError

    return error.response if isinstance(error, (HfHubHTTPError, http_library().HTTPStatusError)) else None


def words_of_hub(response: Any) -> str:
    """What the Hub says in the header of a refusal, without tokens and signatures; empty where it says nothing."""
    return without_secrets(response.headers.get("X-Error-Message", "")).rstrip(".")


def without_secrets(text: str, token: str = "") -> str:
    """``text`` to be shown: one line, without ``token`` or any other, and URLs without logins and queries."""
    masked = text.replace(token, "…") if token else text
    masked = _URL.sub(r"\1\2", _SECRET.sub("…", masked))
    return escape(" ".join(masked.split()), _LONGEST_WORDS)


def hide_queries() -> None:
    """Keep signed URLs out of the logs of the HTTP library, whatever level the application logs at."""
    library = http_library().__name__
    core = library.replace("httpx", "httpcore")
    parts = (f"{core}.{part}" for part in ("connection", "http11", "http2", "proxy"))
    for name in (library, *parts, "huggingface_hub.utils._http"):
        logging.getLogger(name).addFilter(_hide_secrets)  # adding it twice adds it once


def _hide_secrets(record: logging.LogRecord) -> bool:
    """Cut queries, where signatures and tokens live, logins and tokens from what an HTTP library logs."""
    record.msg, record.args = _SECRET.sub("…", _URL.sub(r"\1\2", record.getMessage())), ()
    return True

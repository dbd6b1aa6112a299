"""What may go wrong between here and a server, and when to try again."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from mtp_extract.errors import SourceError, escape
from mtp_extract.io.policy import Policy, retry_after

__all__ = ["BUSY", "HUB_STATUSES", "FaultError", "Faults", "Patience", "busy", "http_library"]

BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may go away by themselves."""

HUB_STATUSES: Mapping[int, str] = MappingProxyType(
    {
        401: "the Hub does not accept the token: log in again (hf auth login) or set HF_TOKEN",
        403: "the token does not give access to the repository",
        404: "there is no such file: check the address",
    }
)
"""What the Hub means by a status, where its answer does not say more."""


class FaultError(Exception):
    """Something that may go away. ``str()`` says what.

    Attributes:
        wait: seconds the server asked to be left alone; None if it did not say.
        slow: the answer came, but too slowly.
        first: it says nothing about the server, which may not be there at all.
    """

    def __init__(self, what: str, wait: float | None = None, slow: bool = False, first: bool = False) -> None:
        super().__init__(what)
        self.wait = wait
        self.slow = slow
        self.first = first


def busy(response: Any) -> FaultError:
    """The fault that a status of :data:`BUSY` stands for."""
    status = int(response.status_code)
    what = "limits the rate of requests" if status == 429 else "is not available"
    return FaultError(f"the server {what} ({status})", retry_after(response.headers.get("retry-after")))


def http_library() -> ModuleType:
    """The HTTP library under huggingface_hub's session: httpx, httpx2 or what comes after them."""
    from huggingface_hub import get_session

    client = next(kind for kind in type(get_session()).__mro__ if kind.__name__ == "Client")
    return importlib.import_module(client.__module__.partition(".")[0])


class Patience:
    """Counts failures and waits between them, until the policy says that it is enough."""

    def __init__(self, name: str, policy: Policy) -> None:
        self._name = name
        self._policy = policy
        self._failures = 0
        self._slow = 0
        self.answered = False
        """Whether the server has ever answered."""

    def forgive(self) -> None:
        """Start counting again: there was progress."""
        self._failures = self._slow = 0

    def spend(self, fault: FaultError) -> None:
        """Wait before the next attempt.

        Raises:
            SourceError: there have been too many, or the server wants more time than the policy grants.
        """
        policy = self._policy
        self._failures += 1
        self._slow += fault.slow
        limit = policy.first_failures if fault.first and not self.answered else policy.failures
        if self._failures > limit or self._slow > policy.slow_failures:
            raise SourceError(
                f"{self._name}: {fault} (attempt {self._failures}, the last). Nothing was written; try again later."
            ) from fault
        if fault.wait is not None and fault.wait > policy.longest_wait:
            raise SourceError(
                f"{self._name}: {fault}, and asks to be left alone for {fault.wait:.0f} seconds. Try again after that."
            ) from fault
        policy.sleep(policy.wait(self._failures) if fault.wait is None else fault.wait)


class Faults:
    """Turns what the HTTP library and huggingface_hub raise into a FaultError or a SourceError.

    What a server wrote is never repeated in a message: it may quote the request, and with it a token.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, (SourceError, FaultError)) or not isinstance(error, Exception):
            return
        from huggingface_hub import errors

        http = http_library()
        if isinstance(error, errors.OfflineModeIsEnabled):
            raise SourceError(
                f"{self._name}: offline mode is on (HF_HUB_OFFLINE) and the file is not in the Hub's cache. "
                "Unset it, or give the path of a local copy."
            ) from None
        if isinstance(error, errors.HfHubHTTPError):
            raise self._hub(error) from None
        if isinstance(error, (http.InvalidURL, http.UnsupportedProtocol)):
            raise SourceError(f"{self._name}: this is not an address that can be requested.") from None
        if isinstance(error, http.TooManyRedirects):
            raise SourceError(f"{self._name}: the server redirects in circles.") from None
        if isinstance(error, http.TimeoutException):
            raise FaultError("the server does not answer in time", first=True) from None
        if isinstance(error, (http.ConnectError, http.ProxyError)):
            raise FaultError(f"the server cannot be reached: {escape(error)}", first=True) from None
        if isinstance(error, http.TransportError):
            raise FaultError("the connection was lost") from None

    def _hub(self, error: Any) -> Exception:
        response = getattr(error, "response", None)
        status = int(response.status_code) if response is not None else 0
        if status in BUSY:
            return busy(response)
        from huggingface_hub import errors

        # Most derived first.
        named: tuple[tuple[type[Exception], str], ...] = (
            (
                errors.GatedRepoError,
                "the repository is gated: accept its terms on its page on the Hub, then log in (hf auth "
                "login) or set HF_TOKEN",
            ),
            (errors.RevisionNotFoundError, "the repository has no such revision: check what follows the @"),
            (errors.EntryNotFoundError, "the repository has no such file: check the path"),
            (errors.DisabledRepoError, "the Hub has disabled access to the repository"),
            (
                errors.RepositoryNotFoundError,
                "there is no such repository, or it is private: check the name, and log in (hf auth "
                "login) or set HF_TOKEN if it needs that",
            ),
        )
        text = next((text for kind, text in named if isinstance(error, kind)), None)
        return SourceError(f"{self._name}: {text or HUB_STATUSES.get(status, f'the Hub answered {status}')}.")

"""Where the bytes of an address are served, and what identifies them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urljoin, urlsplit

from mtp_extract.errors import SourceError
from mtp_extract.io.address import HubAddress, WebAddress

__all__ = ["HubOrigin", "Origin", "Target", "WebOrigin"]


@dataclass(frozen=True)
class Target:
    """One answer to "where is it?".

    Attributes:
        url: to be requested; may be signed, so it is never shown.
        headers: to be sent there; may hold a token, so they are never shown.
        size: bytes of the file; None until a range was answered.
        identity: what must stay the same while the file is read.
    """

    url: str = field(repr=False)
    headers: dict[str, str] = field(repr=False)
    size: int | None = None
    identity: dict[str, str] = field(default_factory=dict)


class Origin(Protocol):
    """Something that knows where a file is served."""

    name: str

    def resolve(self, timeout: float) -> Target:
        """Ask (or know) where the file is. Raises what huggingface_hub raises."""

    def provenance(self, target: Target, etag: str | None, modified: str | None) -> dict[str, str]:
        """What identifies the bytes, for the record."""


class HubOrigin:
    """A file on the Hub. Once resolved, it stays on the commit that its revision stood for."""

    def __init__(self, address: HubAddress, token: str | bool | None, headers_for: HeadersFor) -> None:
        self.address = address
        self.name = address.name
        self._token = token
        self._headers_for = headers_for
        self._commit: str | None = None

    def resolve(self, timeout: float) -> Target:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        address = self.address
        url = hf_hub_url(
            address.repository,
            address.path,
            repo_type=address.kind,
            revision=self._commit or address.revision,
            endpoint=constants.ENDPOINT,
        )
        metadata = get_hf_file_metadata(url, token=self._token, timeout=timeout, endpoint=constants.ENDPOINT)
        if metadata.commit_hash is None:
            raise SourceError(
                f"{self.name}: {escape_host(url)} did not say which commit the file belongs to, as the "
                "Hub does. Check HF_ENDPOINT, or a proxy that drops headers."
            )
        self._commit = metadata.commit_hash
        # The header that the Hub sends before the redirect: of the file itself, not of the CDN's copy.
        identity = {"commit": metadata.commit_hash}
        if metadata.etag:
            identity["etag"] = metadata.etag
        location = urljoin(url, metadata.location)
        # As huggingface_hub does: the token goes to the Hub, never to where the Hub redirects.
        token = self._token if _origin(location) == _origin(url) else False
        return Target(location, self._headers_for(token), metadata.size, identity)

    def provenance(self, target: Target, etag: str | None, modified: str | None) -> dict[str, str]:
        return self.address.record(target.identity["commit"], target.identity.get("etag"))


class WebOrigin:
    """A file behind a plain URL. No token of the Hub is ever sent there."""

    def __init__(self, address: WebAddress, headers_for: HeadersFor) -> None:
        self.address = address
        self.name = address.name
        self._headers_for = headers_for

    def resolve(self, timeout: float) -> Target:
        return Target(self.address.url, self._headers_for(False))

    def provenance(self, target: Target, etag: str | None, modified: str | None) -> dict[str, str]:
        record = {"url": self.name}
        if etag:
            record["etag"] = etag
        if modified:
            record["last_modified"] = modified
        return record


class HeadersFor(Protocol):
    """Makes the headers of a request: the user agent, and the token (``False`` for none)."""

    def __call__(self, token: str | bool | None) -> dict[str, str]: ...


def escape_host(url: str) -> str:
    """The scheme and host of ``url``, which is all of it that may be shown."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, parts.port or default

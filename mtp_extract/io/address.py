"""What a user may write for a remote file, taken apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from mtp_extract.errors import SourceError, escape

__all__ = ["HubAddress", "WebAddress", "parse_address"]

_KINDS = {"datasets": "dataset", "spaces": "space", "models": "model"}
_MODEL_FILES = (".litertlm", ".tflite", ".task")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_SHA256 = re.compile(r"[0-9a-f]{64}")

_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")


@dataclass(frozen=True)
class HubAddress:
    """A file in a repository of the Hub.

    Attributes:
        repository: ``org/name``.
        path: of the file within the repository.
        revision: branch, tag or commit; None for the default branch.
        kind: ``model``, ``dataset`` or ``space``.
    """

    repository: str
    path: str
    revision: str | None = None
    kind: str = "model"

    @property
    def name(self) -> str:
        """The address in the Hub's own form, which ends in the file's name."""
        prefix = "" if self.kind == "model" else f"{self.kind}s/"
        at = f"@{quote(self.revision, safe='')}" if self.revision else ""
        return escape(f"hf://{prefix}{self.repository}{at}/{self.path}")

    def record(self, commit: str, etag: str | None) -> dict[str, str]:
        """What identifies the file, for the record: repository, path, the revision asked for and its commit.

        The Hub's ETag is the SHA-256 of the content for a file in LFS or Xet, git's blob id for others.
        """
        record = {"repository": self.repository, "path": self.path}
        if self.kind != "model":
            record["repository_type"] = self.kind
        record |= {"revision": self.revision or "main", "commit": commit}
        if etag:
            record["etag"] = etag
            if _SHA256.fullmatch(etag):
                record["sha256"] = etag
        return record


@dataclass(frozen=True)
class WebAddress:
    """A file behind a plain URL. ``url`` is what is requested, ``name`` what may be shown and kept."""

    url: str

    @property
    def name(self) -> str:
        """The URL without credentials, query and fragment."""
        parts = urlsplit(self.url)
        return escape(urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")))

    @property
    def file(self) -> str:
        """The last part of the path."""
        return unquote(urlsplit(self.url).path).rpartition("/")[2] or "download"


def parse_address(text: str, endpoint: str) -> HubAddress | WebAddress:
    """``hf://org/repo/path[@revision]``, ``hf://org/repo@revision/path`` or an ``https://`` URL.

    The URL of a file on the Hub's own site (``…/resolve/REVISION/…`` or ``…/blob/REVISION/…``) is taken as
    the ``hf://`` address it stands for, so that tokens and commits are handled.

    Args:
        text: what the user wrote.
        endpoint: URL of the Hub in use.

    Raises:
        SourceError: it is none of these.
    """
    if text.startswith("hf://"):
        return _hub(text)
    try:
        parts = urlsplit(text)
        host = parts.hostname
        port = parts.port
    except ValueError as error:
        raise SourceError(f"Expected an https:// URL, found one that cannot be read: {error}.") from None
    if parts.scheme not in ("https", "http") or not host:
        raise SourceError(
            f"Expected a path, hf://org/repo/file.litertlm[@revision] or an https:// URL, found {escape(_safe(text))}."
        )
    hub = urlsplit(endpoint)
    same = (parts.scheme, host, port) == (hub.scheme, hub.hostname, hub.port)
    if same or (parts.scheme == "https" and host in _HUB_HOSTS):
        address = _site(parts.path.removeprefix(hub.path.rstrip("/") if same else ""))
        if address is not None:
            return address
    return WebAddress(text)


def _safe(text: str) -> str:
    return text.partition("?")[0].rpartition("@")[2]


def _hub(text: str) -> HubAddress:
    parts = text.removeprefix("hf://").split("/")
    kind = _KINDS.get(parts[0])
    if kind is not None and len(parts) > 3:
        parts = parts[1:]
    owner, repository, rest = parts[0], (parts[1] if len(parts) > 1 else ""), parts[2:]
    repository, inline, revision = repository.partition("@")
    if inline and revision == "refs" and len(rest) > 2:
        # hf://org/repo@refs/pr/1/file: the one kind of revision whose slashes need no escape.
        revision, rest = "/".join([revision, *rest[:2]]), rest[2:]
    path = "/".join(rest)
    if not inline and "@" in path and not path.endswith(_MODEL_FILES):
        path, _, revision = path.rpartition("@")
        inline = "@"
    revision = unquote(revision)
    named = _PART.fullmatch(owner) and _PART.fullmatch(repository)
    if not named or not path or (inline and not revision) or any(p in ("", ".", "..") for p in path.split("/")):
        raise SourceError(
            f"Expected hf://org/repo/file.litertlm or hf://org/repo/file.litertlm@revision, found {escape(text)}."
        )
    return HubAddress(f"{owner}/{repository}", path, revision or None, kind or "model")


def _site(path: str) -> HubAddress | None:
    parts = [unquote(part) for part in path.strip("/").split("/")]
    kind = "model"
    if parts and parts[0] in ("datasets", "spaces"):
        kind = _KINDS[parts.pop(0)]
    if len(parts) < 5 or parts[2] not in ("resolve", "blob", "raw"):
        return None
    owner, repository, _, revision, *rest = parts
    if revision == "refs" and len(rest) > 2:
        revision, rest = "/".join([revision, *rest[:2]]), rest[2:]
    return HubAddress(f"{owner}/{repository}", "/".join(rest), revision, kind)

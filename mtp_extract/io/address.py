"""What a user may write for a remote file, taken apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from mtp_extract.errors import SourceError, escape

BUNDLE = ".litertlm"
_MODEL_FILES = (BUNDLE, ".tflite", ".task")
_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
# refs/pr/1 is the one kind of revision whose slashes need no escape.
_REVISION = r"(?P<revision>refs/[^/]+/[^/]+|[^/]+)"
_HF = re.compile(
    rf"(?:(?P<kind>datasets|spaces|models)/(?=.*/))?(?P<repository>{_NAME}/{_NAME})(?:@{_REVISION})?(?:/(?P<path>.*))?"
)
_SITE = re.compile(
    rf"/(?:(?P<kind>datasets|spaces)/)?(?P<repository>{_NAME}/{_NAME})"
    rf"(?:/?|/(?P<page>resolve|blob|raw|blame|tree)/{_REVISION}(?:/(?P<path>.*))?)"
)
_OF_THE_SITE = ("api", "docs", "collections", "papers", "organizations", "settings")
"""What begins an address of the Hub's site and is nobody's name."""


@dataclass(frozen=True)
class HubAddress:
    """A file in a repository of the Hub.

    Attributes:
        repository: ``org/name``.
        path: of the file within the repository; of a folder it ends in "/", and of the repository itself it is empty.
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
        return escape(f"hf://{prefix}{self.repository}{at}/{self.path}".rstrip("/"))

    @property
    def is_file(self) -> bool:
        """Whether it names a file, and not the repository or a folder of it."""
        return bool(self.path) and not self.path.endswith("/")

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


def origin_of(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port of ``url``: what must be the same for a token to be sent.

    Raises:
        ValueError: it is no URL.
    """
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def parse_address(text: str, endpoint: str) -> HubAddress | WebAddress:
    """``hf://org/repo[/path][@revision]``, ``hf://org/repo@revision/path`` or an ``https://`` URL.

    The URL of a repository or of a file on the Hub's own site, as a browser shows it, is taken as the ``hf://`` address
    it stands for, so that tokens and commits are handled.

    Args:
        text: what the user wrote.
        endpoint: URL of the Hub in use.

    Raises:
        SourceError: it is none of these.
    """
    if text.startswith("hf://"):
        return _hub(text)
    try:
        origin = scheme, host, _ = origin_of(text)
    except ValueError as error:
        raise SourceError(f"Expected an https:// URL, found one that cannot be read: {error}.") from None
    if scheme not in ("https", "http") or not host:
        shown = escape(text.partition("?")[0].rpartition("@")[2])
        raise SourceError(f"Expected a path, hf://org/repo/file.litertlm[@revision] or an https:// URL, found {shown}.")
    path = urlsplit(text).path
    if origin == origin_of(endpoint):
        path = path.removeprefix(urlsplit(endpoint).path.rstrip("/"))
    elif scheme != "https" or host not in _HUB_HOSTS:
        return WebAddress(text)
    found = _SITE.fullmatch(path)
    if found is None or path.split("/")[1] in _OF_THE_SITE or found["repository"].endswith(_MODEL_FILES):
        return WebAddress(text)
    repository, file, revision = (unquote(found[part] or "") for part in ("repository", "path", "revision"))
    if found["page"] == "tree" and file:
        file = f"{file.rstrip('/')}/"
    return HubAddress(repository, file, revision or None, _kind(found))


def is_hub_id(text: str) -> bool:
    """Whether ``text`` may be ``org/name[/file][@revision]`` of the Hub, which a path looks like too.

    A path with one folder that ends as a bundle does (``models/a.litertlm``) is a path: no repository is called so.
    """
    found = _HF.fullmatch(text)
    return found is not None and (bool(found["path"]) or not found["repository"].endswith(_MODEL_FILES))


def as_address(text: str) -> str | None:
    """``text`` with its scheme, where it may be an address: an id, or a URL as some browsers show it, has none."""
    if "://" in text:
        return text
    if text.startswith(tuple(f"{host}/" for host in _HUB_HOSTS)):
        return f"https://{text}"
    return f"hf://{text}" if is_hub_id(text) else None


def _hub(text: str) -> HubAddress:
    found = _HF.fullmatch(text.removeprefix("hf://"))
    path, revision = (found["path"] or "", found["revision"]) if found else ("", None)
    if revision is None and "@" in path and not path.endswith(_MODEL_FILES):
        path, _, revision = path.rpartition("@")
    parts = path.removesuffix("/").split("/") if path else []
    if found is None or revision == "" or any(part in ("", ".", "..") for part in parts):
        raise SourceError(
            "Expected hf://org/repo, hf://org/repo/file.litertlm or hf://org/repo/file.litertlm@revision, found "
            f"{escape(text)}."
        )
    return HubAddress(found["repository"], path, revision and unquote(revision), _kind(found))


def _kind(found: re.Match[str]) -> str:
    return (found["kind"] or "models").removesuffix("s")

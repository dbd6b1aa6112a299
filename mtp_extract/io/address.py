"""What a user may write for a remote file, taken apart; and what a path in the Hub's cache is a copy of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from mtp_extract.errors import SourceError, escape

BUNDLE = ".litertlm"
COMMIT = re.compile(r"[0-9a-f]{40}")
_MODEL_FILES = (BUNDLE, ".tflite", ".task")
_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_SHA256 = re.compile(r"[0-9a-f]{64}")

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REPOSITORY = rf"(?P<repository>{_NAME}/{_NAME})"
# refs/pr/1 is the one kind of revision whose slashes need no escape.
_REVISION = r"(?P<revision>refs/[^/]+/[^/]+|[^/]+)"
_PATH = r"(?:/(?P<path>.*))?"
_ID = re.compile(rf"{_REPOSITORY}(?:@{_REVISION})?{_PATH}")
_PAGE = re.compile(rf"/{_REPOSITORY}(?:/(?P<page>resolve|blob|raw|blame|tree)/{_REVISION}{_PATH})?/*")


@dataclass(frozen=True)
class HubAddress:
    """A file in a repository of models on the Hub.

    Attributes:
        repository: ``org/name``.
        path: of the file within the repository; of a folder it ends in "/", and of the repository itself it is empty.
        revision: branch, tag or commit; None for the default branch.
    """

    repository: str
    path: str
    revision: str | None = None

    @property
    def name(self) -> str:
        """The address in the Hub's own form, which ends in the file's name."""
        at = f"@{quote(self.revision, safe='')}" if self.revision else ""
        return escape(f"hf://{self.repository}{at}/{self.path}".rstrip("/"))

    @property
    def is_file(self) -> bool:
        """Whether it names a file, and not the repository or a folder of it."""
        return bool(self.path) and not self.path.endswith("/")

    def record(self, commit: str, etag: str | None) -> dict[str, str]:
        """What identifies the file, for the record: repository, path, the revision asked for and its commit.

        The Hub's ETag is the SHA-256 of the content for a file in LFS or Xet, git's blob id for others.
        """
        record = {"repository": self.repository, "path": self.path}
        record |= {"revision": self.revision or "main", "commit": commit}
        if etag:
            record |= {"etag": etag} | ({"sha256": etag} if _SHA256.fullmatch(etag) else {})
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


def parse_address(text: str, endpoint: str) -> HubAddress | WebAddress | None:
    """What ``text`` names: ``[hf://]org/repo[@revision][/path]``, with ``@revision`` at the end, too; or a URL.

    The URL of a repository or of a file on the Hub's own site, as a browser shows it, is taken as the address that it
    stands for, so that tokens and commits are handled; browsers leave the ``https://`` of such out.

    Args:
        text: what the user wrote.
        endpoint: URL of the Hub in use.

    Returns:
        None for what can only be a path: no repository is called as a bundle is, so that ``models/a.litertlm`` is one.

    Raises:
        SourceError: it is an address that cannot be read.
    """
    if text.startswith("hf://"):
        return _hub_address(text.removeprefix("hf://"))
    if text.startswith(tuple(f"{host}/" for host in _HUB_HOSTS)):
        text = f"https://{text}"
    if "://" in text:
        return _url_address(text, endpoint)
    found = _ID.fullmatch(text)
    if found is None or (not found["path"] and found["repository"].endswith(_MODEL_FILES)):
        return None
    return _hub_address(text)


def _hub_address(text: str) -> HubAddress:
    found = _ID.fullmatch(text)
    path, revision = (found["path"] or "", found["revision"]) if found else ("", None)
    if revision is None and "@" in path and not path.endswith(_MODEL_FILES):
        path, _, revision = path.rpartition("@")
    parts = path.removesuffix("/").split("/") if path else []
    if found is None or revision == "" or any(part in ("", ".", "..") for part in parts):
        wanted = "hf://org/repo, hf://org/repo/file.litertlm or hf://org/repo/file.litertlm@revision"
        raise SourceError(f"Expected {wanted}, found {escape(f'hf://{text}')}.")
    return HubAddress(found["repository"], path, revision and unquote(revision))


def _url_address(text: str, endpoint: str) -> HubAddress | WebAddress:
    try:
        parts, hub = urlsplit(text), urlsplit(endpoint)
    except ValueError as error:
        raise SourceError(f"Expected an https:// URL, found one that cannot be read: {error}.") from None
    if parts.scheme not in ("https", "http") or not parts.hostname:
        shown = escape(text.partition("?")[0].rpartition("@")[2])
        raise SourceError(f"Expected a path, hf://org/repo/file.litertlm[@revision] or an https:// URL, found {shown}.")
    on_hub = parts[:2] == hub[:2] or (parts.scheme == "https" and parts.netloc in _HUB_HOSTS)
    found = _PAGE.fullmatch(parts.path.removeprefix(hub.path.rstrip("/"))) if on_hub else None
    if found is None or found["repository"].endswith(_MODEL_FILES):
        return WebAddress(text)
    path = unquote(found["path"] or "").rstrip("/")
    folder = "/" if path and found["page"] == "tree" else ""
    return HubAddress(found["repository"], path + folder, found["revision"] and unquote(found["revision"]))


def cached_address(path: Path) -> HubAddress | None:
    """What a file or folder in the Hub's cache is a copy of; None for any other."""
    parts = path.absolute().parts
    for at, name in enumerate(parts[:-2]):
        kind, *repository = name.split("--")
        snapshots, commit = parts[at + 1 : at + 3]
        if kind == "models" and repository and snapshots == "snapshots" and COMMIT.fullmatch(commit):
            return HubAddress("/".join(repository), "/".join(parts[at + 3 :]), commit)
    return None


def is_cached(path: Path) -> bool:
    """Whether ``path`` is a link as the Hub's cache has one for each file: to what it keeps of that repository."""
    address = cached_address(path)
    if address is None:
        return False
    repository = path.absolute().parents[2 + address.path.count("/")]
    return path.resolve().parent == repository.resolve() / "blobs"


def name_of(place: Path) -> str:
    """What a checkpoint is called: by its file or folder, in the Hub's cache by its repository."""
    address = cached_address(place)
    return place.resolve().name if address is None else (address.path or address.repository).rpartition("/")[2]


def public_name(place: str) -> str:
    """What to call ``place`` where others read it: of a directory its name alone, as its place is its owner's."""
    path = Path(place)
    return name_of(path) if path.is_dir() else place

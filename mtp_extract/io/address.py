"""What a user may write for a file of the Hub, taken apart; and what a path in the Hub's cache is a copy of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from mtp_extract.errors import SourceError, escape

BUNDLE = ".litertlm"
COMMIT = re.compile(r"[0-9a-f]{40}")
_MODEL_FILES = (BUNDLE, ".tflite", ".task")
_CACHED = re.compile(r"(?P<folder>.*/models--(?P<repository>[^/]+))/snapshots/(?P<commit>[0-9a-f]{40})(/(?P<path>.*))?")


@dataclass(frozen=True)
class HubAddress:
    """A file in a repository of models on the Hub, or a folder of one, or all of it."""

    repository: str  # org/name
    path: str  # within the repository; of a folder it ends in "/", and of the repository itself it is empty
    revision: str | None = None  # branch, tag or commit; None for the default branch

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

        The Hub's ETag is the SHA-256 of the content for a file in LFS or Xet, git's blob id for others. It is what the
        Hub says, or the name of the copy in its cache: nothing was hashed.
        """
        record = {"repository": self.repository, "path": self.path, "revision": self.revision or "main"}
        return record | {"commit": commit} | ({"etag": etag} if etag else {})


def parse_address(text: str) -> HubAddress | None:
    """What ``text`` names on the Hub: ``[hf://]org/repo[@revision][/path]``, or the URL of a page of its site.

    Returns:
        None for a URL of another site and for what can only be a path: no repository is called as a bundle is, so that
        ``models/a.litertlm`` is one.

    Raises:
        SourceError: it begins with ``hf://`` and cannot be read.
    """
    from huggingface_hub import constants

    scheme, _, rest = text.rpartition("://")
    hosts = {*constants.HF_URL_HOSTS, urlsplit(constants.ENDPOINT).netloc}
    is_page = scheme != "hf" and rest.partition("/")[0].lower() in hosts
    if not is_page and scheme != "hf" and (scheme or not rest[:1].isalnum()):
        return None
    is_folder = text.endswith("/") or (is_page and "/tree/" in text)
    address = _parse_uri(text if is_page else f"hf://{rest}", is_folder=is_folder)
    if scheme == "hf":
        if address is None:
            raise SourceError(f"Expected hf://org/repo, with @revision and /file if need be, found {escape(text)}.")
        return address
    is_here = address is not None and not address.path and address.repository.endswith(_MODEL_FILES)
    return None if is_here else address


def _parse_uri(uri: str, *, is_folder: bool) -> HubAddress | None:
    """What ``uri`` names, an ``hf://`` or a page of the Hub's site; None where that is no file or folder of models."""
    from huggingface_hub import constants, parse_hf_uri

    # An argument of a command may be bytes that are no UTF-8, and a path may be such bytes; an address is not.
    if any("\ud800" <= letter <= "\udfff" for letter in uri):
        return None
    try:
        parsed = parse_hf_uri(uri, endpoint=constants.ENDPOINT)
    except ValueError:
        return None  # of a page it is another route, and of a name a path
    path = parsed.path_in_repo
    if parsed.type != "model" or {".", ".."} & set(path.split("/")):
        return None
    return HubAddress(parsed.id, f"{path}/" if path and is_folder else path, parsed.revision)


def find_cached_address(path: Path) -> HubAddress | None:
    """What a file or folder in the Hub's cache is a copy of; None for any other."""
    match = _CACHED.fullmatch(path.absolute().as_posix())
    return match and HubAddress(match["repository"].replace("--", "/"), match["path"] or "", match["commit"])


def is_cached(path: Path) -> bool:
    """Whether ``path`` is a link as the Hub's cache has one for each file: to what it keeps of that repository."""
    match = _CACHED.fullmatch(path.absolute().as_posix())
    return match is not None and path.resolve().parent == Path(match["folder"]).resolve() / "blobs"


def name_of(place: Path) -> str:
    """What a checkpoint is called: by its file or folder, in the Hub's cache by its repository."""
    address = find_cached_address(place)
    return place.resolve().name if address is None else (address.path or address.repository).rpartition("/")[2]


def public_name(place: str) -> str:
    """What to call ``place`` where others read it: of a directory its name alone, as its place is its owner's."""
    return name_of(Path(place)) if Path(place).is_dir() else place

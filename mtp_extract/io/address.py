"""Addresses of files on the Hugging Face Hub: as users write them, and of the copies in the Hub's cache."""

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
    path: str  # within the repository; ends in "/" for a folder, and is empty for the repository itself
    revision: str | None = None  # branch, tag or commit; None for the default branch

    @property
    def name(self) -> str:
        """The address in the Hub's form, ``hf://org/repo@revision/path``; safe to print."""
        at = f"@{quote(self.revision, safe='')}" if self.revision else ""
        return escape(f"hf://{self.repository}{at}/{self.path}".rstrip("/"))

    @property
    def is_file(self) -> bool:
        return bool(self.path) and not self.path.endswith("/")

    def record(self, commit: str, etag: str | None) -> dict[str, str]:
        """Return what identifies the file, for the record: repository, path, the revision asked for and its commit.

        The Hub's ETag is the SHA-256 of a file in LFS or Xet, and the id of git's blob of any other. It is the Hub's
        word, or the name of the copy in its cache; nothing was hashed.
        """
        record = {"repository": self.repository, "path": self.path, "revision": self.revision or "main"}
        return record | {"commit": commit} | ({"etag": etag} if etag else {})


def parse_address(text: str) -> HubAddress | None:
    """Parse ``[hf://]org/repo[@revision][/path]``, or the URL of a page of the Hub's site.

    Returns:
        None for a URL of another site, and for what can only be a path, such as ``models/a.litertlm``: the name of a
        repository does not end like that of a bundle.

    Raises:
        SourceError: it begins with ``hf://`` but is no address.
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
            raise SourceError(f"Expected hf://org/repo[@revision][/file], found {escape(text)}.")
        return address
    is_local = address is not None and not address.path and address.repository.endswith(_MODEL_FILES)
    return None if is_local else address


def _parse_uri(uri: str, *, is_folder: bool) -> HubAddress | None:
    """Parse ``hf://…`` or the URL of a page of the Hub; None if that is no file or folder of a model repository."""
    from huggingface_hub import constants, parse_hf_uri

    # Bytes of an argument that are not UTF-8 arrive as surrogates: a path may have them, an address may not.
    if any("\ud800" <= letter <= "\udfff" for letter in uri):
        return None
    try:
        parsed = parse_hf_uri(uri, endpoint=constants.ENDPOINT)
    except ValueError:
        return None  # another route of the site, or a path
    path = parsed.path_in_repo
    if parsed.type != "model" or {".", ".."} & set(path.split("/")):
        return None
    return HubAddress(parsed.id, f"{path}/" if path and is_folder else path, parsed.revision)


def find_cached_address(path: Path) -> HubAddress | None:
    """Return the address whose copy ``path`` is in the Hub's cache; None if it lies elsewhere."""
    match = _CACHED.fullmatch(path.absolute().as_posix())
    return match and HubAddress(match["repository"].replace("--", "/"), match["path"] or "", match["commit"])


def is_cached(path: Path) -> bool:
    """Return whether ``path`` is one of the links of the Hub's cache, to a blob of the same repository."""
    match = _CACHED.fullmatch(path.absolute().as_posix())
    return match is not None and path.resolve().parent == Path(match["folder"]).resolve() / "blobs"


def name_checkpoint(place: Path) -> str:
    """Return the name of a checkpoint: that of its file or folder, or of its repository in the Hub's cache."""
    address = find_cached_address(place)
    return place.resolve().name if address is None else (address.path or address.repository).rpartition("/")[2]


def choose_public_name(place: str) -> str:
    """Return ``place`` as published files may state it: only the name of a directory, whose path is private."""
    return name_checkpoint(Path(place)) if Path(place).is_dir() else place

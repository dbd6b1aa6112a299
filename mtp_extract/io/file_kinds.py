"""What files that are no LiteRT file are called, told by their first bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

HEAD = 512
"""Bytes from the beginning of a file that :func:`kind_of` wants to see."""


@dataclass(frozen=True)
class FileKind:
    """What a file is, ``a zip archive``, and what to do who meant a LiteRT file."""

    name: str
    advice: str


_OTHER_MODEL = "The drafter comes out of a LiteRT file: give that, such as gemma-4-E4B-it.litertlm."
_UNPACK = "Unpack it, and give the .litertlm or .tflite in it."
_WRONG_FILE = "Check that it is the right file."
_AGAIN = "The download is probably incomplete: fetch it again."

# The first that matches decides; all match at the first byte.
_KINDS: tuple[tuple[bytes, str, str], ...] = (
    (
        rb"version https://git-lfs\.github\.com/spec/",
        "a Git LFS pointer, which stands for a file",
        "Fetch the file itself: git lfs pull, or give hf://org/repo/file.",
    ),
    (
        rb"(?i)\s*(<!doctype html|<html|<head)",
        "an HTML page",
        "Fetch the file itself: on the Hub its address has /resolve/ in it, and a gated model wants a login.",
    ),
    (rb"\s*<(\?xml|\w)", "an XML text", "A server may have sent its refusal in place of the file: look into it."),
    (rb"PK\x03\x04.{26}[^/\0]{1,200}/data\.pkl", "a PyTorch checkpoint", _OTHER_MODEL),
    (rb"PK(\x03\x04|\x05\x06|\x07\x08)", "a zip archive", _UNPACK),
    (rb"\x80[\x02-\x05]", "a Python pickle, as of a PyTorch checkpoint", _OTHER_MODEL),
    (rb"GGUF", "a GGUF file", _OTHER_MODEL),
    (rb".{5}\0{3}\{", "a safetensors file", _OTHER_MODEL),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file", _OTHER_MODEL),
    (rb"\x1f\x8b", "a gzip file", _UNPACK),
    (rb"\x28\xb5\x2f\xfd", "a Zstandard file", _UNPACK),
    (rb"\xfd7zXZ\0", "an xz file", _UNPACK),
    (rb"BZh[1-9]", "a bzip2 file", _UNPACK),
    (rb"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _UNPACK),
    (rb".{257}ustar", "a tar archive", _UNPACK),
    (rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF.{4}WEBP", "an image", _WRONG_FILE),
    (rb"%PDF-", "a PDF document", _WRONG_FILE),
    (rb"\x7fELF|MZ.{58}", "a program or library", _WRONG_FILE),
    (rb"\0{16}", "zeros at its beginning", _AGAIN),
    (rb"\s*[{\[]\s*[\"{\[\]}]", "a JSON text", _WRONG_FILE),
)


def kind_of(head: bytes) -> FileKind:
    """What the file is that begins with ``head``, its first :data:`HEAD` bytes or all it has."""
    for pattern, name, advice in _KINDS:
        if re.match(pattern, head, re.DOTALL):
            return FileKind(name, advice)
    if not head:
        return FileKind("an empty file", _AGAIN)
    # A character of UTF-8 may be cut in two at the end.
    text = head.decode("utf-8", "replace").rstrip("\ufffd" if len(head) == HEAD else "")
    if all(c.isprintable() or c.isspace() for c in text) and "\ufffd" not in text:
        return FileKind("a text", _WRONG_FILE)
    return FileKind(f"another kind of file (first bytes {head[:8].hex(' ')})", _WRONG_FILE)

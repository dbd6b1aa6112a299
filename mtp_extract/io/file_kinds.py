"""What files that are no LiteRT file are called, told by their first bytes."""

from __future__ import annotations

import re

HEAD = 512
"""Bytes from the beginning of a file that :func:`kind_of` wants to see."""

_OTHER_MODEL = "Give a LiteRT file, such as gemma-4-E4B-it.litertlm; or for a checkpoint its directory."
_UNPACK = "Unpack it, and give the .litertlm or .tflite in it."
_WRONG_FILE = "Check that it is the right file."
_AGAIN = "The download is probably incomplete: fetch it again."
_POINTER = "Fetch the file itself: git lfs pull, or give hf://org/repo/file."
_PAGE = "Fetch the file itself: on the Hub its address has /resolve/ in it, and a gated model wants a login."
_ARCHIVE = rb"PK(\x03\x04|\x05\x06|\x07\x08)|7z\xbc\xaf|.{257}ustar|\x1f\x8b|\x28\xb5\x2f\xfd|\xfd7zXZ\0|BZh[1-9]"

# The first that matches decides; all match at the first byte.
_KINDS: tuple[tuple[bytes, str, str], ...] = (
    (rb"version https://git-lfs\.github\.com/spec/", "a Git LFS pointer, which stands for a file", _POINTER),
    (rb"(?i)\s*(<!doctype html|<html|<head)", "an HTML page", _PAGE),
    (rb"GGUF", "a GGUF file", _OTHER_MODEL),
    (rb".{5}\0{3}\{", "a safetensors file", _OTHER_MODEL),
    (_ARCHIVE, "an archive", _UNPACK),
    (rb"\0{16}", "zeros at its beginning", _AGAIN),
)


def kind_of(head: bytes) -> str:
    """What the file is that begins with ``head``, its first :data:`HEAD` bytes or all it has; and what to do.

    Such as "an archive. Unpack it, …", for who meant a LiteRT file.
    """
    for pattern, name, advice in _KINDS:
        if re.match(pattern, head, re.DOTALL):
            return f"{name}. {advice}"
    # A character of UTF-8 may be cut in two at the end.
    text = head.decode("utf-8", "replace").rstrip("\ufffd" if len(head) == HEAD else "")
    if "\ufffd" not in text and all(c.isprintable() or c.isspace() for c in text):
        return f"a text. {_WRONG_FILE}"
    return f"another kind of file (first bytes {head[:8].hex(' ')}). {_WRONG_FILE}"

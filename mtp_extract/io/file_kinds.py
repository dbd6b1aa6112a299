"""Recognize files that are no LiteRT files by their first bytes."""

from __future__ import annotations

import re

FIRST_BYTES_READ = 512
"""How many first bytes of a file :func:`describe_file_kind` looks at."""

_OTHER_MODEL = "Give a LiteRT file, such as gemma-4-E4B-it.litertlm; `mtp-inspect` and `mtp-convert` take a drafter's"
_PAGE = "Fetch the file itself: on the Hub its address has /resolve/ in it, and a gated model wants a login."
_ARCHIVE = rb"PK(\x03\x04|\x05\x06|\x07\x08)|7z\xbc\xaf|.{257}ustar|\x1f\x8b|\x28\xb5\x2f\xfd|\xfd7zXZ\0|BZh[1-9]"

# The first that matches decides; all match at the first byte.
_KINDS = (
    (rb"version https://git-lfs", "a Git LFS pointer. Fetch the file itself: git lfs pull, or hf://org/repo/file."),
    (rb"(?i)\s*(<!doctype html|<html|<head)", f"an HTML page. {_PAGE}"),
    (rb"GGUF", f"a GGUF file. {_OTHER_MODEL} .gguf."),
    (rb".{5}\0{3}\{", f"a safetensors file. {_OTHER_MODEL} directory."),
    (_ARCHIVE, "an archive. Unpack it, and give the .litertlm or .tflite in it."),
    (rb"\0{16}", "zeros at its beginning. The download is probably incomplete: fetch it again."),
)


def describe_file_kind(head: bytes) -> str:
    """Describe the file whose first :data:`FIRST_BYTES_READ` bytes are ``head``, and say what to do.

    Example: "an archive. Unpack it, and give the .litertlm or .tflite in it."
    """
    unknown = f"another kind of file (first bytes {head[:8].hex(' ')}). Check that it is the right file."
    return next((words for pattern, words in _KINDS if re.match(pattern, head, re.DOTALL)), unknown)

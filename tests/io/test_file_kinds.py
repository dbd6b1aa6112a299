"""Files that were taken for a LiteRT file are called what they are, from files as their own tools write them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from mtp_extract.bundle import open_bundle
from mtp_extract.errors import NoDrafterError, SourceError

_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 3655827456\n" % (b"0" * 64)


def _zip(name: str, method: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        archive.writestr(name, b"x" * 4096)
    return made.getvalue()


def _tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        entry = tarfile.TarInfo("model.litertlm")
        entry.size = 99
        archive.addfile(entry, io.BytesIO(bytes(99)))
    return made.getvalue()


FILES = {
    "Git LFS pointer": (_POINTER, "a Git LFS pointer, which stands for a file. Fetch the file itself: git lfs pull"),
    "page": (b"\n<!DOCTYPE html>\n<html class=''>\n<head>", "an HTML page. Fetch the file itself"),
    "page without a declaration": (b"<HTML><body>404</body></HTML>", "an HTML page"),
    "refusal of a storage": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "an XML text"),
    "zip": (_zip("config.json", zipfile.ZIP_DEFLATED), "an archive. Unpack it"),
    "empty zip": (b"PK\x05\x06" + bytes(18), "an archive"),
    "torch.save": (_zip("archive/data.pkl"), "a PyTorch checkpoint. The drafter comes out of a LiteRT file"),
    "old torch.save": (pickle.dumps({"w": 1}, 2), "a PyTorch checkpoint"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(99), "a GGUF file. The drafter comes out"),
    "safetensors": (safetensors.numpy.save({"w": np.zeros(9, np.float32)}), "a safetensors file. The drafter"),
    "gzip": (gzip.compress(b"x"), "a compressed file. Unpack it"),
    "xz": (lzma.compress(b"x"), "a compressed file"),
    "bzip2": (bz2.compress(b"x"), "a compressed file"),
    "Zstandard": (b"\x28\xb5\x2f\xfd\x24\x01", "a compressed file"),
    "7-Zip": (b"7z\xbc\xaf\x27\x1c\0\4", "an archive"),
    "tar": (_tar(), "an archive. Unpack it"),
    "PNG": (b"\x89PNG\r\n\x1a\n" + bytes(99), "another kind of file"),
    "a download that was begun": (bytes(1 << 12), "zeros at its beginning. The download is probably incomplete"),
    "config.json": (json.dumps({"model_type": "gemma4"}, indent=2).encode(), "a text. Check"),
    "text": ("Grüße\n".encode() * 200, "a text. Check"),
    "a text that is cut in a letter": (b"x" + "ü".encode() * 400, "a text"),
    "noise": (bytes(range(240, 256)) * 9, "another kind of file (first bytes f0 f1 f2 f3 f4 f5 f6 f7). Check"),
    "one byte": (b"\xff", "another kind of file (first bytes ff)"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_is_called_what_it_is(tmp_path: Path, case: str) -> None:
    data, expected = FILES[case]
    path = tmp_path / "gemma-4-E4B-it.litertlm"
    path.write_bytes(data)
    with open_bundle(path) as opened, pytest.raises(NoDrafterError) as caught:
        opened.drafter()
    message = str(caught.value)
    assert message.startswith(f"{path}: expected a .litertlm bundle or a drafter's .tflite, found {expected}")
    assert message.endswith(".")
    assert message.isprintable()
    assert "b'" not in message
    assert "\\x" not in message


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "a.litertlm"
    path.touch()
    with pytest.raises(SourceError, match=r"found an empty file\. Fetch it again"):
        open_bundle(path)

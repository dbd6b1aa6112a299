from __future__ import annotations

import pytest

from mtp_extract.errors import SourceError
from mtp_extract.io.address import HubAddress, parse_address
from mtp_extract.io.opening import open_source, strip_url_secrets

HUB = "https://huggingface.co"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://org/repo/a.litertlm", HubAddress("org/repo", "a.litertlm")),
        ("hf://org/repo@v1.5/a.litertlm", HubAddress("org/repo", "a.litertlm", "v1.5")),
        ("hf://org/repo@refs%2Fpr%2F3/a.tflite", HubAddress("org/repo", "a.tflite", "refs/pr/3")),
        ("hf://org/repo/a@2.litertlm", HubAddress("org/repo", "a@2.litertlm")),
        (f"{HUB}/org/repo/resolve/main/a.litertlm?download=true", HubAddress("org/repo", "a.litertlm", "main")),
        (f"{HUB}/org/repo/blob/refs%2Fpr%2F3/s/a.litertlm", HubAddress("org/repo", "s/a.litertlm", "refs/pr/3")),
        ("hf://org/repo@v1", HubAddress("org/repo", "", "v1")),
        ("org/repo@main", HubAddress("org/repo", "", "main")),
        (f"{HUB}/org/repo/?library=litert#x", HubAddress("org/repo", "")),
        (f"{HUB}/org/repo/tree/v1/sub", HubAddress("org/repo", "sub/", "v1")),
        ("huggingface.co/org/repo", HubAddress("org/repo", "")),
        ("org/repo@v1.5/a.litertlm", HubAddress("org/repo", "a.litertlm", "v1.5")),
        (f"{HUB}/org/repo/discussions/1", None),
        ("https://example.org/x/a.litertlm?k=1", None),
        # These can only be paths.
        ("models/a.litertlm", None),
        ("datasets/org/repo/a.litertlm", None),
        ("a.litertlm", None),
        ("./org/repo", None),
        ("~/org/repo", None),
        ("/org/repo", None),
        ("", None),
    ],
)
def test_addresses(text: str, expected: object) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "path", ["", "org", "org/repo//a", "org/repo/../a", "org/re po/a", "../repo/a", "datasets/org/repo/a"]
)
def test_what_is_no_address(path: str) -> None:
    with pytest.raises(SourceError, match="Expected hf://org/repo"):
        parse_address(f"hf://{path}")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        *((url, "the address is damaged.* check the address") for url in ("https://", "https://[::1/a")),
        ("ftp://me:secret@example.org/a", r"^ftp://example\.org/a: .* found .* ftp://\. Check it"),
        ("FILE:///etc/passwd", r"^FILE:///etc/passwd: expected a path.* FILE://\. Give the path alone"),
    ],
)
def test_what_cannot_be_requested(url: str, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        open_source(url)


@pytest.mark.parametrize("url", ["https://user:password@example.org:8443/a.litertlm?sig=s#t", "x://u:p@[::1/a?sig=s"])
def test_a_name_shows_no_secret(url: str) -> None:
    assert strip_url_secrets(url) in ("https://example.org:8443/a.litertlm", "x://[::1/a")


def test_another_host_is_not_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_address("https://huggingface.co.example.org/org/repo/resolve/main/a.litertlm") is None
    url = "http://127.0.0.1:1/org/repo/resolve/main/a.litertlm"
    for endpoint, expected in ((":1", HubAddress("org/repo", "a.litertlm", "main")), (":2", None)):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1{endpoint}")
        assert parse_address(url) == expected

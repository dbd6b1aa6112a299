"""Publishing on a loopback Hub: what arrives, what is refused before anything is sent, and how uploads resume."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from helpers.commands import run
from helpers.first_pair import first_bundle
from helpers.hub_fixtures import text_of
from helpers.hub_server import SIGNATURE, TOKEN, Content, HubServer, Repo
from helpers.record_document import REPORT, read_files
from seam import verify

import mtp_extract
from mtp_extract import upload
from mtp_extract.errors import CheckpointError, HubError, MtpExtractError, PlanError
from mtp_extract.report.card import CardWords

# huggingface_hub hands its HTTP library a file in a way that the library is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

NAME = "org/drafter"


@pytest.fixture
def directory(extracted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(extracted, tmp_path / "drafter"))


def read_stored(hub: HubServer, name: str = NAME) -> dict[str, object]:
    return {path: content.data for path, (content, _) in hub.repos[name].files.items() if path != ".gitattributes"}


def list_writes(hub: HubServer) -> list[str]:
    """List the requests that changed, or were meant to change, something on the Hub."""
    paths = ("/commit/", "/preupload/", "/repos/create", "/lfs/objects/batch")
    return [r.path for r in hub.requests if r.method == "PUT" or any(path in r.path for path in paths)]


def expect_refusal(directory: Path, name: str = NAME, kind: type[MtpExtractError] = HubError, **options: bool) -> str:
    with pytest.raises(kind) as caught:
        upload(directory, name, **options)
    for secret in (TOKEN, SIGNATURE):
        assert secret not in text_of(caught.value)
    return str(caught.value)


# --- what arrives


def test_what_arrives_is_the_directory(hub: HubServer, directory: Path) -> None:
    result = upload(directory, NAME)
    assert read_stored(hub) == read_files(directory)
    assert hub.repos[NAME].private
    assert result.created
    assert (result.commit, result.url) == (hub.repos[NAME].commit, f"{hub.url()}/{NAME}")
    assert set(result.sent) == {file.path for file in result.files} == set(read_files(directory))
    assert {request.authorization for request in hub.requests if request.server == "storage"} == {None}
    upload(directory, "org/public", private=False)
    assert not hub.repos["org/public"].private
    # Nothing is sent twice.
    hub.requests.clear()
    second = upload(directory, NAME)
    assert (second.sent, second.created, second.commit) == ((), False, result.commit)
    assert not [request for request in hub.requests if request.method == "PUT" or "/commit/" in request.path]


def test_a_dry_run_asks_nobody(hub: HubServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    before = read_files(directory)
    result = upload(directory, NAME, dry_run=True)
    assert hub.requests == []
    assert result.commit is None
    assert read_files(directory) == before
    files = {file.path: (file.size, file.sha256) for file in result.files}
    assert files == {path: (len(data), Content.of(data).sha256) for path, data in before.items()}


def test_the_figures_of_a_report_go_into_the_card(hub: HubServer, directory: Path, tmp_path: Path) -> None:
    (directory / "report.json").write_text(json.dumps(REPORT))
    before = read_files(directory)
    planned = {file.path: file.sha256 for file in upload(directory, NAME, dry_run=True).files}
    result = upload(directory, NAME)
    assert {file.path: file.sha256 for file in result.files} == planned
    # The local directory is unchanged, and the published one is complete.
    assert read_files(directory) == before
    published = {path: data for path, data in read_stored(hub).items() if isinstance(data, bytes)}
    card = published["README.md"].decode()
    assert REPORT["verdict"] in card
    assert "All figures are in `report.json`." in card
    assert {path for path in published if published[path] != before[path]} == {"README.md"}
    for path, data in published.items():
        (tmp_path / "copy" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / path).write_bytes(data)
    verify(tmp_path / "copy")
    assert upload(directory, NAME).sent == ()


# --- interrupted


def test_an_interrupted_upload_is_resumed(hub: HubServer, directory: Path) -> None:
    hub.fault("commit", status=500, times=99)
    assert "Run it again" in expect_refusal(directory)
    assert set(hub.repos[NAME].files) == {".gitattributes"}
    hub.faults.clear()
    hub.requests.clear()
    upload(directory, NAME)
    assert read_stored(hub) == read_files(directory)
    assert [request for request in hub.requests if request.method == "PUT"] == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [({"status": 403}, "the Hub's storage refuses what is sent (403)"), ({"drop": True}, "or the connection was lost")],
)
def test_storage_that_fails(hub: HubServer, directory: Path, fault: dict[str, int], message: str) -> None:
    """It fails for good, then for a while; the error does not mention rights."""
    hub.fault("put", times=99, **fault)
    assert f"{message}. Run it again: it resumes." in expect_refusal(directory)
    assert set(hub.repos[NAME].files) == {".gitattributes"}
    hub.faults.clear()
    hub.fault("put", status=503, times=2)
    upload(directory, NAME)
    assert read_stored(hub) == read_files(directory)


LIMIT = "Private repository storage limit reached, please upgrade your plan to increase it"
TRIPPED = "Your storage patterns tripped our internal systems! Please contact us at website@huggingface.co."


@pytest.mark.parametrize(("where", "status"), [("preupload", 403), ("batch", 403), ("commit", 403), ("commit", 422)])
@pytest.mark.parametrize("words", [LIMIT, TRIPPED])
def test_what_the_hub_says_of_a_refusal_is_shown(
    hub: HubServer, directory: Path, where: str, status: int, words: str
) -> None:
    """The token is hidden; the error says that the repository was created, but only if it was."""
    headers = {"X-Error-Message": f"{words} ({TOKEN})"}
    hub.fault(where, status=status, headers=headers, times=99)
    first, second = expect_refusal(directory), expect_refusal(directory)
    assert f"{words.rstrip('.')}" in first
    assert ("may not write" in first) is False
    assert first == f"{second} The repository was created on the way (private)."
    assert set(hub.repos[NAME].files) == {".gitattributes"}


def test_a_refusal_without_words_is_about_rights(hub: HubServer, directory: Path) -> None:
    hub.fault("create", status=403)
    assert expect_refusal(directory) == (
        "org/drafter: the token may not write there: choose a name of yours, or a token with write permission for it."
    )


def test_what_arrived_wrong_is_noticed(hub: HubServer, directory: Path) -> None:
    hub.keep = False
    assert "is not what was sent" in expect_refusal(directory)


# --- refused before anything is sent


@pytest.mark.parametrize("name", ["drafter", "org/a/b", "org/a b", "org/--x", "/x", "org/", "", "org/x.git", "../x"])
def test_a_bad_name(hub: HubServer, directory: Path, name: str) -> None:
    expect_refusal(directory, name, PlanError)
    assert hub.requests == []


def test_a_name_that_is_not_ours(hub: HubServer, directory: Path) -> None:
    rights = "If that is about rights, choose a name of yours, or a token with write permission for it."
    assert expect_refusal(directory, "someone/drafter") == (
        "someone/drafter: the Hub refuses it (403): You don't have the rights to create a model under this namespace. "
        + rights
    )
    assert list_writes(hub) == ["/api/repos/create"]
    hub.repos["someone/drafter"] = Repo()
    hub.requests.clear()
    assert rights in expect_refusal(directory, "someone/drafter")
    assert not [request for request in hub.requests if request.method == "PUT" or "/commit/" in request.path]
    hub.fault("create", status=409)  # a private one of somebody else
    assert "does not see it" in expect_refusal(directory)


@pytest.mark.parametrize("path", ["README.md", "notes.txt"])
def test_a_repository_with_other_content(hub: HubServer, directory: Path, path: str) -> None:
    hub.add(NAME, path, b"something else", lfs=False)
    assert path in expect_refusal(directory)
    assert list_writes(hub) == []
    result = upload(directory, NAME, force=True)
    assert {**read_stored(hub), "notes.txt": b""} == {**read_files(directory), "notes.txt": b""}
    assert not result.created


CONSTANTS = "huggingface_hub.constants"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("HF_TOKEN", TOKEN + "x"), "does not accept the token"),
        ((f"{CONSTANTS}.ENDPOINT", "http://127.0.0.1:1"), "cannot be reached"),
        ((f"{CONSTANTS}.HF_HUB_OFFLINE", True), "HF_HUB_OFFLINE"),
        (("HF_TOKEN", ""), "hf auth login"),
    ],
)
def test_who_may_not_send(
    hub: HubServer, directory: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, Any], message: str
) -> None:
    (monkeypatch.setattr if CONSTANTS in change[0] else monkeypatch.setenv)(*change)
    assert message in expect_refusal(directory)
    assert list_writes(hub) == []


def test_a_server_that_quotes_the_token(hub: HubServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = RuntimeError(f"bad header Bearer {TOKEN} for https://x.test/y?sig={SIGNATURE} (1)")
    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", Mock(side_effect=failure))
    assert expect_refusal(directory) == (
        "org/drafter: the upload failed: bad header … for https://x.test/y (1). Run it again: it resumes. "
        "The repository was created on the way (private)."
    )


def _claim(directory: Path, name: str) -> None:
    record = json.loads((directory / "extraction.json").read_text())
    record["files"][name] = {"size": 1, "sha256": "0" * 64}
    (directory / "extraction.json").write_text(json.dumps(record))


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "the weights": (
        lambda d: (w := d / "model.safetensors").write_bytes(w.read_bytes()[:-1] + b"?"),
        "model.safetensors",
    ),
    "a file gone": (lambda d: (d / "generation_config.json").unlink(), "generation_config.json"),
    "a file added": (lambda d: (d / "token.txt").write_text("x"), "token.txt"),
    "no record": (lambda d: (d / "extraction.json").unlink(), "extraction.json"),
    "a file elsewhere": (lambda d: _claim(d, "../drafter/config.json"), "../drafter/config.json"),
    "a report that is not JSON": (lambda d: (d / "report.json").write_text("{"), "report.json"),
    "a report without figures": (lambda d: (d / "report.json").write_text("{}"), "report.json: lacks what the card"),
    "a link to a private file": (lambda d: (d / "report.md").symlink_to("/etc/passwd"), "found that report.md is a "),
    "a link to a folder": (lambda d: (d / "figures").symlink_to("/etc"), "found that figures is a "),
    "a link for weights": (lambda d: (w := d / "model.safetensors").symlink_to(w.rename(d.parent / "w")), "or a link"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED)
def test_a_directory_that_is_not_what_its_record_says(
    hub: HubServer, directory: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(directory)
    for dry_run in (False, True):
        assert message in expect_refusal(directory, kind=CheckpointError, dry_run=dry_run)
    assert hub.requests == []


def test_hidden_files_stay_here(hub: HubServer, directory: Path) -> None:
    """A link to the directory is the directory."""
    (directory / ".env").write_text("HF_TOKEN=…")
    (directory.parent / "latest").symlink_to(directory)
    upload(directory.parent / "latest", NAME)
    assert {**read_stored(hub), ".env": b""} == {**read_files(directory), ".env": b""}
    assert ".env" not in read_stored(hub)
    # A file in it stands for the directory, too.
    assert upload(directory / "model.safetensors", NAME).sent == ()


# --- one file, into a repository of other things

BASE = "org/sample-GGUF"
GGUF = "mtp-sample-Q4_0.gguf"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("extracted") / "gguf"
    mtp_extract.extract(first_bundle(), directory, format="gguf")
    return directory


@pytest.fixture
def base(hub: HubServer) -> HubServer:
    hub.add(BASE, "README.md", b"its card", lfs=False)
    return hub


def test_one_file_goes_there_and_the_rest_stays(base: HubServer, gguf: Path) -> None:
    assert upload(gguf, BASE, beside=True, dry_run=True).sent == (GGUF,)
    assert base.requests == []
    done = upload(gguf, BASE, beside=True)
    assert done.sent == (GGUF,)
    assert read_stored(base, BASE) == {"README.md": b"its card", GGUF: (gguf / GGUF).read_bytes()}
    again = upload(gguf, BASE, beside=True)
    assert (again.sent, again.commit) == ((), done.commit)


def test_another_of_that_name_stays_unless_it_is_said(base: HubServer, gguf: Path) -> None:
    base.add(BASE, GGUF, b"somebody's")
    assert f"holds other files, {GGUF}." in expect_refusal(gguf, BASE, beside=True)
    assert list_writes(base) == []
    upload(gguf, BASE, beside=True, force=True)
    assert read_stored(base, BASE) == {"README.md": b"its card", GGUF: (gguf / GGUF).read_bytes()}


def test_nothing_is_new_of_what_is_sent_beside(gguf: Path) -> None:
    planned = run("upload", gguf, BASE, "--beside", "--dry-run")
    assert planned.stdout.startswith(f"Would be sent to {BASE}: 1 file, ")


def test_what_does_not_go_there(base: HubServer, gguf: Path, directory: Path, tmp_path: Path) -> None:
    assert "expected a repository that exists" in expect_refusal(gguf, "org/new", beside=True)
    assert [*base.repos] == [BASE]
    base.requests.clear()
    assert "expected a GGUF" in expect_refusal(directory, BASE, beside=True)
    with pytest.raises(HubError, match="without words on a card"):
        upload(gguf, BASE, beside=True, card=CardWords(base_model="me/base"))
    spoiled = Path(shutil.copytree(gguf, tmp_path / "spoiled"))
    (spoiled / GGUF).write_bytes(b"GGUF")
    assert GGUF in expect_refusal(spoiled, BASE, MtpExtractError, beside=True)
    assert base.requests == []


# --- as a user runs it


def test_a_dry_run_then_the_upload(
    hub: HubServer, extracted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ENDPOINT": hub.url(), "HOME": str(tmp_path / "home"), "HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(f"HF_{name}", value)

    def run_upload(*options: str) -> str:
        done = run("upload", extracted, NAME, *options)
        assert done.returncode == 0, done.stderr
        assert TOKEN not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert "%|" not in done.stderr  # a progress bar, where stderr is no terminal
        return done.stdout

    planned = run_upload("--dry-run")
    assert NAME not in hub.repos
    done = run_upload()
    before, after = (re.findall(r"^  (\S+) +.*…$", output, re.MULTILINE) for output in (planned, done))
    assert before == after
    assert {"README.md", "codes/codes.safetensors", "extraction.json", "model.safetensors"} < set(before)
    assert f"matches by hash (commit {hub.repos[NAME].commit})" in done
    again = run_upload()
    assert "nothing was sent" in again
    assert again.splitlines()[-1] == f"{hub.url()}/{NAME}"

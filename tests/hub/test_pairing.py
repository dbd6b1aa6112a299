"""A drafter beside its base: what llama.cpp takes by the names of a repository's files, and what is sent there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.first_pair import first_bundle
from helpers.hub_server import HubServer

import mtp_extract
from mtp_extract.errors import HubError
from mtp_extract.hub.pairing import drafter_of, model_of, paired
from mtp_extract.hub.upload import upload
from mtp_extract.report.card import CardWords

# huggingface_hub hands its HTTP library a file in a way that the library is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

# --- the rule: listings and what llama.cpp resolves them to, as its own tests/test-model-resolution.cpp has them

FLAT = [
    *("README.md", "model-BF16.gguf", "model-Q4_K_M.gguf", "model-Q8_0.gguf"),
    *("mmproj-model-BF16.gguf", "mmproj-model-Q8_0.gguf", "dflash-model-BF16.gguf", "dflash-model-Q8_0.gguf"),
    *("mtp-model-BF16.gguf", "mtp-model-Q4_0.gguf", "mtp-model-Q8_0.gguf"),
]
SHARDS = [
    *("mmproj-model-f16.gguf", "model-mtp-BF16.gguf", "model-mtp-Q8_0.gguf"),
    *(f"Q3_K_M/model-Q3_K_M-0000{part}-of-00003.gguf" for part in (1, 2, 3)),
    *(f"Q8_0/model-Q8_0-0000{part}-of-00002.gguf" for part in (1, 2)),
]
UNSLOTH = ["model-UD-Q8_K_XL.gguf", "mmproj-BF16.gguf", "model-MTP-BF16.gguf"]
RESOLVED = [
    (FLAT, "Q8_0", "model-Q8_0.gguf", "mtp-model-Q8_0.gguf"),
    (FLAT, "", "model-Q4_K_M.gguf", "mtp-model-Q4_0.gguf"),
    (FLAT, "bf16", "model-BF16.gguf", "mtp-model-BF16.gguf"),
    (SHARDS, "Q3_K_M", "Q3_K_M/model-Q3_K_M-00001-of-00003.gguf", "model-mtp-Q8_0.gguf"),
    (UNSLOTH, "Q8_K_XL", "model-UD-Q8_K_XL.gguf", None),
    (["BlackSheep-24B.Q8_0.gguf"], "Q8_0", "BlackSheep-24B.Q8_0.gguf", None),
    (FLAT, "Q4_0", None, None),
    # Read from the code, as those tests have none of it: what lies nearest goes before what is of the type.
    (["q/a-Q8_0.gguf", "q/mtp-a-Q4_0.gguf", "mtp-a-Q8_0.gguf"], "Q8_0", "q/a-Q8_0.gguf", "q/mtp-a-Q4_0.gguf"),
    (["a-Q8_0.gguf", "q/mtp-a-Q8_0.gguf"], "", "a-Q8_0.gguf", None),
]


@pytest.mark.parametrize("listed", [list, lambda files: files[::-1], lambda files: [*files[3:], *files[:3]]])
@pytest.mark.parametrize(("files", "tag", "base", "drafter"), RESOLVED)
def test_what_llama_cpp_takes(
    listed: Callable[[list[str]], list[str]], files: list[str], tag: str, base: str | None, drafter: str | None
) -> None:
    files = listed(files)
    assert model_of(files, tag) == base
    if base is not None:
        assert drafter_of(files, base, tag) == drafter


def test_of_types_that_nobody_asks_for_the_first_is_taken() -> None:
    assert model_of(UNSLOTH) == UNSLOTH[0]
    assert model_of(UNSLOTH[::-1]) == UNSLOTH[2]


def test_each_type_of_base_is_told() -> None:
    pairs, notes = paired("me/x", ["a-Q4_K_M.gguf", "a-Q8_0.gguf", "mtp-a-Q8_0.gguf"], "mtp-a-Q4_0.gguf")
    assert [(pair.asked, pair.base, pair.drafter) for pair in pairs] == [
        ("me/x", "a-Q4_K_M.gguf", "mtp-a-Q4_0.gguf"),
        ("me/x:Q4_K_M", "a-Q4_K_M.gguf", "mtp-a-Q4_0.gguf"),
        ("me/x:Q8_0", "a-Q8_0.gguf", "mtp-a-Q8_0.gguf"),
    ]
    assert notes == ()


def test_a_base_of_another_name_is_asked_about() -> None:
    _, notes = paired("me/x", ["Gemma_4_E4B-it-Q8_0.gguf"], "mtp-gemma-4-E4B-it-Q4_0.gguf")
    assert notes == ()
    _, notes = paired("me/x", ["gemma-3-1b-it-Q8_0.gguf"], "mtp-gemma-4-E4B-it-Q4_0.gguf")
    assert notes == ("Is gemma-3-1b-it-Q8_0.gguf the base of mtp-gemma-4-E4B-it-Q4_0.gguf? llama.cpp does not look.",)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (
            [],
            "expected the GGUF of a base with which llama.cpp takes mtp-a-Q4_0.gguf, found no files. Nothing was sent",
        ),
        (["model.safetensors", "mmproj-a-F16.gguf"], "found mmproj-a-F16.gguf, model.safetensors. Nothing was sent"),
        (["a-Q8_0.gguf", "mtp-a-Q8_0.gguf"], "found mtp-a-Q8_0.gguf, which it takes instead"),
        (["a-Q8_0.gguf", "preset.ini"], "found a preset.ini, which it reads alone"),
    ],
)
def test_where_nothing_would_take_it(held: list[str], said: str) -> None:
    with pytest.raises(HubError, match="me/x: ") as caught:
        paired("me/x", held, "mtp-a-Q4_0.gguf")
    assert said in str(caught.value)


# --- what is sent

NAME = "org/sample-GGUF"
SIDECAR = "mtp-sample-Q4_0.gguf"


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("extracted") / "gguf"
    mtp_extract.extract(first_bundle(), directory, format="gguf")
    return directory


@pytest.fixture
def base(hub: HubServer) -> HubServer:
    hub.add(NAME, "sample-Q8_0.gguf", b"a base")
    hub.add(NAME, "README.md", b"its card", lfs=False)
    return hub


def test_one_file_goes_there_and_the_rest_stays(base: HubServer, extracted: Path) -> None:
    planned = upload(extracted, NAME, beside=True, dry_run=True)
    assert set(base.repos[NAME].files) == {"sample-Q8_0.gguf", "README.md"}
    done = upload(extracted, NAME, beside=True)
    assert planned.sent == done.sent == (SIDECAR,)
    assert planned.pairs == done.pairs
    assert {(pair.asked, pair.base, pair.drafter) for pair in done.pairs} == {
        (f"{NAME}{tag}", "sample-Q8_0.gguf", SIDECAR) for tag in ("", ":Q8_0")
    }
    held = {path: content.data for path, (content, _) in base.repos[NAME].files.items()}
    sidecar = (extracted / SIDECAR).read_bytes()
    assert held == {"sample-Q8_0.gguf": b"a base", "README.md": b"its card", SIDECAR: sidecar}
    again = upload(extracted, NAME, beside=True)
    assert (again.sent, again.commit) == ((), done.commit)


def test_another_of_that_name_stays_unless_it_is_said(base: HubServer, extracted: Path) -> None:
    base.add(NAME, SIDECAR, b"somebody's")
    with pytest.raises(HubError, match=rf"holds other files, {SIDECAR}\.") as caught:
        upload(extracted, NAME, beside=True)
    assert caught.value.remedies == ("force",)
    upload(extracted, NAME, beside=True, force=True)
    assert base.repos[NAME].files[SIDECAR][0].data == (extracted / SIDECAR).read_bytes()
    assert base.repos[NAME].files["README.md"][0].data == b"its card"


def test_no_repository_is_made_for_it(hub: HubServer, extracted: Path) -> None:
    with pytest.raises(HubError, match="found no files"):
        upload(extracted, "org/new", beside=True)
    assert hub.repos == {}


def test_what_does_not_go_there(base: HubServer, extracted: Path, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="The card of the base stays"):
        upload(extracted, NAME, beside=True, card=CardWords(base_model="me/base"))
    mtp_extract.convert(extracted, tmp_path / "floats", format="transformers")
    with pytest.raises(HubError, match=r"expected a GGUF, as llama\.cpp finds it, found none"):
        upload(tmp_path / "floats", NAME, beside=True)
    spoiled = Path(shutil.copytree(extracted, tmp_path / "spoiled"))
    (spoiled / SIDECAR).write_bytes(b"GGUF")
    with pytest.raises(mtp_extract.MtpExtractError, match=SIDECAR):
        upload(spoiled, NAME, beside=True)
    assert base.requests == []

"""Directories that an engine would load as something else, and records that lie: none is proven. Where no proof is
asked for, what does not count is passed over with a note, and what changes the function is refused."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.random_heads import LAYOUTS, head_config, random_head, write_head
from helpers.record_document import TUNING, forge

from mtp_extract import convert, extract, insert
from mtp_extract.bundle import BundledDrafter, open_bundle
from mtp_extract.checkpoint.files import write_file
from mtp_extract.checkpoint.gguf_file import read_gguf
from mtp_extract.errors import CheckpointError, MtpExtractError
from mtp_extract.formats import MTP_FORMATS, load_format, read_checkpoint
from mtp_extract.hub.upload import plan_upload
from mtp_extract.insertion.run import plan_insertion
from mtp_extract.pipeline.check import CheckpointDirectory
from mtp_extract.pipeline.extraction import build_checkpoint
from mtp_extract.pipeline.identity import NEEDED, check_identity

pytestmark = pytest.mark.xdist_group("intruders")

Written = Mapping[str, Path]
"""Format → the sample's drafter in it."""

DATA = json.loads(Path(__file__).with_name("intruders.json").read_text(encoding="utf-8"))

FILES: Mapping[str, object] = {
    **dict.fromkeys(DATA["weights"]),
    **dict.fromkeys(DATA["texts"], "import os\n"),
    **{name: {"a": 1} for name in DATA["documents"]},
    **DATA["other files"],
}
"""Name → content: text, JSON, or None for a copy of the weights."""

CHANGES: Mapping[str, object] = DATA["change the function"]  # keys that do, and none of our configurations has
UNKNOWN: Mapping[str, object] = DATA["unknown"]  # keys of which nobody here knows what they do
# Keys of ours whose value changes no draft of such a drafter; training, the tokenizer and the engine read them.
HARMLESS: Sequence[str] = DATA["harmless"]
# What counts in MLX for modules without an entry of their own, of which we write none.
OF_NO_MODULE = [("quantization", key) for key in ("group_size", "bits", "mode")]
# Key of the header of a GGUF → a value that makes another drafter of it; None takes it away.
GGUF_KEYS: Mapping[str, object] = DATA["keys of a gguf"]
# Key of ``extraction.json`` → what it may say instead; each is refuted where the bundle is at hand.
LIES: Mapping[str, object] = DATA["lies"]
# What it says of where the directory came from and what was done to it: no property of a bundle.
PAST: Mapping[str, object] = {**DATA["past"], "tuning": TUNING}


def put(document: dict[str, Any], key: str, value: object) -> None:
    """Set ``key``, whose names are parted by dots; those of files have dots themselves."""
    first, _, rest = key.partition(".")
    if rest and first in ("source", "section", "geometry"):
        put(document[first], rest, value)
    elif rest:
        document[first][rest] = value
    else:
        document[first] = value


def alter(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """``document`` with one thing in it changed, and what: each value that is not harmless, and a key more in each
    object."""
    for path, value in [*places(document)]:
        changed = copy.deepcopy(document)
        holder: Any = changed
        for step in path[:-1]:
            holder = holder[step]
        if isinstance(value, dict):
            (holder[path[-1]] if path else holder)["more"] = 1
        elif path[-1] in HARMLESS or path in OF_NO_MODULE:
            continue
        else:
            holder[path[-1]] = pick_other(value)
        yield ".".join(map(str, path)), changed


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))


def pick_other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else [*value, *value[-1:]] if value else 1


def add_file(directory: Path, name: str, content: object, weights: Path) -> None:
    """Put one of :data:`FILES` there."""
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    if content is None:
        shutil.copy(weights, path)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture(scope="module")
def written(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("written")
    for name in MTP_FORMATS:
        extract(sample, folder / name, format=name, codes=True)
    return {name: folder / name for name in MTP_FORMATS}


def copy_checkpoint(directory: Path, place: Path, *, record: bool = False) -> Path:
    """With its ``record`` or without."""
    shutil.copytree(directory, place)
    if not record:
        (place / "extraction.json").unlink()
    return place


def is_proven(directory: Path, source: BundledDrafter) -> bool:
    """Whether validation would say so; what cannot be read is not."""
    try:
        checks = check_identity(directory, source)
    except MtpExtractError as error:
        assert str(error)
        return False
    return {check.name for check in checks if check.passed} >= set(NEEDED) and all(
        c.passed is not False for c in checks
    )


def is_refused(directory: Path) -> bool:
    """Whether converting refuses it; and so do the others, which ask the same."""
    try:
        CheckpointDirectory.of(directory)
    except MtpExtractError:
        return True
    return False


def list_passed_over(directory: Path) -> str:
    """What a user is told of it where no proof is asked for."""
    return " ".join(CheckpointDirectory.of(directory).checkpoint.unread)


def test_what_is_harmless_beside_a_sound_directory_is_not_told(
    written: Written, source: BundledDrafter, tmp_path: Path
) -> None:
    """With their record and without."""
    for name, directory in written.items():
        bare = copy_checkpoint(directory, tmp_path / name, record=True)
        for file in (
            *("LICENSE", "README.md", "picture.png", ".gitattributes", "report.json"),
            *("tokenizer.json", "tokenizer_config.json", ".git/config", ".cache/model.safetensors"),
        ):
            (bare / file).parent.mkdir(exist_ok=True)
            (bare / file).write_text("{}")
        assert is_proven(bare, source) and not list_passed_over(bare), name
        (bare / "extraction.json").unlink()
        assert is_proven(bare, source) and not list_passed_over(bare), name


@pytest.mark.parametrize("name", MTP_FORMATS)
def test_a_file_beside_is_passed_over_and_proves_nothing(
    written: Written, source: BundledDrafter, tmp_path: Path, name: str
) -> None:
    directory = copy_checkpoint(written[name], tmp_path / "d", record=True)
    weights, record = next(directory.glob(load_format(name).weights_file)), directory / "extraction.json"
    sound = record.read_bytes()
    for file, content in FILES.items():
        add_file(directory, file, content, weights)
        forge(directory)
        assert file.rpartition("/")[2] in list_passed_over(directory), file
        (directory / file).unlink()
        record.write_bytes(sound)
    add_file(directory, file, content, weights)
    assert not is_proven(directory, source)
    with pytest.raises(MtpExtractError, match="expected nothing but what mtp-extract wrote"):
        plan_upload(directory)


def test_a_link_and_a_pipe_are_passed_over(written: Written, source: BundledDrafter, tmp_path: Path) -> None:
    """Links to directories, which engines look through; and what engines would wait for."""
    directory = copy_checkpoint(written["transformers"], tmp_path / "d")
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(directory / "model.safetensors", tmp_path / "elsewhere")
    for name in ("sub", "tokenizer.json"):
        (directory / name).symlink_to(tmp_path / "elsewhere")
        assert not is_proven(directory, source) and f"{name} is a link" in list_passed_over(directory)
        (directory / name).unlink()
    os.mkfifo(directory / "tokenizer.json")
    assert not is_proven(directory, source) and "tokenizer.json is a link, or no file" in list_passed_over(directory)


def test_a_tensor_that_the_header_names_twice_is_refused(
    written: Written, source: BundledDrafter, tmp_path: Path
) -> None:
    directory = copy_checkpoint(written["transformers"], tmp_path / "d")
    path = directory / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].rstrip()
    name, entry = next((name, entry) for name, entry in json.loads(header).items() if name != "__metadata__")
    header = f'{{"{name}":{json.dumps(entry)},'.encode() + header[1:]
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    assert not is_proven(directory, source) and is_refused(directory)


# The other packed directories say the same keys as one of these.
@pytest.mark.parametrize("name", ["transformers", "mlx", "compressed-tensors", "gemma", "litert"])
def test_no_other_value_of_a_configuration_is_proven(
    written: Written, source: BundledDrafter, tmp_path: Path, name: str
) -> None:
    """Every value of it changed, a key more in every object, and what engines are known to read."""
    directory = copy_checkpoint(written[name], tmp_path / "d")
    for path in sorted(directory.glob("*.json")):
        sound, places = path.read_text(), [()] if name == "litert" or "gen" in path.name else [(), ("text_config",)]
        cases = [*alter(json.loads(sound))]
        for key, value in {**CHANGES, **UNKNOWN}.items():
            for place in places:
                document: dict[str, Any] = json.loads(sound)
                holder = document[place[0]] if place else document
                holder[key] = value
                cases.append((key, document))
        for key, document in cases:
            path.write_text(json.dumps(document))
            assert not is_proven(directory, source), f"{path.name}: {key}"
        path.write_text(sound.replace("{", '{"text_config": 1, "is_assistant": true, "vocab_size": 1,', 1))
        assert not is_proven(directory, source), "twice"
        path.write_text(sound)
    assert is_proven(directory, source)


def test_no_other_key_of_a_gguf_is_proven(source: BundledDrafter, tmp_path: Path) -> None:
    original = build_checkpoint(source)
    (file,) = load_format("gguf").plan(original, "codes").files
    for key, value in GGUF_KEYS.items():
        metadata = {**file.metadata, key: value}
        if value is None:
            del metadata[key]
        (tmp_path / file.name).unlink(missing_ok=True)
        write_file(tmp_path, replace(file, metadata=metadata))
        assert not is_proven(tmp_path, source) and not is_proven(tmp_path / file.name, source), key
        # One key in which numbers of heads are told in another form is read in that form.
        assert is_refused(tmp_path) or read_checkpoint(tmp_path).config != original.config, key


@pytest.mark.parametrize("name", ["transformers", "mlx", *LAYOUTS])
def test_a_key_that_changes_the_function_is_refused_and_any_other_passed_over(
    written: Written, tmp_path: Path, name: str
) -> None:
    """In every configuration, at every place where engines look for it."""
    if name in LAYOUTS:
        directory = write_head(tmp_path / "d", random_head(head_config()), name)
        inner = {"sliding_window": 16, "hidden_act": "gelu", "mlp_bias": True, "tie_word_embeddings": True}
    else:
        directory = copy_checkpoint(written[name], tmp_path / "d")
        inner = {"enable_moe_block": True, "hidden_size_per_layer_input": 8, "use_bidirectional_attention": "all"}
    place = {"speculators": "transformer_layer_config", "eagle3": ""}.get(name, "text_config")
    sound = (directory / "config.json").read_text()

    def changed(key: str, value: object) -> None:
        document = json.loads(sound)
        (document[place] if place else document)[key] = value
        (directory / "config.json").write_text(json.dumps(document))

    for key, value in {**CHANGES, **inner, "attention_bias": True}.items():
        if name in LAYOUTS and key == "rope_theta":  # which heads have
            continue
        changed(key, value)
        with pytest.raises(CheckpointError, match=rf"config\.json: says .*{key}.*it is not read\. "):
            CheckpointDirectory.of(directory)
    for key, value in UNKNOWN.items():
        if (name, key) != ("eagle3", "eagle_config"):
            changed(key, value)
            assert key in list_passed_over(directory), key


def test_codes_said_to_have_other_bits_prove_nothing(written: Written, source: BundledDrafter, tmp_path: Path) -> None:
    directory = copy_checkpoint(written["transformers"], tmp_path / "d")
    path = directory / "codes/codes.safetensors"
    sound = path.read_bytes()

    path.write_bytes(sound.replace(b'\\"bits\\": 4', b'\\"bits\\": 8'))

    assert path.read_bytes() != sound
    assert not is_proven(directory, source)


@pytest.mark.parametrize("command", ["convert", "insert"])
def test_commands_say_what_they_passed_over(written: Written, sample: Path, tmp_path: Path, command: str) -> None:
    directory = copy_checkpoint(written["transformers"], tmp_path / "d", record=True)
    shutil.copy(directory / "model.safetensors", directory / "a.safetensors")
    (directory / "runs").mkdir()
    (directory / "runs/events.out").touch()
    (directory / "config.json").write_text((directory / "config.json").read_text() + " ")
    if command == "convert":
        notes = convert(directory, tmp_path / "out", format="litert").notes
        assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.suffix == ".safetensors") == [
            "mtp_drafter.safetensors"
        ]
    else:
        with plan_insertion(directory, sample) as plan:
            notes = plan.notes
    told = " ".join(notes)
    assert all(name in told for name in ("a.safetensors", "runs/events.out", "config.json has other content")), told


def says(directory: Path, key: str, value: object, source: BundledDrafter) -> str:
    """What is wrong with the directory, by its bundle, once ``key`` of its record says ``value``; empty for nothing."""
    path = directory / "extraction.json"
    sound = path.read_text()
    told = json.loads(sound)
    put(told, key, value)
    assert told != json.loads(sound), key
    path.write_text(json.dumps(told))
    wrong = [check.evidence for check in check_identity(directory, source) if not check.passed]
    path.write_text(sound)
    assert not any("\n" in evidence for evidence in wrong)
    return "; ".join(wrong)


def test_a_lie_of_a_record_is_refuted_and_its_past_is_not(
    written: Written, source: BundledDrafter, sample: Path, tmp_path: Path
) -> None:
    """Each statement of it that a bundle decides, where the bundle is at hand; its past refutes nothing."""
    extract(sample, tmp_path / "d")
    for key, value in LIES.items():
        assert says(tmp_path / "d", key, value, source), key
    for key, value in PAST.items():
        assert not says(tmp_path / "d", key, value, source), key
    # The proof is made anew; in which words another release told it refutes nothing.
    of_another = json.loads((tmp_path / "d/extraction.json").read_text())
    of_another["tool"]["version"] = "0"
    (tmp_path / "d/extraction.json").write_text(json.dumps(of_another))
    assert not says(tmp_path / "d", "proof", LIES["proof"], source)
    # The steps in between are taken from the record; what the bundle says of the weights is not.
    convert(written["litert"], tmp_path / "converted", format="gguf")
    for key in ("known_as", "rounded", "shared", "proof"):
        assert says(tmp_path / "converted", key, LIES[key], source), key


def test_a_tuned_drafter_that_was_put_into_a_bundle_is_its_drafter(sample: Path, tmp_path: Path) -> None:
    """Its record says that it was tuned, and names the bundle it came from: that is past, and refutes nothing."""
    extract(sample, tmp_path / "d", format="gguf")
    path = next((tmp_path / "d").glob("*.gguf"))
    stored, data = read_gguf(path)[1]["blk.1.ffn_norm.weight"], bytearray(path.read_bytes())
    data[stored.offset + 2] ^= 1
    path.write_bytes(data)
    record = json.loads((tmp_path / "d/extraction.json").read_text())
    (tmp_path / "d/extraction.json").write_text(json.dumps({**record, "tuning": TUNING, "proof": None}))
    forge(tmp_path / "d")
    insert(tmp_path / "d", sample, tmp_path / "new.litertlm")
    with open_bundle(tmp_path / "new.litertlm") as opened:
        checks = check_identity(tmp_path / "d", opened.read_drafter())
    assert all(check.passed for check in checks), checks
    assert checks[-1].evidence == (
        "every file is as recorded; it came from another file (sample.litertlm), with which nothing was compared"
    )

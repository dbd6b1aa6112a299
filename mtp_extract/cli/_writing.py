"""What the commands that write a checkpoint share: options, and what they say of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mtp_extract.architecture.roles import EAGLE3
from mtp_extract.cli._drafter import say_geometry
from mtp_extract.cli.terminal import say, size, table, write_json
from mtp_extract.errors import escape
from mtp_extract.formats import EVERY, FORMATS, HEADS
from mtp_extract.proof.words import in_words

if TYPE_CHECKING:
    from mtp_extract.pipeline.directory import ExtractionResult
    from mtp_extract.report.card import CardWords

# What an option may be is what the registry lists.
_CHOICES = {name: listed for name, listed in FORMATS.items() if not listed.variant}
FormatName = Enum("FormatName", {name: name for name in _CHOICES}, type=str)  # type: ignore[misc]  # not a literal
AnyFormatName = Enum("AnyFormatName", {name: name for name in (*_CHOICES, *HEADS)}, type=str)  # type: ignore[misc]
_Type = Enum("_Type", {name: name for listed in FORMATS.values() for name in listed.dtypes}, type=str)  # type: ignore[misc]
_Engine = Enum("_Engine", {name: name for listed in FORMATS.values() for name in listed.otherwise}, type=str)  # type: ignore[misc]
_Rule = Enum("_Rule", {name: name for listed in FORMATS.values() for name in listed.rules}, type=str)  # type: ignore[misc]

FORMATS_ABOUT = " ".join(f"{name}: {listed.about}." for name, listed in _CHOICES.items())
HEADS_ABOUT = " ".join(f"{name}: {listed.about}." for name, listed in HEADS.items())
_RULES_ABOUT = "; ".join(f"{name}: {', '.join(listed.rules)}" for name, listed in _CHOICES.items() if listed.rules)

For = Annotated[
    Optional[_Engine],  # noqa: UP045 - typer reads the annotation at run time, on Python 3.10 too
    typer.Option("--for", help="An engine that wants the format otherwise."),
]

Numbers = Annotated[
    Optional[_Type],  # noqa: UP045
    typer.Option("--dtype", help="Type of the numbers; f32 is exact. By default the first that the format has."),
]

Codes = Annotated[bool, typer.Option("--codes", help="Also write the stored integers, scales and zero points.")]

Exact = Annotated[bool, typer.Option("--exact", help="Write nothing that is rounded; say what would be.")]

Quantize = Annotated[
    Optional[_Rule],  # noqa: UP045
    typer.Option(
        help=f"Round matrices that have no integers to such, by a rule the format holds ({_RULES_ABOUT}; its usual "
        "one first)."
    ),
]

Tokenizer = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="DIR", help="The base's tokenizer, to put into a gguf; llama.cpp drafts without."),
]

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DIR if it is such a checkpoint.")]


License = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--license", metavar="ID", help="Licence for the card, as the Hub calls it: apache-2.0, gemma, …"),
]

BaseModel = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--base-model", metavar="ORG/NAME", help="The base's id on the Hub, for the card."),
]

Title = Annotated[Optional[str], typer.Option("--title", metavar="TEXT", help="Title of the card.")]  # noqa: UP045


def card_words(license_: str | None, base_model: str | None, title: str | None) -> CardWords:
    """What those options say; what is no licence, id or title is wrong usage."""
    from mtp_extract.report.card import CardWords

    try:
        return CardWords(license_, base_model, title)
    except ValueError as error:
        option, _, rest = str(error).partition(" ")
        raise typer.BadParameter(f"--{option.replace('_', '-')} {rest}") from None


def check_usage(format_: str, engine: str | None, dtype: str | None, tokenizer: Path | None) -> None:
    """Refuse, as wrong usage, a type in which the format is not written, an engine that loads it as it is, and a
    tokenizer for which it has no room.
    """
    if tokenizer is not None and not EVERY[format_].tokenizer_inside:
        raise typer.BadParameter(f"--tokenizer: the {format_} format has no room for one.")
    if engine is not None and engine not in EVERY[format_].otherwise:
        raise typer.BadParameter(f"the {format_} format is not written otherwise for {engine}.")
    dtypes = EVERY[format_].dtypes
    if dtype is not None and dtype not in dtypes:
        raise typer.BadParameter(f"the {format_} format is written in {' or '.join(dtypes)}.")


def show_written(result: ExtractionResult, print_json: bool, head: Sequence[str]) -> None:
    """All of ``result`` as JSON, or for people: ``head``, geometry, what was written, its proof, files and notes."""
    if print_json:
        write_json(
            {
                "directory": str(result.directory),
                "files": result.files,
                "notes": result.notes,
                "extraction": result.record,
            }
        )
        return
    record = result.record
    say(head[0])
    say_geometry(record["geometry"], result.parameters)
    for line in head[1:]:
        say(line)
    say(f"Wrote {escape(result.directory)}/ ({record['layout']} format, {holds(record)}), read back and compared")
    if EVERY[record["layout"]].architecture != EAGLE3:
        _say_proof(record)
    table([[file, size(length)] for file, length in result.files.items()])
    for note in result.notes:
        say(f"Note: {note}")
    if record["layout"] == "transformers":
        say(f"Load it: AutoModelForCausalLM.from_pretrained({str(result.directory)!r}). Its README.md shows engines.")


def _say_proof(record: Mapping[str, Any]) -> None:
    proof = record["proof"]
    if proof is None:
        say("Not proven: nothing here says which file it came from")
        return
    tensors = tensors_of(record)
    rounded = any(entry["rounded_to"] or entry["rounded_before"] or entry["made_codes"] for entry in tensors)
    first, *others = in_words(proof)
    say(f"Proven{' by the extraction' if proof['inherited'] else ''}{' before rounding' if rounded else ''}: {first}")
    for line in others:
        say(f"  {line}")
    if proof["rounding"] is not None and not proof["inherited"]:
        say(f"  as written they agree to {proof['rounding']['difference_below']:g}, which is what the rounding does")


def holds(record: Mapping[str, Any]) -> str:
    """In a few words, what the weights that a record describes are held as."""
    tensors = tensors_of(record)
    kept = [entry for entry in tensors if entry["kept"] == "codes"]
    types = sorted({entry["dtype"] for entry in tensors if entry["kept"] == "floats"})
    if not kept:
        # A format whose numbers are codes may have been given none.
        return " and ".join(types) if record["dtype"] == "codes" else str(record["dtype"]).upper()
    made = sum(entry["made_codes"] is not None for entry in kept)
    return (
        f"{len(kept)} of {len(tensors)} weights as integers"
        + (f", {made} of them made here" if made else "")
        + (f", the others in {' and '.join(types)}" if types else "")
    )


def tensors_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entries of a record that stand for weights, those of their scales and the like left out."""
    return [entry for entry in record["tensors"].values() if "part" not in entry]

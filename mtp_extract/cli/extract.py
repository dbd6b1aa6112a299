"""``mtp-extract``: from a bundle to a directory that engines load."""

from __future__ import annotations

import math
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mtp_extract.checkpoint.formats import FORMATS
from mtp_extract.cli._drafter import found_in, say_geometry
from mtp_extract.cli._run import AsJson, Download, SlidingWindow, new_app, run_lean
from mtp_extract.cli.terminal import progress, say, size, table, write_json
from mtp_extract.errors import escape

if TYPE_CHECKING:
    from mtp_extract.extraction import ExtractionResult

__all__ = ["app", "main"]

app = new_app()


# What the option may be is what the registry lists.
Format = Enum("Format", {name: name for name in FORMATS}, type=str)  # type: ignore[misc]  # not a literal
Dtype = Enum("Dtype", {name: name for listed in FORMATS.values() for name in listed.dtypes}, type=str)  # type: ignore[misc]
_DEFAULT = next(iter(Format))
_ABOUT = " ".join(f"{name}: {listed.about}." for name, listed in FORMATS.items())


# \b: typer leaves the lines as they are.
_USE = """\b
What was written, in an engine (the README.md in DIR says more):
  transformers  model.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained("DIR"))
  vLLM          vllm serve BASE --speculative-config '{"method":"mtp","model":"DIR","num_speculative_tokens":4}'
  SGLang        python -m sglang.launch_server --model-path BASE --speculative-algorithm NEXTN
                --speculative-draft-model-path DIR --speculative-num-steps 5
                --speculative-num-draft-tokens 6 --speculative-eagle-topk 1
  mlx-vlm       python -m mlx_vlm generate --model BASE --draft-model DIR --draft-kind mtp --draft-block-size 4
  llama.cpp     llama-server -m BASE.gguf -md DIR/drafter.gguf --spec-type draft-mtp --spec-draft-n-max 4
"""


@app.command(epilog=_USE)
def command(
    source: Annotated[
        Optional[str],  # noqa: UP045 - typer reads the annotation at run time, on Python 3.10 too
        typer.Argument(
            metavar="SOURCE",
            help="A .litertlm, a drafter's .tflite, hf://org/repo/file.litertlm[@revision], or an https:// URL.",
        ),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("-o", "--out", metavar="DIR", help="Where to write; by default SOURCE's name + -mtp-drafter."),
    ] = None,
    format: Annotated[  # noqa: A002 - the option's name
        Format,
        typer.Option(help=_ABOUT),
    ] = _DEFAULT,
    dtype: Annotated[
        Optional[Dtype],  # noqa: UP045
        typer.Option(help="Type of the numbers; f32 is exact. By default the first that the format has."),
    ] = None,
    codes: Annotated[
        bool, typer.Option("--codes", help="Also write the stored integers, scales and zero points.")
    ] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Write nothing that is rounded; say what would be.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DIR if it is such a checkpoint.")] = False,
    sliding_window: SlidingWindow = None,
    section: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Index of the drafter's section; asked for only where there are several."),
    ] = None,
    signature: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="The drafter's signature; asked for only where there are several."),
    ] = None,
    download: Download = False,
    sample: Annotated[bool, typer.Option("--sample", help="Extract the sample that comes with mtp-extract.")] = False,
    print_json: AsJson = False,
) -> None:
    """Extract the multi-token-prediction drafter of a LiteRT bundle into a checkpoint that engines load."""
    if (source is None) != sample:
        raise typer.BadParameter("name a SOURCE, or --sample; one of the two.")
    dtypes = FORMATS[format.value].dtypes
    if dtype is not None and dtype.value not in dtypes:
        raise typer.BadParameter(f"the {format.value} format is written in {' or '.join(dtypes)}.")

    from mtp_extract.bundle import open_bundle
    from mtp_extract.data import sample_bundle
    from mtp_extract.extraction import default_directory, extract

    path = str(sample_bundle()) if source is None else source
    with (
        progress(quiet=print_json) as tick,
        open_bundle(path, download=download, progress=tick, section=section, signature=signature) as opened,
    ):
        result = extract(
            opened,
            out or default_directory(path),
            format=format.value,
            dtype=dtype.value if dtype else None,
            codes=codes,
            exact=exact,
            overwrite=overwrite,
            sliding_window=sliding_window,
            progress=tick,
        )
    if print_json:
        write_json(
            {
                "directory": str(result.directory),
                "files": result.files,
                "notes": result.notes,
                "extraction": result.record,
            }
        )
    else:
        _show(result)


def _show(result: ExtractionResult) -> None:
    record = result.record
    tensors = [entry for entry in record["tensors"].values() if "part" not in entry]
    source, section = record["source"], record["source"]["section"]
    name = record["known_as"] or "MTP"
    say(f"{name} drafter of {escape(source['name'])} ({found_in(section['index'], section['found_by'])})")
    say_geometry(record["geometry"], sum(math.prod(entry["shape"]) for entry in tensors))
    kinds = Counter(entry["source"]["dtype"] if entry["source"] else "implied" for entry in tensors)
    stored = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    confirmed = sum(entry["name_confirms"] for entry in tensors)
    say(
        f"  {len(tensors)} tensors from the graph ({stored}), {confirmed} confirmed by published names; "
        f"{len(record['set_aside'])} other constants set aside, each with its reason"
    )
    written = f"{record['layout']} layout, {record['dtype'].upper()}"
    say(f"Wrote {escape(result.directory)}/ ({written}), read back and compared")
    proof = record["proof"]
    below = max(proof["differences_below"].values())
    positions = len(proof["positions"])
    say(f"Proven: executed at {positions} positions, graph and checkpoint agree to {below:g} of their range")
    table([[file, size(length)] for file, length in result.files.items()])
    for note in result.notes:
        say(f"Note: {note}")
    if record["layout"] == "transformers":
        say(f"Load it: AutoModelForCausalLM.from_pretrained({str(result.directory)!r}). Its README.md shows engines.")


def main() -> None:
    """Entry point."""
    run_lean(app)

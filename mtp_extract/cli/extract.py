"""``mtp-extract``: from a bundle to a directory that engines load."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from mtp_extract.cli._drafter import found_in
from mtp_extract.cli._options import AsJson, SignatureKey, SlidingWindow
from mtp_extract.cli._run import new_app, run_lean
from mtp_extract.cli._writing import CHOICES, FORMATS_ABOUT, checked_format, chosen_by, show_written
from mtp_extract.cli.terminal import progress
from mtp_extract.errors import escape
from mtp_extract.options import About, Overwrite
from mtp_extract.pipeline.plan import WritingPlan

_USE = """\
What was written, in an engine (the README.md in DIR says more):
  transformers  model.generate(**inputs,
                assistant_model=AutoModelForCausalLM.from_pretrained("DIR"))
  vLLM          vllm serve BASE --speculative-config
                '{"method":"mtp","model":"DIR","num_speculative_tokens":4}'
  SGLang        python -m sglang.launch_server --model-path BASE
                --speculative-algorithm NEXTN --speculative-draft-model-path DIR
                --speculative-num-steps 5 --speculative-num-draft-tokens 6
                --speculative-eagle-topk 1
  mlx-vlm       python -m mlx_vlm generate --model BASE --draft-model DIR
                --draft-kind mtp --draft-block-size 4
  llama.cpp     llama-server -m BASE.gguf -md DIR/mtp-*.gguf
                --spec-type draft-mtp --spec-draft-n-max 4
"""


def command(
    *,
    source: Annotated[
        str | None,
        About(
            "A .litertlm or a drafter's .tflite: a path, ORG/NAME[/FILE][@REVISION] of the Hugging Face Hub, or a URL.",
            metavar="SOURCE",
        ),
    ],
    out: Annotated[
        Path | None,
        About("Where to write; by default SOURCE's name + -mtp-drafter.", names=("-o", "--out"), metavar="DIR"),
    ] = None,
    format: Annotated[  # noqa: A002 - the option's name
        str | None,
        About(f"{FORMATS_ABOUT} By default what --for is best served with, or transformers.", choices=tuple(CHOICES)),
    ] = None,
    plan: WritingPlan,
    overwrite: Overwrite = False,
    sliding_window: SlidingWindow = None,
    section: Annotated[
        int | None, About("Index of the drafter's section; asked for only where there are several.", least=0)
    ] = None,
    signature: SignatureKey = None,
    sample: Annotated[bool, About("Extract the sample that comes with mtp-extract.")] = False,
    print_json: AsJson = False,
) -> None:
    """Extract the multi-token-prediction drafter of a LiteRT bundle into a checkpoint that engines load."""
    if (source is None) != sample:
        raise typer.BadParameter("name a SOURCE, or --sample; one of the two.")
    name = checked_format(plan, format)

    from mtp_extract.bundle import open_bundle
    from mtp_extract.data import sample_bundle
    from mtp_extract.pipeline.extraction import extract, require_no_checkpoint

    path = str(sample_bundle()) if source is None else source
    require_no_checkpoint(path)
    with (
        progress(quiet=print_json) as tick,
        open_bundle(path, progress=tick, section=section, signature=signature) as opened,
    ):
        result = extract(
            opened,
            out,
            format=name,
            **vars(plan),
            overwrite=overwrite,
            sliding_window=sliding_window,
            progress=tick,
        )
    show_written(result, print_json, [*_head(result.record), *chosen_by(plan, format, name)])


def _head(record: Mapping[str, Any]) -> list[str]:
    source, section, counts = record["source"], record["source"]["section"], record["counts"]
    stored = ", ".join(f"{count} {kind}" for kind, count in counts["stored"].items())
    return [
        f"{record['known_as'] or 'MTP'} drafter of {escape(source['name'])} "
        f"({found_in(section['index'], section['found_by'])})",
        f"  {sum(counts['held'].values())} tensors from the graph ({stored}), {counts['names_confirmed']} confirmed by "
        f"published names; {counts['set_aside']} other constants set aside, each with its reason",
    ]


_EXAMPLES = {
    "litert-community/gemma-4-E4B-it-litert-lm": "From the Hub, for transformers, vLLM, SGLang and mlx-vlm, in BF16.",
    "--sample -o drafter --for llama.cpp": "The sample that comes along, as llama.cpp loads it best.",
}

app = new_app(command, _EXAMPLES, _USE)
main = partial(run_lean, app)

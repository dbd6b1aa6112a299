"""What the commands that write a checkpoint print of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mtp_extract.cli._drafter import say_geometry, say_proof
from mtp_extract.cli.terminal import say, say_notes, size, table, write_json
from mtp_extract.errors import escape
from mtp_extract.report.card import is_head
from mtp_extract.report.serving import shell_word

if TYPE_CHECKING:
    from mtp_extract.pipeline.writing import ExtractionResult

NEXT = {
    "transformers": 'model.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained("DIR"))',
    "vllm": 'vllm serve BASE --speculative-config \'{"method":"mtp","model":"DIR","num_speculative_tokens":4}\'',
    "sglang": "python -m sglang.launch_server --model-path BASE --speculative-algorithm NEXTN "
    "--speculative-draft-model-path DIR --speculative-num-steps 5 --speculative-num-draft-tokens 6 "
    "--speculative-eagle-topk 1",
    "mlx-vlm": "python -m mlx_vlm generate --model BASE --draft-model DIR --draft-kind mtp --draft-block-size 4",
    "llama.cpp": "llama-server -m BASE.gguf -md DIR/mtp-*.gguf --spec-type draft-mtp --spec-draft-n-max 4",
}
"""Engine → the command that serves DIR with it, an MTP drafter's."""


def show_written(
    result: ExtractionResult, engine: str | None, head: str, details: Sequence[str], *, verbose: bool, print_json: bool
) -> None:
    """What was written, whether it is verified, and the command for ``engine``; ``verbose`` all that is known of it."""
    if print_json:
        made = {"directory": result.directory, "files": result.files, "notes": result.notes}
        write_json(made | {"extraction": result.record})
        return
    record, where = result.record, escape(result.directory)
    say(head)
    if verbose:
        say_geometry(record["geometry"], result.parameters)
        for line in details:
            say(line)
    total = size(sum(result.files.values()))
    say(f"Wrote {where}/ ({record['layout']} format, {holds(record)}, {total}), read back and compared")
    if not is_head(record):
        _say_proof(record, verbose)
    if verbose:
        table([[file, size(length)] for file, length in result.files.items()])
    say_notes(result.notes)
    if engine in NEXT and not is_head(record):
        say(f"Next: {NEXT[engine].replace('DIR', shell_word(result.directory))}")
    else:
        say(f"{where}/README.md shows how engines load it.")


def _say_proof(record: Mapping[str, Any], verbose: bool) -> None:
    proof = record["proof"]
    if proof is None:
        say("Not verified: no record says which file it came from")
        return
    by = " when it was extracted" if proof["inherited"] else ""
    before = "before rounding, " if is_rounded(record) else ""
    if verbose:
        say_proof(f"Verified{by}: {before}".rstrip(" :,"), proof)
    else:
        say(f"Verified{by}: {before}the checkpoint computes what the bundle computes, for every input, in real numbers")


def is_rounded(record: Mapping[str, Any]) -> bool:
    """Whether a record says that numbers were rounded, here or before."""
    return any(step["rounded"] or step["made_codes"] for step in (*record["converted_from"], record))


def holds(record: Mapping[str, Any]) -> str:
    """In a few words, what the weights that a record describes are held as."""
    held, made = record["counts"]["held"], record["made_codes"]
    types = sorted(held.keys() - {"codes", "indices"})
    if "codes" not in held:
        # A format whose numbers are codes may have been given none.
        return " and ".join(types) if record["dtype"] == "codes" else str(record["dtype"]).upper()
    return (
        f"{held['codes']} of {sum(held.values())} weights as integers"
        + (f", {made['matrices']} of them made here" if made else "")
        + (f", the others in {' and '.join(types)}" if types else "")
    )

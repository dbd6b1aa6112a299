"""``mtp-inspect``: what a bundle holds, whether it holds a checkpoint, or whether a checkpoint is what it says."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_extract.cli._drafter import found_in, say_geometry, say_proof
from mtp_extract.cli._options import AsJson, SlidingWindow
from mtp_extract.cli._planned import given
from mtp_extract.cli._run import new_app, run_lean
from mtp_extract.cli.terminal import progress, say, say_all, size, table, write_json
from mtp_extract.errors import escape
from mtp_extract.options import About

if TYPE_CHECKING:
    from mtp_extract.base.comparison import BaseComparison
    from mtp_extract.pipeline.check import Verification

_SINGLE = ".gguf"
"""Ends the name of a checkpoint that is one file."""


def command(
    *,
    context: typer.Context,
    source: Annotated[
        str,
        About(
            "A .litertlm or a .tflite: a path, ORG/NAME[/FILE][@REVISION] of the Hugging Face Hub, or a URL; or a "
            "checkpoint: a directory of any format, a .gguf, or its id on the Hub.",
            metavar="SOURCE",
        ),
    ],
    tensors: Annotated[bool, About("List every tensor.")] = False,
    graph: Annotated[bool, About("List every role, the evidence for it, and every other constant.")] = False,
    section: Annotated[
        int | None, About("Describe the TFLite model in this section instead of the drafter.", least=0)
    ] = None,
    against: Annotated[
        str | None,
        About(
            "For a checkpoint: derive every tensor again and compare all bits. For a bundle: a base's checkpoint; says "
            "of every weight of the base whether the bundle holds it.",
            metavar="SOURCE|DIR",
        ),
    ] = None,
    sliding_window: SlidingWindow = None,
    print_json: AsJson = False,
) -> None:
    """Show what a LiteRT bundle holds (only headers are read), or what a checkpoint holds, re-checked."""
    from mtp_extract.io.opening import checkpoint_here

    source = checkpoint_here(source, or_bundle=True)
    is_checkpoint = os.path.isdir(source) or (source.endswith(_SINGLE) and os.path.isfile(source))
    if is_checkpoint or against is not None:
        if wrong := given(context, "graph", "section", "sliding_window"):
            why = "with --against" if against is not None else f"and {escape(source)} is a checkpoint"
            raise typer.BadParameter(
                f"{', '.join(wrong)}: describes a bundle or a model, {why}. Name the file alone, or leave it out."
            )
        if is_checkpoint:
            _checkpoint(Path(source), tensors, against, print_json)
        elif against is not None:
            _hold_against(source, against, print_json)
        return
    if section is not None and graph:
        raise typer.BadParameter("--graph describes the drafter, --section another model. Leave one of them out.")

    from mtp_extract.bundle import open_bundle
    from mtp_extract.pipeline.inspection import inspect

    with progress(quiet=print_json) as tick, open_bundle(source, progress=tick) as opened:
        found = inspect(opened, tensors=tensors, graph=graph, section=section, sliding_window=sliding_window)
    (write_json if print_json else _show)(found.as_json)
    if found.problem is not None:
        raise found.problem


def _hold_against(source: str, directory: str, print_json: bool) -> None:
    """A bundle against a directory: a base's checkpoint, or a drafter's the other way round."""
    if not os.path.isdir(directory):
        raise typer.BadParameter(
            f"--against: a bundle is held against a checkpoint's directory, and {escape(directory)} is none. Name one."
        )
    from mtp_extract.base.checkpoint import holds_drafter
    from mtp_extract.base.comparison import compare_base
    from mtp_extract.bundle import open_bundle

    if holds_drafter(Path(directory)):
        if not print_json:
            say(f"{escape(directory)} is a drafter's checkpoint: it is checked against the drafter of the bundle")
        _checkpoint(Path(directory), False, source, print_json)
        return
    with progress(quiet=print_json) as tick, open_bundle(source, progress=tick) as opened:
        found = compare_base(opened, Path(directory), tick)
    if print_json:
        write_json(found.as_json())
    else:
        _show_comparison(found)
    if found.problem is not None:
        raise found.problem


def _show_comparison(found: BaseComparison) -> None:
    say(f"{escape(found.bundle)}: its base, {found.layers} layers, against the base in {escape(found.checkpoint)}")
    rows = []
    for r in found.roles:
        steps = "-" if r.steps is None else f"{r.steps:.3f}"
        error = "-" if r.error is None else f"{r.error:.2g}"
        rows.append([r.role, r.verdict, ",".join(r.stored) or "-", list(r.shape), steps, error, r.why])
    table(rows, ["role", "verdict", "stored", "shape", "steps", "error", ""])
    say(f"{found.tensors_found} of {found.tensors} tensors found; {len(found.roles)} roles: {_counts(found.counts)}")
    if found.unused:
        say(f"  {len(found.unused)} tensors are K and V of layers that share another's: no model loads them")
    if found.others:
        say(f"  not compared: {', '.join(f'{n} tensors of {escape(part)}' for part, n in found.others.items())}")
    say("  Weights are compared, not what the graphs compute with them.")


def _checkpoint(place: Path, tensors: bool, against: str | None, print_json: bool) -> None:
    from mtp_extract.bundle import open_bundle
    from mtp_extract.errors import CheckpointError
    from mtp_extract.pipeline.check import verify, with_record
    from mtp_extract.pipeline.identity import verify_against
    from mtp_extract.pipeline.inspection import inspect_checkpoint
    from mtp_extract.pipeline.staging import RECORD
    from mtp_extract.pipeline.unexpected import require_manifest
    from mtp_extract.report.files import REPORT_FILES

    place = with_record(place)
    result: Verification | None = None
    if against is not None:
        with progress(quiet=print_json) as tick, open_bundle(against, progress=tick) as opened:
            result = verify_against(place, opened, REPORT_FILES)
    elif (place / RECORD).exists():
        result = verify(place, REPORT_FILES)
    found = inspect_checkpoint(place, tensors=tensors)
    wrong = sum(finding["is_error"] for finding in found.get("findings", ()))
    if print_json:
        write_json(
            {
                "directory": str(place),
                "files": result.files if result else None,
                "tensors": found["weights"],
                "against": result.against if result else None,
                "checks": [asdict(check) for check in result.checks] if result else [],
                "ok": not wrong,
                "extraction": (result.record or None) if result else None,
                "holds": found,
            }
        )
    else:
        _show_checkpoint(place, found, result)
    if wrong:
        raise CheckpointError(
            f"{escape(place)}: expected nothing that an engine takes otherwise without a word, found {wrong}. "
            "Convert it, or change its config as said."
        )
    if result is None:
        require_manifest(place, REPORT_FILES)


def _show_checkpoint(place: Path, found: Mapping[str, Any], result: Verification | None) -> None:
    if result is not None and result.record:
        record = result.record
        say(f"{escape(place)}: {result.files} files match extraction.json")
        tool = f"{escape(record['tool'].get('name'))} {escape(record['tool'].get('version'))}"
        what = "converted" if record.get("converted_from") else "extracted"
        say(f"  {what} from {escape(record['source'].get('name'))} by {tool}")
        for line in _made(record):
            say(f"  {line}")
    else:
        say(f"{escape(place)}: without extraction.json")
    if result is None or result.against is None:
        say("  Not compared with a bundle (use --against BUNDLE).")
    else:
        say(f"  derived from {escape(result.against)} again:")
        for check in result.checks:
            say(f"    {check.name}: {escape(check.evidence)}")
    say_geometry(found["geometry"], found["parameters"])
    say(f"  {found['format']} format: {found['weights']} weights ({_counts(found['stored_types'])})")
    for finding in found.get("findings", ()):
        say(f"  {finding['engine']} {finding['effect']}: {finding['what']}")
    if "tensors" in found:
        say("Tensors")
        rows = [[t["role"], t["type"], t["shape"], _blocks(t), t["name"]] for t in found["tensors"]]
        table(rows, ["role", "stored", "shape", "scales", "name"])


def _made(record: Mapping[str, Any]) -> Iterator[str]:
    """What was made of the drafter since it left its bundle."""
    for key, what in (("tuning", "tuned"), ("ordered_head", "given an ordered head")):
        if made := record.get(key):
            before, after = (made["overall"][when]["teacher_forced"] for when in ("before", "after"))
            kept = min((kind["share"] for kind in made.get("kinds", {}).values()), default=0.0)
            how = made.get("mode", f"keeps {kept:.2%} of its choices or more")
            lengths = f"teacher-forced tokens per round {before:.3f}, then {after:.3f}"
            yield f"{what} ({escape(how)}) beside {escape(made['base'])}: {lengths}"


def headline(report: Mapping[str, Any]) -> str:
    """What a file is, and whether it holds a drafter, in one line; ``report`` as ``inspect`` makes it."""
    version = f" {report['version']}" if report["version"] else ""
    known = f", {report['known_bundle']}" if report["known_bundle"] else ""
    what = f"{report['name']}: {report['kind']}{version}, {size(report['size'])}{known}"
    if "model" in report:
        return what
    if (drafter := report["drafter"]) is None:
        return f"{what}; holds {'no drafter' if 'no_drafter' in report else 'a drafter that cannot be extracted'}"
    base = drafter["base_model"] or "a base that is not known"
    return f"{what}; holds the {drafter['known_as'] or 'MTP'} drafter for {base}"


def _show(report: Mapping[str, Any]) -> None:
    say_all(headline(report))
    table([[k, v] for k, v in report["items"].items()])
    if report["sections"]:
        say(f"{len(report['sections'])} sections")
        rows = [
            [s["index"], s["type"], s["model_type"] or "", s["begin"], s["size"], _items(s["items"])]
            for s in report["sections"]
        ]
        table(rows, ["#", "type", "model type", "begin", "bytes", "items"])
    if "model" in report:
        _show_model(report["model"])
    elif report["drafter"] is not None:
        _show_drafter(report["drafter"])
    elif "no_drafter" in report:
        say(f"No drafter: {report['no_drafter']}")


def _items(items: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in items.items() if k != "model_type")


def _show_drafter(drafter: Mapping[str, Any]) -> None:
    name = drafter["known_as"] or "MTP"
    say(f"{name} drafter: {found_in(drafter['section'], drafter['found_by'])}, {size(drafter['size'])}")
    say_geometry(drafter["geometry"], drafter["parameters"])
    say(
        f"  {drafter['roles_found']} roles ({_counts(drafter['stored_types'])}), {drafter['names_confirmed']} "
        f"confirmed by published names; {drafter['set_aside_count']} other constants, each with its reason"
    )
    _show_model(drafter["model"])
    if "roles" in drafter:
        say("Roles")
        rows = [
            [r["role"], r["type"] or "implied", r["shape"], "yes" if r["name_confirms"] else "-", r["why"]]
            for r in drafter["roles"]
        ]
        table(rows, ["role", "stored", "shape", "name", "evidence"])
        say("Caches of the base model")
        rows = [
            [name, c["dtype"], c["shape"], c["scale"] or "-", "layers " + ",".join(map(str, c["layers"]))]
            for name, c in drafter["kv_inputs"].items()
        ]
        table(rows, ["input", "type", "shape", "scale", "read by"])
        say_proof("Proof", drafter["proof"])
        scores = ", ".join(f"{score:g}" for score in drafter["proof"]["largest_scores"])
        say(f"  |q · K| of each layer is at most {scores}; hidden slots lie further below than that")
        say("Set aside")
        aside = drafter["set_aside"]
        rows = [[f"{a['subgraph']}/{a['tensor']}", a["dtype"], a["shape"], a["reason"], a["op"]] for a in aside]
        table(rows, ["tensor", "type", "shape", "reason", "read by"])


def _show_model(model: Mapping[str, Any]) -> None:
    say(f"  TFLite model: {model['subgraphs']} subgraphs, {model['operators']} ops, {model['tensors_in_all']} tensors")
    for signature in model["signatures"]:
        say(f"  signature {escape(signature['key'])}")
        for key, indent in (("inputs", "    in   "), ("outputs", "    out  ")):
            table([[name, t["type"], t["shape"]] for name, t in signature[key].items()], indent=indent)
    if "tensors" in model:
        say("Tensors")
        rows = [
            [f"{t['subgraph']}/{t['index']}", t["type"], t["shape"], _bytes(t), _scales(t), t["name"]]
            for t in model["tensors"]
        ]
        table(rows, ["tensor", "type", "shape", "bytes", "quantization", "name"])


def _bytes(tensor: Mapping[str, Any]) -> str:
    data = tensor["data"]
    if not data:
        return ""
    return "unreadable" if "problem" in data else str(data["length"])


def _scales(tensor: Mapping[str, Any]) -> str:
    made = tensor["quantization"]
    if not made:
        return ""
    return _blocks(made) or (f"{made['scales']} scales, axis {made['axis']}" if made["scales"] else "")


def _blocks(made: Mapping[str, Any]) -> str:
    return f"blocks of {made['block_size']}" if made["block_size"] else ""


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


_EXAMPLES = {
    "gemma-4-E4B-it.litertlm": "Its sections and its drafter; only headers are read.",
    "gemma-4-E4B-it-mtp-drafter --against gemma-4-E4B-it.litertlm": "Whether all bits are those of the bundle.",
}

app = new_app(command, _EXAMPLES)
main = partial(run_lean, app)

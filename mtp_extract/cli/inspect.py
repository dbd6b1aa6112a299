"""``mtp-inspect``: what a bundle holds, whether it holds a checkpoint, or whether a checkpoint is what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_extract.cli._command import AsJson, program
from mtp_extract.cli._written import found_in, say_geometry, say_proof
from mtp_extract.cli.terminal import progress, say, say_all, size, table, write_json
from mtp_extract.errors import escape, several

if TYPE_CHECKING:
    from mtp_extract.insertion.comparison import BaseComparison


def command(
    *,
    source: Annotated[
        str,
        typer.Argument(
            help="A .litertlm or a .tflite: a path, ORG/NAME[@REVISION][/FILE] of the Hugging Face Hub, or a URL; or a "
            "checkpoint: a directory of any format, a .gguf, or its id on the Hub.",
            metavar="SOURCE",
        ),
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="List every role, the evidence for it, and every other constant.")
    ] = False,
    section: Annotated[
        int | None,
        typer.Option(help="Describe the TFLite model in this section instead of the drafter.", min=0, metavar="N"),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare a checkpoint with its bundle, bit for bit; or a bundle's base with a base's checkpoint.",
            metavar="SOURCE|DIR",
        ),
    ] = None,
    print_json: AsJson = False,
) -> None:
    """Show what a LiteRT bundle holds (only headers are read), or check and show what a checkpoint holds."""
    if section is not None and graph:
        raise typer.BadParameter("--graph describes the drafter, --section another model. Leave one of them out.")

    from mtp_extract.api import inspect
    from mtp_extract.pipeline.inspection import Inspection

    with progress(quiet=print_json) as tick:
        found = inspect(source, tensors=tensors, graph=graph, section=section, against=against, progress=tick)
    if print_json:
        write_json(found.report if isinstance(found, Inspection) else found.as_json())
    elif not isinstance(found, Inspection):
        _show_comparison(found)
    elif "holds" in found.report:
        _show_checkpoint(found.report)
    else:
        _show_bundle(found.report)
    if found.problem is not None:
        raise found.problem


def _show_comparison(found: BaseComparison) -> None:
    say(f"{escape(found.bundle)}: its base, {found.layers} layers, against the base in {escape(found.checkpoint)}")
    roles = [
        (r.role, r.verdict, ",".join(r.stored) or None, list(r.shape), r.steps, r.error, r.why) for r in found.roles
    ]
    table(roles, ["role", "verdict", "stored", "shape", "steps", "error", "why"])
    say(f"{found.tensors_found} of {found.tensors} tensors found; {len(found.roles)} roles: {_counts(found.counts)}")
    if found.not_loaded:
        say(f"  {len(found.not_loaded)} tensors are K and V of layers that share another's: no model loads them")
    if found.not_compared:
        say(f"  not compared: {', '.join(f'{n} tensors of {escape(part)}' for part, n in found.not_compared.items())}")
    say("  Weights are compared, not what the graphs compute with them.")


def _show_checkpoint(report: Mapping[str, Any]) -> None:
    holds, place = report["holds"], escape(report["directory"])
    if record := report["extraction"]:
        say(f"{place}: {several(report['files'], 'file')} as recorded in extraction.json")
        tool = f"{escape(record['tool'].get('name'))} {escape(record['tool'].get('version'))}"
        what = "converted" if record.get("converted_from") else "extracted"
        say(f"  {what} from {escape(record['source'].get('name'))} by {tool}")
        for key, what in (("tuning", "tuned"), ("ordered_head", "given an ordered head")):
            if made := record.get(key):
                ratio, texts = made["overall"]["rounds"]["ratio"], made["overall"]["texts"]
                mode = f" ({escape(made['mode'])})" if "mode" in made else ""
                gain = f"{ratio:.3f} times the tokens per round on {texts} held-out texts"
                say(f"  {what}{mode} beside {escape(made['base'])}: {gain}")
    else:
        say(f"{place}: without extraction.json")
    if report["against"] is None:
        say("  Not compared with a bundle (use --against BUNDLE).")
    else:
        say(f"  derived from {escape(report['against'])} again:")
        for check in report["checks"]:
            say(f"    {check['name']}: {escape(check['evidence'])}")
    say_geometry(holds["geometry"], holds["parameters"])
    say(f"  {holds['format']} format: {holds['weights']} weights ({_counts(holds['stored_types'])})")
    for finding in holds.get("findings", ()):
        say(f"  {finding['engine']} loads it wrongly: {finding['what']}")
    if "tensors" in holds:
        tensors = [{**tensor, "scales": _blocks(tensor)} for tensor in holds["tensors"]]
        _listed("Tensors", tensors, role="role", stored="type", shape="shape", scales="scales", name="name")


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


def _show_bundle(report: Mapping[str, Any]) -> None:
    say_all(headline(report))
    table(list(report["items"].items()))
    if sections := report["sections"]:
        shown = []
        for one in sections:
            items = ", ".join(f"{key}={value}" for key, value in one["items"].items() if key != "model_type")
            shown.append({**one, "items": items})
        columns = {"#": "index", "type": "type", "model type": "model_type", "begin": "begin", "bytes": "size"}
        _listed(f"{len(sections)} sections", shown, **columns, items="items")
    if "model" in report:
        _show_model(report["model"])
    elif report["drafter"] is not None:
        _show_drafter(report["drafter"])
    elif "no_drafter" in report:
        say(f"No drafter: {report['no_drafter']}")


def _show_drafter(drafter: Mapping[str, Any]) -> None:
    where = found_in(drafter["section"], drafter["found_by"])
    say(f"{drafter['known_as'] or 'MTP'} drafter: {where}, {size(drafter['size'])}")
    say_geometry(drafter["geometry"], drafter["parameters"])
    say(
        f"  {drafter['roles_found']} roles ({_counts(drafter['stored_types'])}), {drafter['names_confirmed']} "
        f"confirmed by published names; {drafter['set_aside_count']} other constants (--graph)"
    )
    _show_model(drafter["model"])
    if "roles" not in drafter:
        return

    from mtp_extract.proof.proof import in_words

    columns = {"role": "role", "stored": "type", "shape": "shape", "name": "name_confirms", "evidence": "why"}
    _listed("Roles", drafter["roles"], **columns)
    caches = [{"input": name, **cache} for name, cache in drafter["kv_inputs"].items()]
    columns = {"input": "input", "type": "dtype", "shape": "shape", "scale": "scale", "read by layers": "layers"}
    _listed("Caches of the base model", caches, **columns)
    say_proof("Proof", in_words(drafter["proof"]))
    scores = ", ".join(f"{score:g}" for score in drafter["proof"]["largest_scores"])
    say(f"  |q · K| of each layer is at most {scores}; hidden slots lie further below than that")
    columns = {"graph": "subgraph", "tensor": "tensor", "type": "dtype", "shape": "shape", "reason": "reason"}
    _listed("Other constants", drafter["set_aside"], **columns, **{"read by": "op"})


def _show_model(model: Mapping[str, Any]) -> None:
    say(f"  TFLite model: {model['subgraphs']} subgraphs, {model['operators']} ops, {model['tensors_in_all']} tensors")
    for signature in model["signatures"]:
        say(f"  signature {escape(signature['key'])}")
        for key, indent in (("inputs", "    in   "), ("outputs", "    out  ")):
            table([[name, t["type"], t["shape"]] for name, t in signature[key].items()], indent=indent)
    if "tensors" not in model:
        return
    shown = []
    for tensor in model["tensors"]:
        data, made = tensor["data"] or {"length": None}, tensor["quantization"] or {"block_size": 0, "scales": 0}
        scales = _blocks(made) or (f"{made['scales']} scales, axis {made['axis']}" if made["scales"] else None)
        shown.append({**tensor, "bytes": data.get("length", "unreadable"), "scales": scales})
    columns = {"graph": "subgraph", "tensor": "index", "type": "type", "shape": "shape", "bytes": "bytes"}
    _listed("Tensors", shown, **columns, quantization="scales", name="name")


def _listed(title: str, entries: Sequence[Mapping[str, Any]], **columns: str) -> None:
    """A table: by the title of a column, what of each entry it shows."""
    say(title)
    table([[entry[key] for key in columns.values()] for entry in entries], list(columns))


def _blocks(made: Mapping[str, Any]) -> str | None:
    return f"blocks of {made['block_size']}" if made["block_size"] else None


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


_EXAMPLES = {
    "mtp-inspect gemma-4-E4B-it.litertlm": "Shows its sections and its drafter.",
    "mtp-inspect gemma-4-E4B-it-mtp-drafter --against gemma-4-E4B-it.litertlm": "Compares every bit with the bundle.",
}

app, main = program(command, _EXAMPLES, is_short=True)

"""``mtp-inspect``: show a bundle or a checkpoint, or compare one with the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_extract.architecture import ARCHITECTURES
from mtp_extract.architecture.roles import GEMMA4_MTP
from mtp_extract.cli._command import Version, make_command
from mtp_extract.cli._options import AsJson
from mtp_extract.cli._written import describe_place, say_geometry, say_not_proven, say_proof
from mtp_extract.cli.terminal import TerminalReporter, format_size, say, say_all, say_notes, say_table, write_json
from mtp_extract.errors import escape, format_count
from mtp_extract.formats import find_format_architecture

if TYPE_CHECKING:
    from mtp_extract.insertion.comparison import BaseComparison


def inspect_command(
    *,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A .litertlm or a .tflite: a path, ORG/NAME[@REVISION][/FILE] of the Hugging Face Hub, or a URL; or a "
            "checkpoint: a directory of any format, a .gguf, or its id on the Hub.",
        ),
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    graph: Annotated[
        bool,
        typer.Option(
            "--graph",
            help="List what every operator is read as, up to a refusal; then every role and every other constant.",
        ),
    ] = False,
    skeleton: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.zip",
            help="Write the drafter's section without weights, to attach to an issue; show nothing else.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE|DIR|ORG/NAME",
            help="Compare a checkpoint with its bundle, bit for bit; or a bundle's base with a base's checkpoint.",
        ),
    ] = None,
    print_json: AsJson = False,
    version: Version = False,
) -> None:
    """Show what a LiteRT bundle holds (only headers are read), or check and show what a checkpoint holds."""
    from mtp_extract.api import inspect
    from mtp_extract.pipeline.inspection import Inspection

    if skeleton is not None:
        _write_skeleton(source, skeleton, print_json=print_json)
        return
    with TerminalReporter(quiet=print_json) as reporter:
        result = inspect(source, tensors=tensors, graph=graph, against=against, reporter=reporter)
    if print_json:
        write_json(result.report if isinstance(result, Inspection) else result.as_json())
    elif not isinstance(result, Inspection):
        _show_comparison(result)
    elif "holds" in result.report:
        _show_checkpoint(result.report)
    else:
        _show_bundle(result.report)
    if result.problem is not None:
        raise result.problem


def _write_skeleton(source: str, out: Path, *, print_json: bool) -> None:
    from mtp_extract.pipeline.skeleton import write_skeleton

    written = write_skeleton(source, out)
    if print_json:
        write_json(asdict(written))
        return
    say(f"Wrote {escape(written.path)} ({format_size(written.size)}), which holds no weight of {escape(source)}")
    weights = f"left out: {format_count(written.weights, 'weight')} ({format_size(written.left_out)})"
    say(f"  {weights}" + (f", and {written.doubtful} other constants that may be weights" if written.doubtful else ""))
    say(f"  mtp-inspect {escape(written.path)} --graph reads it as it reads the file.")


def _show_comparison(comparison: BaseComparison) -> None:
    bundle = f"{escape(comparison.bundle)}: its base, {comparison.layers} layers"
    say(f"{bundle}, against the base in {escape(comparison.checkpoint)}")
    roles = [
        (r.role, r.verdict, ",".join(r.stored) or None, list(r.shape), r.steps, r.error, r.why)
        for r in comparison.roles
    ]
    say_table(roles, ["role", "verdict", "stored", "shape", "steps", "error", "why"])
    say(f"{len(comparison.roles)} roles: {_format_counts(comparison.counts)}")
    if comparison.not_compared:
        parts = (f"{count} tensors of {escape(part)}" for part, count in comparison.not_compared.items())
        say(f"  not compared: {', '.join(parts)}")
    say("  Weights are compared, not what the graphs compute with them.")
    say_notes(comparison.notes)


def _show_checkpoint(report: Mapping[str, Any]) -> None:
    holds, place = report["holds"], escape(report["directory"])
    if record := report["extraction"]:
        say(f"{place}: {format_count(report['files'], 'file')} as recorded in extraction.json")
        _say_origin(record)
    else:
        say(f"{place}: without extraction.json")
    _say_checks(report)
    say_geometry(find_format_architecture(holds["format"]), holds["geometry"], holds["parameters"])
    weights = format_count(holds["weights"], "weight")
    say(f"  {holds['format']} format: {weights} ({_format_counts(holds['stored_types'])})")
    for finding in holds["findings"]:
        say(f"  {finding['engine']} loads it wrongly: {finding['what']}")
    say_notes(report["notes"])
    if "tensors" in holds:
        _list("Tensors", holds["tensors"], "role", "type", "shape", "name")


def _say_origin(record: Mapping[str, Any]) -> None:
    """Print where the drafter comes from, and what was done to it since; both by its record."""
    action = "converted" if record["converted_from"] else "extracted"
    tool = f"{escape(record['tool']['name'])} {escape(record['tool']['version'])}"
    say(f"  {action} from {escape(record['source']['name'])} by {tool}")
    for key, change_in_words in (("tuning", "tuned"), ("ordered_head", "given an ordered head")):
        if change := record.get(key):
            overall = change["overall"]
            gain = f"{overall['rounds']['ratio']:.3f} times the tokens per round on {overall['texts']} held-out texts"
            say(f"  {change_in_words} beside {escape(change['base'])}: {gain}")
    if record.get("not_proven"):
        say_not_proven(record, indent="  ")


def _say_checks(report: Mapping[str, Any]) -> None:
    """Print the checks of a directory whose tensors were derived from the bundle again."""
    if report["against"] is None:
        say("  Not compared with a bundle (use --against BUNDLE).")
    else:
        say(f"  derived from {escape(report['against'])} again:")
        for check in report["checks"]:
            say_all(f"    {check['name']}: {check['evidence']}")
        if (compared := report["against_published"]) is not None:
            say(f"  {_describe_published(compared)}")


def _describe_published(compared: Mapping[str, Any]) -> str:
    """Describe which published file the bundle is, by its SHA-256, which was computed."""
    published = compared["published"]
    if published is None:
        return f"the bundle's SHA-256 is what the Hub states: {compared['sha256']}"
    file = f"{published['repository']}/{published['file']} ({published['note']})"
    if compared["is_published"]:
        return f"the bundle is {file}, by its SHA-256, for {published['base_model']}"
    return (
        f"the bundle has the size of {file} and another SHA-256, {compared['sha256']}: it was changed, or not "
        "downloaded completely"
    )


def _show_bundle(report: Mapping[str, Any]) -> None:
    version = f" {report['version']}" if report["version"] else ""
    published = f", {report['known_bundle']}" if report["known_bundle"] else ""
    kind = f"{report['kind']}{version}, {format_size(report['size'])}{published}"
    say_all(f"{report['name']}: {kind}; holds {_describe_drafter(report)}")
    say_table(list(report["items"].items()))
    if sections := report["sections"]:
        entries = [section | {"items": {**section["items"], "model_type": None}} for section in sections]
        _list(f"{len(sections)} sections", entries, "index", "type", "model_type", "begin", "size", "items")
    if trace := report.get("trace"):
        _show_trace(trace)
    if "model" in report:
        _list_tensors(report["model"])
    if (drafter := report["drafter"]) is not None:
        _show_drafter(drafter, is_skeleton=report["kind"] == "skeleton")
    elif "no_drafter" in report:
        say(f"No drafter: {report['no_drafter']}")


def _describe_drafter(report: Mapping[str, Any]) -> str:
    """Describe the drafter of a bundle and its base; or that there is none."""
    if (drafter := report["drafter"]) is None:
        return "no drafter" if "no_drafter" in report else "a drafter that cannot be extracted"
    base = drafter["base_model"]
    return f"the drafter for {base}" if base else f"an {_name_by_shape(drafter)}; its base is not said"


def _name_by_shape(drafter: Mapping[str, Any]) -> str:
    """Name a drafter by its shape, if that is known; a shape does not tell the base."""
    return f"MTP drafter of {drafter['known_as']}'s shape" if drafter["known_as"] else "MTP drafter"


def _show_drafter(drafter: Mapping[str, Any], *, is_skeleton: bool) -> None:
    from mtp_extract.proof.grids import describe_rounding

    place = describe_place(drafter["section"], drafter["found_by"])
    model = drafter["model"]
    say(f"{_name_by_shape(drafter)}: {place}, {format_size(drafter['size'])}")
    say_geometry(ARCHITECTURES[GEMMA4_MTP], drafter["geometry"], drafter["parameters"])
    say(
        f"  {drafter['roles_found']} roles ({_format_counts(drafter['stored_types'])}), {drafter['names_confirmed']} "
        f"confirmed by published names; {drafter['set_aside_count']} other constants (--graph)"
    )
    if rounded := describe_rounding(drafter["rounded_activations"], ranges=True):
        say(f"  {rounded}")
    if not drafter["layer_scalars"]:
        say("  no layer scalars in its graph, as in Google's files of April 2026: each is 1")
    say(f"  TFLite model: {model['subgraphs']} subgraphs, {model['operators']} ops, {model['tensors_in_all']} tensors")
    for signature in model["signatures"]:
        say(f"  signature {escape(signature['key'])}")
        for key, indent in (("inputs", "    in   "), ("outputs", "    out  ")):
            say_table([[name, t["type"], t["shape"]] for name, t in signature[key].items()], indent=indent)
    if "tensors" in model:
        _list_tensors(model)
    if "roles" in drafter:
        _show_roles(drafter, is_skeleton=is_skeleton)


def _show_roles(drafter: Mapping[str, Any], *, is_skeleton: bool) -> None:
    """Print the role of every constant with its reason, the proof, and the other constants."""
    from mtp_extract.proof.proof import describe_proof

    _list("Roles", drafter["roles"], "role", "type", "shape", "name_confirms", "why")
    claim = "What a proof would say (of a skeleton, whose weights are left out)" if is_skeleton else "Proof"
    say_proof(claim, describe_proof(drafter["proof"]))
    _list("Other constants", drafter["set_aside"], "subgraph", "index", "type", "shape", "reason", "op")


def _list_tensors(model: Mapping[str, Any]) -> None:
    _list("Tensors", model["tensors"], "subgraph", "index", "type", "shape", "data", "quantization", "name")


def _show_trace(trace: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per operator, by its number in the main graph, or SUBGRAPH:OPERATOR."""
    say(f"{len(trace)} values, in the order of the graph")
    rows = []
    for line in trace:
        place = f"{line['subgraph']}:{line['op']}" if line["subgraph"] else str(line["op"])
        shape = str(list(line["shape"])).replace(" ", "")
        rows.append((place, line["kind"], line["read_as"], shape, line["what"]))
    say_table(rows, ["op", "operator", "read as", "shape", "what"])


def _list(title: str, entries: Sequence[Mapping[str, Any]], *columns: str) -> None:
    """Print a table of the fields ``columns`` of each entry."""
    say(title)
    say_table(
        [[entry[column] for column in columns] for entry in entries], [name.replace("_", " ") for name in columns]
    )


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


_EXAMPLES = {
    "mtp-inspect gemma-4-E4B-it.litertlm": "Shows its sections and its drafter.",
    "mtp-inspect gemma-4-E4B-it-mtp-drafter --against gemma-4-E4B-it.litertlm": "Compares every bit with the bundle.",
}

app, main = make_command(inspect_command, _EXAMPLES, is_short=True)

"""The one module that prints.

Results go to stdout, errors and progress to stderr. Names read from files are escaped before they reach a terminal;
in JSON they are strings like any other.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mtp_extract.errors import escape

if TYPE_CHECKING:
    from mtp_extract.checkpoint.check import Verification
    from mtp_extract.extraction import ExtractionResult
    from mtp_extract.hub.upload import UploadResult

__all__ = [
    "error",
    "extraction",
    "inspection",
    "progress",
    "say",
    "size",
    "table",
    "upload",
    "verification",
    "write_json",
]

_FASTEST_REDRAW = 0.1
_WORTH_SHOWING = 1 << 26


def say(text: str = "") -> None:
    """A line on stdout."""
    data = (text + "\n").encode(sys.stdout.encoding or "utf-8", "replace")
    sys.stdout.write(data.decode(sys.stdout.encoding or "utf-8"))


def write_json(value: Any) -> None:
    """``value`` as JSON on stdout."""
    say(json.dumps(value, indent=2, ensure_ascii=True, default=str))


def error(message: str) -> None:
    """An error on stderr."""
    sys.stdout.flush()
    sys.stderr.write(
        f"error: {message}\n".encode("ascii" if not sys.stderr.encoding else sys.stderr.encoding, "replace").decode(
            sys.stderr.encoding or "ascii"
        )
    )
    sys.stderr.flush()


def size(count: float) -> str:
    """A number of bytes for people: 45.1 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def table(rows: Sequence[Sequence[object]], head: Sequence[str] = (), indent: str = "  ") -> None:
    """``rows`` in columns; numbers to the right."""
    if not rows:
        return
    cells = [[escape(c) for c in row] for row in rows]
    shown = [list(head), *cells] if head else cells
    widths = [max(len(row[i]) for row in shown) for i in range(len(cells[0]))]
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(rows[0]))]
    for row in shown:
        columns = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        say((indent + "  ".join(columns)).rstrip())


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress line on stderr, on a terminal and for work worth showing."""
    shown = False
    last = 0.0
    lock = threading.Lock()
    active = not quiet and sys.stderr.isatty()

    def update(done: int, total: int) -> None:
        nonlocal shown, last
        if not active or total < _WORTH_SHOWING:
            return
        with lock:
            now = time.monotonic()
            if now - last < _FASTEST_REDRAW and done < total:
                return
            last, shown = now, True
            sys.stderr.write(f"\r  {size(done)} of {size(total)} ({100 * done // total} %) ")
            sys.stderr.flush()

    try:
        yield update
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _layers(geometry: Mapping[str, Any]) -> str:
    types = geometry["layer_types"]
    sliding, full = types.count("sliding_attention"), types.count("full_attention")
    parts = [f"{sliding} sliding (window {geometry['sliding_window']})"] if sliding else []
    parts += [f"{full} full"] if full else []
    return f"{geometry['num_layers']} layers: " + " + ".join(parts)


def _shape(geometry: Mapping[str, Any], parameters: int) -> list[str]:
    cap = geometry["final_logit_softcap"]
    dims = "/".join(str(d) for d in sorted(set(geometry["head_dims"])))
    kv = "/".join(str(k) for k in sorted(set(geometry["num_kv_heads"])))
    return [
        f"{parameters / 1e6:.2f} M parameters, {_layers(geometry)}, {geometry['num_heads']} heads of {dims}, "
        f"{kv} KV heads",
        f"hidden {geometry['hidden_size']}, feed-forward {geometry['intermediate_size']}, backbone "
        f"{geometry['backbone_hidden_size']}, vocabulary {geometry['vocab_size']}, "
        + (f"soft cap {cap:g}" if cap else "no soft cap"),
    ]


def _found_in(section: int | None, found_by: str) -> str:
    where = f"section {section}, " if section is not None else ""
    return f"{where}found by {found_by}" if found_by != "bare model" else "a bare model"


def extraction(result: ExtractionResult, as_json: bool) -> None:
    """What ``mtp-extract`` did."""
    record = result.record
    if as_json:
        write_json(
            {
                "directory": str(result.directory),
                "files": result.files,
                "notes": result.notes,
                "extraction": record,
            }
        )
        return
    tensors = record["tensors"].values()
    source, section = record["source"], record["source"]["section"]
    parameters = 0
    kinds: dict[str, int] = {}
    for entry in tensors:
        parameters += math.prod(entry["shape"])
        kind = entry["source"]["dtype"] if entry["source"] else "implied"
        kinds[kind] = kinds.get(kind, 0) + 1
    confirmed = sum(entry["name_confirms"] for entry in tensors)
    name = record["known_as"] or "MTP"
    say(f"{name} drafter of {escape(source['name'])} ({_found_in(section['index'], section['found_by'])})")
    for line in _shape(record["geometry"], parameters):
        say(f"  {line}")
    stored = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    say(
        f"  {len(tensors)} tensors from the graph ({stored}), {confirmed} confirmed by published names; "
        f"{len(record['set_aside'])} other constants set aside, each with its reason"
    )
    written = f"{record['layout']} layout, {record['dtype'].upper()}"
    say(f"Wrote {escape(result.directory)}/ ({written}), read back and compared")
    table([[n, size(s)] for n, s in result.files.items()])
    for note in result.notes:
        say(f"Note: {note}")
    if record["layout"] == "transformers":
        say(f"Load it: AutoModelForCausalLM.from_pretrained({str(result.directory)!r}). Its README.md shows engines.")


def inspection(report: Mapping[str, Any], as_json: bool) -> None:
    """What ``mtp-inspect`` found in a file."""
    if as_json:
        write_json(report)
        return
    version = f" {report['version']}" if report["version"] else ""
    known = f", {report['known_bundle']}" if report["known_bundle"] else ""
    say(f"{report['name']}: {report['kind']}{version}, {size(report['size'])}{known}")
    table([[k, v] for k, v in report["items"].items()])
    if report["sections"]:
        say(f"{len(report['sections'])} sections")
        rows = [
            [s["index"], s["type"], s["model_type"] or "", s["begin"], s["size"], _items(s["items"])]
            for s in report["sections"]
        ]
        table(rows, ["#", "type", "model type", "begin", "bytes", "items"])
    if "model" in report:
        _model(report["model"])
    elif report["drafter"] is not None:
        _drafter(report["drafter"])
    elif "no_drafter" in report:
        say(f"No drafter: {report['no_drafter']}")


def _items(items: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in items.items() if k != "model_type")


def _drafter(drafter: Mapping[str, Any]) -> None:
    name = drafter["known_as"] or "MTP"
    say(f"{name} drafter: {_found_in(drafter['section'], drafter['found_by'])}, {size(drafter['size'])}")
    for line in _shape(drafter["geometry"], drafter["parameters"]):
        say(f"  {line}")
    stored = ", ".join(f"{n} {kind}" for kind, n in drafter["stored_types"].items())
    say(
        f"  {drafter['roles_found']} roles ({stored}), {drafter['names_confirmed']} confirmed by published names; "
        f"{drafter['set_aside_count']} other constants, each with its reason"
    )
    _model(drafter["model"])
    if "roles" in drafter:
        say("Roles")
        rows = [
            [r["role"], r["type"] or "implied", r["shape"], "yes" if r["name_confirms"] else "-", r["why"]]
            for r in drafter["roles"]
        ]
        table(rows, ["role", "stored", "shape", "name", "evidence"])
        say("Caches of the base model")
        caches = drafter["kv_inputs"].items()
        rows = [
            [n, c["dtype"], c["shape"], c["scale"] or "-", "layers " + ",".join(map(str, c["layers"]))]
            for n, c in caches
        ]
        table(rows, ["input", "type", "shape", "scale", "read by"])
        say("Set aside")
        table(
            [
                [f"{a['subgraph']}/{a['tensor']}", a["dtype"], a["shape"], a["reason"], a["op"]]
                for a in drafter["set_aside"]
            ],
            ["tensor", "type", "shape", "reason", "read by"],
        )


def _model(model: Mapping[str, Any]) -> None:
    say(f"  TFLite model: {model['subgraphs']} subgraphs, {model['operators']} ops, {model['tensors_in_all']} tensors")
    for signature in model["signatures"]:
        say(f"  signature {escape(signature['key'])}")
        table([[n, t["type"], t["shape"]] for n, t in signature["inputs"].items()], indent="    in   ")
        table([[n, t["type"], t["shape"]] for n, t in signature["outputs"].items()], indent="    out  ")
    if "tensors" in model:
        say("Tensors")
        rows = [
            [
                f"{t['subgraph']}/{t['index']}",
                t["type"],
                t["shape"],
                _bytes(t["data"]),
                _quantization(t["quantization"]),
                t["name"],
            ]
            for t in model["tensors"]
        ]
        table(rows, ["tensor", "type", "shape", "bytes", "quantization", "name"])


def _bytes(data: Mapping[str, Any] | None) -> str:
    if not data:
        return ""
    return "unreadable" if "problem" in data else f"{data['length']} {data['place']}"


def _quantization(quantization: Mapping[str, Any] | None) -> str:
    if not quantization:
        return ""
    if quantization["block_size"]:
        return f"blocks of {quantization['block_size']}"
    return f"{quantization['scales']} scales, axis {quantization['axis']}" if quantization["scales"] else ""


def verification(result: Verification, as_json: bool) -> None:
    """What ``mtp-inspect DIR`` checked."""
    if as_json:
        write_json(
            {
                "directory": str(result.directory),
                "files": result.files,
                "tensors": result.tensors,
                "against": result.against,
                "ok": True,
                "extraction": result.record,
            }
        )
        return
    say(f"{escape(result.directory)}: {result.files} files and {result.tensors} tensors match extraction.json")
    source = result.record["source"]
    say(
        f"  extracted from {escape(source.get('name'))} by {escape(result.record['tool'].get('name'))} "
        f"{escape(result.record['tool'].get('version'))}"
    )
    if result.against is not None:
        say(f"  every tensor derived again from {result.against}: equal, bit for bit")


def upload(result: UploadResult, as_json: bool) -> None:
    """What ``mtp-upload`` published, or would publish."""
    if as_json:
        write_json(
            {
                "repository": result.repository,
                "url": result.url,
                "commit": result.commit,
                "private": result.private if result.created or result.dry_run else None,
                "dry_run": result.dry_run,
                "created": result.created,
                "sent": result.sent,
                "files": {file.path: {"size": file.size, "sha256": file.sha256} for file in result.files},
            }
        )
        return
    total = size(sum(file.size for file in result.files))
    visibility = "private" if result.private else "public"
    if result.dry_run:
        say(f"Would go to {result.repository} ({visibility} if it is new): {len(result.files)} files, {total}")
    elif result.sent:
        created = f", a new {visibility} repository" if result.created else ""
        say(f"{len(result.sent)} of {len(result.files)} files ({total} in all) sent to {result.repository}{created}")
    else:
        say(f"{result.repository} already holds these {len(result.files)} files ({total}); nothing was sent")
    table([[file.path, size(file.size), file.sha256] for file in result.files], ["file", "size", "SHA-256"])
    if result.dry_run:
        say("Nothing was sent.")
    else:
        say(f"What the Hub holds matches by hash (commit {escape(result.commit)}).")
        say(result.url)


@contextmanager
def steps(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Says on stderr what a long run is doing."""

    def update(doing: str) -> None:
        if not quiet:
            encoding = sys.stderr.encoding or "ascii"
            sys.stderr.write(f"{escape(doing)} …\n".encode(encoding, "replace").decode(encoding))
            sys.stderr.flush()

    yield update


def validation(report: Mapping[str, Any], as_json: bool, directory: object, files: Sequence[str]) -> None:
    """What ``mtp-validate`` measured: the content of ``report.json``, and where the report is, if it was written."""
    if as_json:
        write_json(report)
        return
    say(str(report["verdict"]))
    if report["parity"] is not None:
        _validation_parity(report)
    if report["agreement"] is not None:
        _validation_agreement(report)
    if report["controls"] is not None:
        _validation_controls(report)
    if report["generation"] is not None:
        _validation_generation(report)
    for note in report["notes"]:
        say(f"Note: {escape(note)}")
    if directory is not None:
        say(f"Wrote {escape(directory)}/: {', '.join(files)}")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _share(step: Mapping[str, Any], name: str) -> str:
    value, (low, high) = step[name], step["ci95"][name]
    return "–" if value is None else f"{100 * value:.1f} ({100 * low:.1f}–{100 * high:.1f})"


def _validation_parity(report: Mapping[str, Any]) -> None:
    parity = report["parity"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(parity["matrices"].items()))
    say(f"Parity with Google's interpreter, {escape(report['source'])} (matrices: {kinds})")
    rows = [
        [
            name,
            entry["n"],
            _number(entry["max_abs"], ".2e"),
            _number(entry["max_of_range"], ".1e"),
            _number(entry["cosine"], ".7f"),
            _number(100 * entry["top1"], ".1f"),
            _number(100 * entry["top5"], ".1f"),
        ]
        for name, entry in (
            ("float", parity["float"]),
            ("emulated", parity["emulated"]),
            ("emulated, each rounding its own", parity["emulated_alone"]),
        )
    ]
    table(rows, ["logits", "n", "max abs", "of range", "min cosine", "top-1 %", "top-5 %"])
    weights = parity["weights"]
    say(
        f"  tensors: {weights['exact']} equal to the file's, {weights['rounded']} equal once rounded, "
        f"{len(weights['different'])} different"
    )
    for role in weights["different"]:
        say(f"    {escape(role)}")
    if parity["first_apart"] is not None:
        say(f"  first role apart: {escape(parity['first_apart'])}")


def _validation_agreement(report: Mapping[str, Any]) -> None:
    agreement = report["agreement"]
    counted = f"{agreement['n']} positions of {agreement['texts']} texts"
    say(f"Agreement with {escape(report['base']['name'])}, {counted} (%)")
    rows = [
        [step["step"], *(_share(step, name) for name in ("top1", "top5", "conditional", "unconditional"))]
        for step in agreement["steps"]
    ]
    table(rows, ["step", "top-1", "top-5", "conditional", "unconditional"])
    rows = [
        [escape(name), entry["n"], _share(entry["steps"][0], "top1"), _number(entry["mean_accepted_length"], ".2f")]
        for name, entry in (*agreement["workloads"].items(), ("all", agreement))
    ]
    table(rows, ["workload", "n", "top-1, step 1", "mean accepted length"])


def _validation_controls(report: Mapping[str, Any]) -> None:
    say("Controls, the same positions with one thing broken (%)")
    rows = [
        [name, _share(entry["steps"][0], "top1") if entry["steps"] else "–", entry["standing"] or "–", entry["why"]]
        for name, entry in report["controls"].items()
    ]
    for name, share, standing, why in rows:
        say(f"  {name:<20} {share:<18} {standing:<6} {escape(why)}")


def _validation_generation(report: Mapping[str, Any]) -> None:
    arithmetic = report["arithmetic"]
    say(f"Speculative decoding, times of a batch of one over {arithmetic['timed_prompts']} prompts")
    rows = [
        [
            int(drafts),
            f"{entry['accepted']}/{entry['drafted']}",
            _number(entry["acceptance"], ".3f"),
            _number(entry["mean_accepted_length"], ".2f"),
            f"{entry['identical_prompts']}/{entry['prompts']}",
            _number(entry["base_tokens_per_s"], ".1f"),
            _number(entry["speculative_tokens_per_s"], ".1f"),
            _number(entry["verify_ms"], ".2f"),
            _number(entry["draft_ms"], ".2f"),
        ]
        for drafts, entry in report["generation"].items()
    ]
    head = ["K", "accepted", "rate", "mean length", "identical", "base tok/s", "spec tok/s", "verify ms", "draft ms"]
    table(rows, head)
    say(
        f"  the base alone: {_number(arithmetic['base_ms'], '.2f')} ms a token; worth most by the arithmetic: "
        f"K = {arithmetic['best_draft_steps']}, {_number(arithmetic['predicted_speedup'], '.2f')}×"
    )


__all__ += ["steps", "validation"]

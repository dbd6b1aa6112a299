"""``mtp-bench``: how fast a running server is, with and without its drafter, and what comes of the drafts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from mtp_extract.bench.plan import BenchPlan
from mtp_extract.cli._options import AsJson, OverwriteReport
from mtp_extract.cli._run import new_app, run
from mtp_extract.cli.terminal import doing_unless, progress_of, say, say_all, say_notes, table, write_json
from mtp_extract.errors import escape
from mtp_extract.options import About


def command(
    plan: BenchPlan,
    out: Annotated[
        Path | None, About("Write bench.json and pages of it there.", names=("--report",), metavar="DIR")
    ] = None,
    save: Annotated[
        Path | None, About("Write the server's figures in the JSON of vllm bench serve too.", metavar="FILE")
    ] = None,
    overwrite: OverwriteReport = False,
    print_json: AsJson = False,
) -> None:
    """Measure a running server: vLLM, SGLang, llama-server, mlx-vlm's, or any that speaks OpenAI's protocol.

    Tokens/s with its drafter, and without where --baseline names a server that has none; drafts and accepted drafts by
    the server's own counters.
    """
    from mtp_extract.bench.report import BENCH_LISTED, as_json, tables, write_bench
    from mtp_extract.bench.run import run_benchmark
    from mtp_extract.bench.vllm import write_vllm
    from mtp_extract.io.place import check_place

    if out is not None:
        check_place(out, overwrite=overwrite, inputs=(plan.prompts,), listed=BENCH_LISTED)
    if save is not None:
        check_place(save, overwrite=overwrite, inputs=(plan.prompts,))
    with progress_of("window", print_json) as show:
        found = run_benchmark(plan, doing_unless(print_json), show)
    files = write_bench(found, out, overwrite=overwrite, inputs=(plan.prompts,)) if out is not None else []
    report = as_json(found)
    if save is not None:
        write_vllm(report, save, overwrite=overwrite, inputs=(plan.prompts,))
    if print_json:
        write_json(report)
        return
    say_all(report["verdict"])
    for finding in report["findings"]:
        say_all(f"Finding: {finding}")
    for part in tables(report):
        say(part.title)
        table(part.rows, part.columns)
    say_notes(report["notes"])
    if save is not None:
        say(f"Wrote {escape(save)}")
    if files:
        say(f"Wrote {escape(out)}/: {', '.join(files)}")


_EXAMPLES = {
    "http://localhost:8000 --baseline http://localhost:8001": "A server with its drafter, against one without.",
    "http://localhost:8000 --concurrency 8 --report bench": "Eight requests at a time; tables and pages in bench/.",
}

app = new_app(command, _EXAMPLES)
main = partial(run, app)

"""``mtp-bench``: how fast a running server is, with and without its drafter, and what comes of the drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from mtp_extract.cli._run import AsJson, new_app, run
from mtp_extract.cli.terminal import doing, say, say_all, table, write_json
from mtp_extract.errors import escape

app = new_app()


@app.command()
def command(
    url: Annotated[str, typer.Argument(metavar="URL", help="An OpenAI-compatible server: http://localhost:8000.")],
    baseline: Annotated[
        Optional[str],  # noqa: UP045 - typer reads the annotation at run time, on Python 3.10 too
        typer.Option(metavar="URL", help="The same server started without a drafter; asked in turn with the first."),
    ] = None,
    prompts: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="FILE", help='JSON {"workload": ["prompt", …]}, or one a line; by default about 100 of ours.'
        ),
    ] = None,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="As the server calls it; needed where it serves several."),
    ] = None,
    api_key_env: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="VARIABLE", help="The environment variable that holds the servers' key."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy; then texts are compared.")] = 0.0,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at a time, in groups.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, help="How often each prompt is asked.")] = 1,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests to each server that are not measured.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds an answer may take.")] = 300.0,
    chat_template: Annotated[
        bool, typer.Option("--chat-template/--no-chat-template", help="Send prompts as chats, or to be continued.")
    ] = True,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--report", metavar="DIR", help="Write bench.json and pages of it there."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older report.")] = False,
    print_json: AsJson = False,
) -> None:
    """Measure a running server: vLLM, SGLang, llama-server, mlx-vlm's, or any that speaks OpenAI's protocol.

    Tokens/s with its drafter, and without where --baseline names a server that has none; drafts and accepted drafts by
    the server's own counters. What a server does not tell is called "not told".
    """
    from mtp_extract.bench.report import BENCH_LISTED, as_json, tables, write_bench
    from mtp_extract.bench.run import BenchPlan, run_benchmark
    from mtp_extract.bench.server import key_from
    from mtp_extract.io.place import check_place

    if out is not None:
        check_place(out, overwrite=overwrite, inputs=(prompts,), listed=BENCH_LISTED)
    plan = BenchPlan(
        url,
        baseline=baseline,
        prompts=prompts,
        model=model,
        key=key_from(api_key_env) if api_key_env else None,
        max_tokens=max_tokens,
        temperature=temperature,
        concurrency=concurrency,
        repeat=repeat,
        warm_up=warm_up,
        timeout=timeout,
        chat_template=chat_template,
    )
    found = run_benchmark(plan, (lambda what: None) if print_json else doing)
    files = write_bench(found, out, overwrite=overwrite, inputs=(prompts,)) if out is not None else []
    report = as_json(found)
    if print_json:
        write_json(report)
        return
    say_all(report["verdict"])
    for finding in report["findings"]:
        say_all(f"Finding: {finding}")
    for part in tables(report):
        say(part.title)
        table(part.rows, part.columns)
    for note in report["notes"]:
        say_all(f"Note: {note}")
    if files:
        say(f"Wrote {escape(out)}/: {', '.join(files)}")


def main() -> None:
    """Entry point."""
    run(app)

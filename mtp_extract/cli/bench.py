"""``mtp-bench``: measure a running server with and without its drafter."""

from __future__ import annotations

from typing import Annotated

import typer

from mtp_extract.cli._command import Version, make_command
from mtp_extract.cli._options import ApiKey, AsJson, Prompts, ServedModel
from mtp_extract.cli.terminal import TerminalReporter, say_report
from mtp_extract.serving.plan import BenchPlan


def bench_command(
    *,
    url: Annotated[str, typer.Argument(metavar="URL", help="An OpenAI-compatible server: http://localhost:8000.")],
    baseline: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The same server started without a drafter, asked in turn with the first."),
    ] = None,
    prompts: Prompts = None,
    model: ServedModel = None,
    key: ApiKey = None,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, metavar="X", help="Temperature; at 0 texts are compared.")] = 0.0,
    concurrency: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Requests in flight at a time.")] = 1,
    chat_template: Annotated[bool, typer.Option(help="Send prompts as chats, or as text to be continued.")] = True,
    print_json: AsJson = False,
    version: Version = False,
) -> None:
    """Measure a running server: vLLM, SGLang, llama-server, mlx-vlm's, or any that speaks OpenAI's protocol.

    It prints tokens/s with the drafter, and without it if --baseline names a server that has none; and drafts and
    accepted drafts by the server's own counters. For load tests use vllm bench serve or GuideLLM.
    """
    from mtp_extract.api import bench
    from mtp_extract.serving.result import Benchmark
    from mtp_extract.serving.verdict import build_benchmark_table

    def print_result(benchmark: Benchmark) -> None:
        say_report(benchmark, [build_benchmark_table(benchmark)], as_json=print_json)

    plan = BenchPlan(
        url,
        baseline=baseline,
        prompts=prompts,
        model=model,
        key=key,
        max_tokens=max_tokens,
        temperature=temperature,
        concurrency=concurrency,
        chat_template=chat_template,
    )
    # The verdict is printed after the block, when the bar is gone.
    with TerminalReporter(quiet=print_json, print_result=print_result) as reporter:
        result = bench(plan, reporter)
    print_result(result)


_EXAMPLES = {
    "mtp-bench http://localhost:8000 --baseline http://localhost:8001": "Measures it with its drafter and without.",
    "mtp-bench http://localhost:8000 --concurrency 8 --json": "Sends eight requests at a time; prints all as JSON.",
}

app, main = make_command(bench_command, _EXAMPLES, kept="what was measured until then is above, if anything was")

"""``mtp-bench``: how fast a running server is, with and without its drafter, and what comes of the drafts."""

from __future__ import annotations

from functools import partial
from typing import Any

from click import Argument, FloatRange, IntRange, Option

from mtp_extract.cli._command import Command, run
from mtp_extract.cli._options import API_KEY, AS_JSON, MODEL, PROMPTS
from mtp_extract.cli._reporter import TerminalReporter
from mtp_extract.cli.terminal import say_report, write_json
from mtp_extract.serving.plan import BenchPlan

_OPTIONS = (
    Argument(["url"], metavar="URL", help="An OpenAI-compatible server: http://localhost:8000."),
    Option(
        ["--baseline"], metavar="URL", help="The same server started without a drafter, asked in turn with the first."
    ),
    PROMPTS,
    MODEL,
    API_KEY,
    Option(["--max-tokens"], type=IntRange(1), default=128, metavar="N", help="Most tokens of an answer."),
    Option(
        ["--temperature"], type=FloatRange(0), default=0.0, metavar="X", help="Temperature; at 0 texts are compared."
    ),
    Option(["--concurrency"], type=IntRange(1, 64), default=1, metavar="N", help="Requests in flight at a time."),
    Option(
        ["--chat-template/--no-chat-template"], default=True, help="Send prompts as chats, or as text to be continued."
    ),
    AS_JSON,
)


def bench_command(*, print_json: bool, **values: Any) -> None:
    """Measure a running server: vLLM, SGLang, llama-server, mlx-vlm's, or any that speaks OpenAI's protocol.

    It prints tokens/s with the drafter, and without it if --baseline names a server that has none; and drafts and
    accepted drafts by the server's own counters. For load tests use vllm bench serve or GuideLLM.
    """
    from mtp_extract.api import bench
    from mtp_extract.report.page import plain_json
    from mtp_extract.serving.result import Benchmark
    from mtp_extract.serving.verdict import benchmark_table

    def print_result(benchmark: Benchmark) -> None:
        if print_json:
            write_json(plain_json(benchmark))
        else:
            say_report(plain_json(benchmark), [benchmark_table(benchmark)])

    # Nothing is printed within: the bar is gone when the verdict comes.
    with TerminalReporter(quiet=print_json, print_result=print_result) as reporter:
        result = bench(BenchPlan(**values), reporter)
    print_result(result)


_EXAMPLES = {
    "mtp-bench http://localhost:8000 --baseline http://localhost:8001": "Measures it with its drafter and without.",
    "mtp-bench http://localhost:8000 --concurrency 8 --json": "Sends eight requests at a time; prints all as JSON.",
}

app = Command(bench_command, _OPTIONS, _EXAMPLES)
main = partial(run, app, kept="what was measured until then is above, if anything was")

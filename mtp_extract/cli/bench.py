"""``mtp-bench``: how fast a running server is, with and without its drafter, and what comes of the drafts."""

from __future__ import annotations

from dataclasses import replace

from mtp_extract.cli._command import AsJson, program
from mtp_extract.cli.terminal import doing_unless, progress_lines, say_report, write_json
from mtp_extract.serving.plan import BenchPlan


def bench_command(plan: BenchPlan, print_json: AsJson = False) -> None:
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

    saved = list[Benchmark]()
    try:
        # Nothing is printed within: the bar is gone when the verdict comes.
        with progress_lines(print_json, "window") as show:
            result = bench(replace(plan, say=doing_unless(print_json), show=show, rescue=saved.append))
    except BaseException:
        for measured in saved:
            print_result(measured)
        raise
    print_result(result)


_EXAMPLES = {
    "mtp-bench http://localhost:8000 --baseline http://localhost:8001": "Measures it with its drafter and without.",
    "mtp-bench http://localhost:8000 --concurrency 8 --json": "Sends eight requests at a time; prints all as JSON.",
}

app, main = program(bench_command, _EXAMPLES, kept="what was measured until then is above, if anything was")

"""A benchmark in the JSON that ``vllm bench serve --save-result`` writes, for what reads that.

Keys and units are those of vLLM's ``benchmarks/serve.py``: one server's requests, times in milliseconds where a key
says so, else in seconds. What it has and is not known here is left out; nothing is estimated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_extract.io.place import PathLike, staged

_LATENCIES = ("ttft", "tpot", "itl", "e2el")


def as_vllm(report: Mapping[str, Any], side: str = "server") -> dict[str, Any]:
    """Of a ``bench.json``.

    Args:
        side: ``server`` or ``baseline``.
    """
    settings, of = report["settings"], report["total"][side]
    windows = report["windows"][side]
    duration = sum(window["wall"] for window in windows)
    server = report["servers"][side]
    found = {
        "endpoint_type": "openai-chat" if settings["chat_template"] else "openai",
        "backend": "openai-chat" if settings["chat_template"] else "openai",
        "label": server["kind"],
        "model_id": server["model"],
        "num_prompts": of["requests"],
        "request_rate": "inf" if settings["rate"] is None else settings["rate"],
        "burstiness": 1.0,
        "max_concurrency": settings["concurrency"] if settings["rate"] is None else None,
        "duration": duration,
        "completed": of["requests"],
        "failed": 0,
        "total_output_tokens": of["tokens"],
        "request_throughput": of["request_throughput"],
        "request_goodput": of["request_goodput"],
        "output_throughput": of["output_throughput"],
        "max_concurrent_requests": max(window["in_flight_max"] for window in windows),
    }
    for name in _LATENCIES:
        latency = of[f"{name}_ms"] or {}
        found |= {f"{what}_{name}_ms": latency.get(what) for what in ("mean", "median", "std", "p99")}
    if of["drafted"] and of["rounds"]:
        found |= {
            "spec_decode_acceptance_rate": 100 * of["acceptance"],
            "spec_decode_acceptance_length": of["mean_accepted_length"],
            "spec_decode_num_drafts": of["rounds"],
            "spec_decode_draft_tokens": of["drafted"],
            "spec_decode_accepted_tokens": of["accepted"],
            "spec_decode_per_position_acceptance_rates": of["acceptance_by_position"] or [],
        }
    return {name: value for name, value in found.items() if value is not None}


def write_vllm(report: Mapping[str, Any], path: Path, *, overwrite: bool, inputs: tuple[PathLike | None, ...]) -> None:
    """Write ``bench.json``, as data, to ``path`` in these names.

    Raises:
        OutputError: it cannot be written.
    """
    with staged(path, overwrite=overwrite, inputs=inputs) as stage:
        stage.write_text(json.dumps(as_vllm(report), indent=2) + "\n", encoding="utf-8")

"""Time, memory and bytes of making an ordered head of Gemma 4 E4B's size: 262 144 tokens of width 256.

Synthetic on purpose hard: rows are topics of a Zipf law in 64 dominant dimensions with noise, states are a row, drawn
by another Zipf law, with noise, such that the row is nearly always the dense head's choice; of a third of them any row,
as after random tokens. Shares are of states that nothing was learned from. States are drawn beforehand and are no part
of what is timed; those that the tool makes for every token are. On one CPU thread, twice, each in a process of its
own::

    python scripts/bench_ordered.py
"""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import time

import torch
from torch import Tensor

from mtp_extract.tune.centroids import ranks
from mtp_extract.tune.clusters import cluster_of, means_of
from mtp_extract.tune.made import made_states
from mtp_extract.tune.ordered import Used, build_head

VOCABULARY, WIDTH, CENTROIDS, STATES, HELD = 262_144, 256, 2048, 409_600, 2048
STEPS = 600
LOOKED_INTO = (4, 8, 16, 32, 64, 128)


def zipf(count: int) -> Tensor:
    """Weights of ``count`` things."""
    return 1 / torch.arange(1, count + 1, dtype=torch.float32)


def synthetic(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """The head, and how often each of its tokens is meant."""
    topics = torch.randn(6000, WIDTH, generator=random)
    topics[:, 64:] *= 0.2
    head = topics[torch.multinomial(zipf(6000), VOCABULARY, replacement=True, generator=random)]
    for part in torch.split(head, 1 << 14):
        part.add_(torch.randn(part.shape, generator=random), alpha=0.5)
    return head, zipf(VOCABULARY)[torch.randperm(VOCABULARY, generator=random)]


def drawn(head: Tensor, weights: Tensor, count: int, random: torch.Generator) -> Used:
    """States, with the tokens that they mean."""
    tokens = torch.multinomial(weights, count, replacement=True, generator=random)
    states = torch.empty(count, WIDTH)
    for part, chosen in zip(torch.split(states, 1 << 14), torch.split(tokens, 1 << 14), strict=True):
        torch.randn(part.shape, generator=random, out=part)
        part.mul_(0.7).add_(head[chosen])
    return Used(states, tokens, torch.zeros(count, dtype=torch.long))


def measure() -> dict[str, object]:
    """One making."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    head, weights = synthetic(random)
    even = torch.ones(VOCABULARY)
    used, watched, held = (
        [drawn(head, weights, usual, random), drawn(head, even, count - usual, random)]
        for count, usual in ((STATES, STATES * 2 // 3), (2 * HELD, HELD), (2 * HELD, HELD))
    )
    meant = [torch.cat([(part @ head.T).argmax(1) for part in torch.split(kind.states, 64)]) for kind in held]
    before, began, clock = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), time.monotonic()
    made = made_states(head, used[1], 1, 0, sure=False)
    checked = made_states(head, watched[1], 1, 1, sure=True)
    built = build_head(head, used, made, watched, CENTROIDS, 32, STEPS, 0)
    seconds, wall = time.process_time() - began, time.monotonic() - clock
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The head was overwritten by the vectors that clusters were made of.
    means = means_of(head, built.ordering, CENTROIDS)
    cluster = cluster_of(built.ordering, CENTROIDS)
    judged = {
        "text": (held[0].states, meant[0]),
        "any tokens": (held[1].states, meant[1]),
        "made": (checked.states, checked.choices),
    }

    def kept(name: str, rows: Tensor) -> list[float]:
        states, choices = judged[name]
        rank = ranks(states, rows, cluster[choices])
        return [round(float((rank < top_k).double().mean()), 4) for top_k in LOOKED_INTO]

    digest = hashlib.sha256(built.ordering.numpy().tobytes() + built.learned.centroids.numpy().tobytes())
    return {
        "seconds": seconds,
        "wall": wall,
        "peak": peak * 1024,
        "before": before * 1024,
        "meant": [float((found == kind.choices).double().mean()) for found, kind in zip(meant, held, strict=True)],
        "made": [len(made), len(checked)],
        "kept": {
            f"{name}, {rows}": kept(name, centroids)
            for name in judged
            for rows, centroids in (("means", means), ("learned", built.learned.centroids))
        },
        "step": [built.learned.step, built.learned.done],
        "bytes": digest.hexdigest(),
    }


def main() -> None:
    """Twice, and whether the bytes are the same."""
    if len(sys.argv) > 1:
        print(json.dumps(measure()))
        return
    runs = []
    for number in (1, 2):
        job = subprocess.run([sys.executable, __file__, "one"], check=True, capture_output=True, text=True)
        found = json.loads(job.stdout)
        runs.append(found)
        print(
            f"run {number}: {found['seconds']:.0f} CPU s, {found['wall']:.0f} s, peak {found['peak'] / 1e9:.2f} GB "
            f"(inputs alone {found['before'] / 1e9:.2f}), best after {found['step'][0]} of {found['step'][1]} steps"
        )
    first = runs[0]
    print("the state's token is the dense head's choice: {:.4f} of text, {:.4f} of any tokens".format(*first["meant"]))
    print("states made: {}, and {} that the head is judged by".format(*first["made"]))
    print("| clusters looked into | " + " | ".join(map(str, LOOKED_INTO)) + " |")
    print("| --- |" + " --- |" * len(LOOKED_INTO))
    for name, shares in first["kept"].items():
        print(f"| {name} | " + " | ".join(f"{share:.4f}" for share in shares) + " |")
    print("the same bytes twice" if runs[0]["bytes"] == runs[1]["bytes"] else "OTHER BYTES")


if __name__ == "__main__":
    main()

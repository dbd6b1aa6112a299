"""What the words of tables mean, in a line each, as it stands under every table that has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

WORDS: Mapping[str, str] = {
    "method": "what is drafted a round: a chain, each draft after the one before, or a tree, whose drafts branch",
    "verified": "drafts in one forward of the base, at most",
    "mean length": "tokens a round: drafts that stand, and the base's own token; 1 without a drafter",
    "expected": "the mean length by teacher forcing from every position, no round cut short by a text's end",
    "on other texts": "the mean length on texts that did not choose the tree",
    "predicted speedup": "over the base alone, by mean length and the times of a round and of the base's forward",
    "measured speedup": "over the base alone, in tokens a second, of the texts that were timed one by one",
    "same text": "texts that are what the base alone writes, of all",
    "accepted": "drafts that the base says too, with all before them",
    "drafted": "drafts that were judged",
    "acceptance": "accepted, of all that was drafted",
    "tok/s": "tokens a second with the drafter, one text at a time",
    "tokens/s": "tokens after the first text of an answer, over the time from first text to last event",
    "verify ms": "the base's forward over a round's drafts, one text at a time",
    "draft ms": "the drafter's time",
    "parameters a step": "numbers of the drafter that one step reads",
    "bytes a step": "the same as its directory stores them",
    "bytes once a round": "of an EAGLE-3 head, what fuses the base's states",
    "break-even K": "longest chain tried that is predicted to be faster than the base alone; 0 for none",
    "n": "positions drafted from",
    "inputs": "on which both were run",
    "texts": "texts that count; those that repeat another do not",
    "top-1": "the draft is the base's token",
    "top-5": "the base's token is among the drafter's five likeliest",
    "conditional": "accepted, of those whose predecessors in the round all were",
    "unconditional": "accepted with all before it, of all rounds",
    "below by": "points of top-1 that the drafter is ahead, at the same positions; intervals allow for seven controls",
    "of range": "largest difference, as a share of the output's range",
    "correlation": "mean over the inputs, of the output where it is less",
    "same top token": "inputs at which both have the same largest logit",
    "side": "the server with the drafter, or the one without (baseline)",
    "baseline tokens/s": "the same of the server without a drafter",
    "speedup": "the time that the baseline takes for as many tokens, over the server's",
    "rounds": "forwards of the base that judged drafts",
    "answers counted": "answers of which the server tells the drafts",
    "request throughput": "requests answered in a second",
    "output token throughput": "tokens in a second, of all requests in flight",
    "request goodput": "requests a second that took no longer than wanted",
    "TTFT": "time to first token: from request to first text",
    "TPOT": "time per output token of an answer, after its first text",
    "ITL": "inter-token latency: between two texts, each of one or several tokens",
    "E2EL": "end-to-end latency: from request to the end of the answer",
    "draft step": "the place of a draft in its round",
    "step": "drafts in this place that are accepted, of those whose predecessors in the round all were",
    "loads": "whether the engine takes this directory as it is",
    "log-likelihood": "of the server's counters under the pattern",
    "support": "share of draws of texts in which the pattern is 20 times as likely as any other",
}
"""A column's title, or how it begins, → what it means."""


def explained(columns: Iterable[str]) -> list[tuple[str, str]]:
    """The words among the titles of ``columns``, in their order, each once, with what it means."""
    found = {}
    for column in columns:
        begun = [word for word in WORDS if f"{column},".replace(" ", ",").startswith(f"{word},".replace(" ", ","))]
        if begun:
            word = max(begun, key=len)
            found[word] = WORDS[word]
    return list(found.items())

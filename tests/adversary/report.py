"""A table of what extraction makes of every mutation and rewrite, in both styles.

From the repository: ``PYTHONPATH=.:tests python -m adversary.report [--google] [PART …]``, with parts of
``family/name``. With ``--google`` nothing is extracted: what Google's interpreter computes is held against the sound
drafter, and a case that is not what it says it is, is marked.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from helpers.surgery import STYLES

from adversary.edits import Case
from adversary.judge import APART, SAME, Verdict, changed, try_case
from adversary.mutations import MUTATIONS
from adversary.rewrites import REWRITES


def by_google(case: Case, style: str) -> Verdict | None:
    """Whether the interpreter finds ``case`` to be what it says; None where it does not apply or cannot tell."""
    graph = case.apply(style)
    if graph is None or case.why or case.rounds:
        return None
    graph.tidy()
    try:
        difference = changed(case, style, graph)
    except (RuntimeError, ValueError) as error:
        return Verdict("not run", str(error))
    mutated = case in MUTATIONS
    meant = difference > max(APART, case.rounding) if mutated else difference < max(SAME, case.rounding)
    return Verdict("as meant" if meant else "NOT AS MEANT", "", difference)


def main(wanted: Sequence[str]) -> None:
    """Print a line a case and style, then the counts."""
    judge = by_google if "--google" in wanted else try_case
    wanted = [part for part in wanted if part != "--google"]
    for title, cases in (("mutations", MUTATIONS), ("rewrites", REWRITES)):
        counts: Counter[tuple[str, str]] = Counter()
        for case in cases:
            if wanted and not any(part in case.label for part in wanted):
                continue
            for style in STYLES:
                verdict = judge(case, style)
                if verdict is not None:
                    counts[case.family, verdict.outcome] += 1
                    print(f"{case.label}\t{style}\t{verdict}", flush=True)
        print(f"\n{title}")
        for (family, outcome), count in sorted(counts.items()):
            print(f"  {family:20} {outcome:12} {count}")
        print(f"  {'in all':20} {dict(Counter(outcome for (_, outcome), n in counts.items() for _ in range(n)))}")


if __name__ == "__main__":
    main(sys.argv[1:])

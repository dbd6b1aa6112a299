"""A table of what extraction makes of every mutation and rewrite, in both styles.

From the repository: ``PYTHONPATH=.:tests python -m adversary.report [PART …]``, with parts of ``family/name``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from helpers.surgery import STYLES

from adversary.judge import try_case
from adversary.mutations import MUTATIONS
from adversary.rewrites import REWRITES


def main(wanted: Sequence[str]) -> None:
    """Print a line a case and style, then the counts."""
    for title, cases in (("mutations", MUTATIONS), ("rewrites", REWRITES)):
        counts: Counter[tuple[str, str]] = Counter()
        for case in cases:
            if wanted and not any(part in case.label for part in wanted):
                continue
            for style in STYLES:
                verdict = try_case(case, style)
                if verdict is not None:
                    counts[case.family, verdict.outcome] += 1
                    print(f"{case.label}\t{style}\t{verdict}", flush=True)
        print(f"\n{title}")
        for (family, outcome), count in sorted(counts.items()):
            print(f"  {family:20} {outcome:8} {count}")
        print(f"  {'in all':20} {dict(Counter(outcome for (_, outcome), n in counts.items() for _ in range(n)))}")


if __name__ == "__main__":
    main(sys.argv[1:])

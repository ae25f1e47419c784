"""The groupings of SWIFT's appendix (Tables 6 and 7), against its own section 5.3."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.papers.rows import Row, claim, number
from benchmarks.papers.swift import FP32, MACHINES
from raytrain_ft.policy.grouping import Groups, Profile, greedy
from raytrain_ft.policy.logging_cost import transformer_log_bytes
from raytrain_ft.simulate.presets import NETWORK, VIT

COMPUTE_S = (4.190, 3.917, 3.648, 3.350, 3.111, 2.783, 2.610, 2.312, 2.052, 1.817, 1.603, 0.490, 0.462, 0.243, 0.386, 0.975)
"""Of each machine of ViT-128/32, as published with SWIFT's code (benchmarks/distributed/ft/profile)."""
TABLE_7 = """
1.4e12 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1
1.2e12 1 1 1 1 1 1 1 1 1 1 1 2 2 1
1.1e12 1 1 1 1 1 1 1 1 1 1 1 2 3
1.0e12 1 1 1 1 1 1 1 2 2 2 3
9e11 1 1 1 1 1 1 2 2 3 3
8e11 1 1 1 1 2 2 2 3 3
7e11 1 1 1 1 2 2 2 6
6e11 1 1 2 2 2 2 6
5e11 2 2 2 4 6
4e11 2 4 4 6
3e11 2 4 10
2e11 6 10
1e11 16
"""
TABLE_6 = """
5e11 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1
4e11 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1
3.5e11 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1
3e11 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1
2.5e11 1 1 1 2 2 2 2 2 3
2.2e11 1 2 2 2 2 4 3
1.5e11 3 2 4 4 3
1e11 3 6 7
8e10 9 7
5e10 16
"""


def read_groupings(text: str) -> list[tuple[float, tuple[int, ...]]]:
    """Limit of bytes, and sizes of the groups from left to right."""
    found = []
    for line in text.strip().splitlines():
        limit, *counts = line.split()
        found.append((float(limit), tuple(map(int, counts))))
    return found


def cuts(counts: tuple[int, ...]) -> set[int]:
    """Machines at which a group begins, but for the first."""
    return {sum(counts[:n]) for n in range(1, len(counts))}


def logged_bytes_range(rows: list[tuple[float, tuple[int, ...]]]) -> tuple[float, float]:
    """Least and most bytes that every boundary may log between two checkpoints, if all log the same and merging stops as soon
    as the log fits: the row fits, and the grouping one merge before did not. Empty if the first exceeds the second."""
    least = max(limit / len(counts) for limit, counts in rows if len(counts) < MACHINES)
    most = min(limit / (len(counts) - 1) for limit, counts in rows if len(counts) > 1)
    return least, most


def rows() -> list[Row]:
    """Tables 6 and 7."""
    found = []
    for name, text in (("Table 6", TABLE_6), ("Table 7", TABLE_7)):
        table = read_groupings(text)
        nested = all(cuts(after) <= cuts(before) for (_, before), (_, after) in pairwise(table))
        found.append(
            claim(
                f"SWIFT, {name}",
                "each row merges groups of the row before, as section 5.3 does",
                "yes",
                "yes" if nested else "no",
                "arithmetic",
                holds=nested,
                note="" if nested else "machines 7 and 8 are merged at 1e12 bytes and apart at 9e11",
            )
        )
        least, most = logged_bytes_range(table)
        found.append(
            claim(
                f"SWIFT, {name}",
                "limits follow from section 5.3 with equal boundaries",
                "yes",
                "yes" if least <= most else "no",
                "arithmetic",
                holds=least <= most,
                note=f"rows demand at least {least:.3g} and at most {most:.3g} bytes of each boundary",
            )
        )
    matched, judged = greedy_matches()
    found.append(
        number(
            "SWIFT, Table 7",
            "rows that section 5.3 gives for the published times of machines",
            str(judged),
            matched,
            "policy",
            note="groupings of the same number of boundaries, equal boundaries; limits apart",
        )
    )
    return found


def greedy_matches() -> tuple[int, int]:
    """How many of Table 7's rows between the first and the last our greedy finds, and how many there are."""
    crossing = transformer_log_bytes(VIT.batch, VIT.tokens, VIT.hidden, FP32, 1)
    profile = Profile(compute=COMPUTE_S, crossing=(float(crossing),) * (MACHINES - 1), bandwidth=NETWORK, interval=1)
    printed = [counts for _, counts in read_groupings(TABLE_7) if 1 < len(counts) < MACHINES]
    found = [_sizes(greedy(profile, crossing * (len(counts) - 1))) for counts in printed]
    return sum(ours == counts for ours, counts in zip(found, printed, strict=True)), len(printed)


def _sizes(groups: Groups) -> tuple[int, ...]:
    return tuple(len(group) for group in groups)

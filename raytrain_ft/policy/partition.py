"""Whom to do without when some members do not reach each other although the supervisor reaches all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def to_leave_out(unreached: Mapping[str, Iterable[str]]) -> list[str]:
    """Members without whom everybody who is left reaches everybody.

    Whoever lacks most connections goes first, until none is lacking; of two that lack the same, the later. (To find the very
    fewest is the vertex cover problem; for one bad cable, or one bad node, this finds them.)

    Args:
        unreached: whom each member does not reach. One way is enough: TCP needs both.
    """
    lacking = {frozenset((one, other)) for one, others in unreached.items() for other in others if one != other}
    left_out: list[str] = []
    while lacking:
        members = sorted({member for pair in lacking for member in pair})
        worst = max(members, key=lambda member: (sum(member in pair for pair in lacking), members.index(member)))
        left_out.append(worst)
        lacking = {pair for pair in lacking if worst not in pair}
    return left_out

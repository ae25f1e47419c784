"""Everybody beats, and everybody waits for somebody else: has a cable between two workers been cut?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError

from raytrain_ft.policy.partition import to_leave_out
from raytrain_ft.runtime.contacts import Contacts

ANSWER_SECONDS = 3.0


async def unreached(contacts: Contacts, members: Sequence[str], nodes: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Whose nodes each of these workers cannot connect to, among those that answer: the others are left to the heartbeats."""
    known = {node["NodeID"]: node for node in nodes}
    places = {member: known[contacts.node_of(member)] for member in members if contacts.node_of(member) in known}
    answers = await asyncio.gather(*(_ask(contacts, member, places) for member in members))
    found = {member: answer for member, answer in zip(members, answers, strict=True) if answer is not None}
    return {member: [other for other in answer if other in found] for member, answer in found.items()}


async def _ask(contacts: Contacts, member: str, places: dict[str, dict[str, Any]]) -> list[str] | None:
    others = {other: place for other, place in places.items() if other != member}
    try:
        call = contacts.handle(member).unreached.remote(others)
        return await asyncio.wait_for(asyncio.wrap_future(call.future()), ANSWER_SECONDS)
    except (RayError, ValueError, TimeoutError):
        return None


async def find_cut(contacts: Contacts, members: Sequence[str], nodes: list[dict[str, Any]]) -> dict[str, str]:
    """Whom to leave out because of cut cables, and why in words; nobody if all reach each other."""
    found = await unreached(contacts, members, nodes)
    return {member: _words(member, found) for member in to_leave_out(found)}


def _words(member: str, found: dict[str, list[str]]) -> str:
    peers = {*found.get(member, []), *(other for other, lacking in found.items() if member in lacking)}
    return f"its node and {', '.join(f'that of {peer}' for peer in sorted(peers))} do not reach each other"

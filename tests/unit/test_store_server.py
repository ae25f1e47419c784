"""The rendezvous store: its keys belong to an incarnation, its counters count whatever comes at once."""

from __future__ import annotations

import asyncio

from raytrain_ft.runtime.store_server import StoreServer


def test_a_counter_begins_anew_with_each_incarnation() -> None:
    async def play() -> list[int]:
        server = StoreServer()
        return [await server.add(incarnation, "joined", 1) for incarnation in (1, 1, 2, 2)]

    assert asyncio.run(play()) == [1, 2, 1, 2]


def test_an_incarnation_that_is_over_changes_and_learns_nothing() -> None:
    async def play() -> tuple[int, list[bytes] | None, list[bytes] | None]:
        server = StoreServer()
        await server.add(2, "joined", 3)
        refused = await server.add(1, "joined", 1)
        return refused, await server.get(2, ["joined"], 0.0), await server.get(1, ["joined"], 0.0)

    assert asyncio.run(play()) == (0, [b"3"], None)


def test_what_is_added_at_once_is_all_counted() -> None:
    async def play() -> list[int]:
        server = StoreServer()
        async with server._changed:  # all of them wait for their turn
            adding = [asyncio.create_task(server.add(1, "joined", 1)) for _ in range(5)]
            await asyncio.sleep(0)
        return await asyncio.gather(*adding)

    assert asyncio.run(play()) == [1, 2, 3, 4, 5]

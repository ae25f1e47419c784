"""The pieces of tensors that were read from shards, found by name, without an object for each: see `shard.Rows`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raytrain_ft.storage.shard import Part, Rows


class Columns(NamedTuple):
    """The pieces of some tensors, one tensor after the other.

    Attributes:
        counts: how many each tensor has.
        addresses: where the bytes of each piece are; starts: its first byte in the tensor; sizes: how many they are.
    """

    counts: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


class Pieces(Mapping[str, list[Part]]):
    """The pieces of tensors by name, in order; of those whose bytes nobody asks for by name, without an object for each."""

    def __init__(self, rows: Sequence[Rows]) -> None:
        self._rows = rows
        self._firsts = np.cumsum([0, *(len(one.names) for one in rows)]).tolist()
        names = list(chain.from_iterable(one.names for one in rows))
        none = np.zeros(0, np.int64)
        addresses = np.concatenate([none, *(one.ends[:-1] + one.address for one in rows)])
        sizes = np.concatenate([none, *(np.diff(one.ends) for one in rows)])
        self._starts = np.concatenate([none, *(one.starts for one in rows)])
        self._addresses, self._sizes = addresses, sizes
        self._last = dict(zip(names, range(len(names)), strict=True))
        self._several: dict[str, list[int]] = {}
        if len(self._last) < len(names):
            again = {name for number, name in enumerate(names) if self._last[name] != number}
            for number in sorted(range(len(names)), key=self._starts.tolist().__getitem__):
                if names[number] in again:
                    self._several.setdefault(names[number], []).append(number)

    def __getitem__(self, name: str) -> list[Part]:
        return [self._part(number) for number in self._numbers(name)]

    def __contains__(self, name: object) -> bool:
        return name in self._last

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)

    def _numbers(self, name: str) -> Sequence[int]:
        return self._several.get(name) or (self._last[name],)

    def _part(self, number: int) -> Part:
        which = bisect_right(self._firsts, number) - 1
        return self._rows[which].part(number - self._firsts[which])

    def cut(self) -> set[str]:
        """Names of tensors of which a piece does not begin at their first byte, or that have several."""
        late = set(np.flatnonzero(self._starts).tolist())
        return {*self._several, *(name for name, number in self._last.items() if late and number in late)}

    def under(self, prefix: str, but: str) -> Pieces:
        """Those of the tensors whose names begin so, by the rest of their names, without one of them."""
        part = copy(self)
        part._last = {name.removeprefix(prefix): number for name, number in self._last.items() if name.startswith(prefix)}
        part._several = {name.removeprefix(prefix): some for name, some in self._several.items() if name.startswith(prefix)}
        part._last.pop(but, None)
        return part

    def described(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """{name: (dtype, shape)} of all."""
        found = [kind for one in self._rows for kind in one.kinds()]
        return {name: found[number] for name, number in self._last.items()}

    def columns(self, names: Sequence[str]) -> Columns:
        """Of these tensors.

        Raises:
            KeyError: one is not there.
        """
        which = np.fromiter(map(self._last.__getitem__, names), np.int64, len(names))
        counts = np.ones(len(names), np.int64)
        if self._several:
            again = [number for number, name in enumerate(names) if name in self._several]
            counts[again] = [len(self._several[names[number]]) for number in again]
            which = np.repeat(which, counts)
            for number, first in zip(again, (np.cumsum(counts) - counts)[again].tolist(), strict=True):
                which[first : first + counts[number]] = self._several[names[number]]
        return Columns(counts, self._addresses[which], self._starts[which], self._sizes[which])

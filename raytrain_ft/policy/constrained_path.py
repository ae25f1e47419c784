"""The cheapest path through a line of nodes under a limit on its weight: what `grouping` has to solve.

Node j stands for "machines 0..j-1 are grouped", an arc i -> j for the group of machines i..j-1. For each node, dynamic
programming keeps the partial paths that no other one beats in both cost and weight. Real numbers may leave very many of
those, so those that cannot lead to anything better than the best path known are dropped. How good they can become is
bounded by Lagrangian relaxation: whoever may go over the limit at a price per unit needs at least `_Suffix.value` from
here to the end; every price gives a valid bound, and some near the best one are tried. The same relaxed ways are tried as
completions, which yields good paths early.

The problem contains subset sum (equal compute times, real-valued sizes), so no exact method known is fast on every input.
Mostly some dozens or hundreds of partial paths are left per node. Where there are too many, only the lightest of those with
nearly the same cost is kept, and `Search.loss` says how much better than the path found any other can be. That never happens
with 16 machines or fewer: `WORK` allows for more partial paths than there are.

Rounding: addition from left to right is monotone, so a partial path that is beaten stays so, to the last bit; the bounds
leave out gains of less than `SAME`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SAME = 1e-12
"""Relative: a path that is better by no more than this is not looked for, for rounding alone makes up such differences."""
WORK = 100_000_000
"""Twice the arcs that partial paths are prolonged by, at most: bounds the time (below a second) and the memory."""


@dataclass(slots=True)
class _Suffix:
    """For one price of weight, the best way from each node to the end: cost + price x weight, its parts, its next node."""

    price: float
    value: Floats
    cost: Floats
    weight: Floats
    after: NDArray[np.intp]


@dataclass(slots=True)
class Search:
    """The path from node 0 to the last with the least cost, of those whose weight is at most `limit`. See the module.

    Attributes:
        cost, weight: [i, j] of the arc i -> j, for i < j; not negative.
        path, value: the best path known, and its cost.
        loss: the best path of all may cost less than `value` by no more than this; 0 if nothing was thinned out.
    """

    cost: Floats
    weight: Floats
    limit: float
    path: list[int] = field(default_factory=list)
    value: float = math.inf
    loss: float = 0.0

    def best(self, known: list[int]) -> list[int]:
        """The nodes of the best path; `known` is one whose weight is within the limit."""
        self._improve(known)
        free = self._suffix(0.0)
        if self._improve(_follow(free, 0)):
            return self.path
        suffixes = [free, *self._priced(free)]
        last = len(self.cost) - 1
        nodes, parents = np.zeros(1, np.intp), np.full(1, -1, np.intp)
        costs, weights = np.zeros(1), np.zeros(1)
        for node in range(1, last + 1):
            cost, weight = costs + self.cost[nodes, node], weights + self.weight[nodes, node]
            parent = self._promising(suffixes, node, cost, weight)
            parent = parent[_undominated(cost[parent], weight[parent])]
            parent = self._thinned(parent, cost)
            nodes = np.concatenate([nodes, np.full(len(parent), node)])
            parents = np.concatenate([parents, parent])
            costs, weights = np.concatenate([costs, cost[parent]]), np.concatenate([weights, weight[parent]])
            begun = slice(len(nodes) - len(parent), None)
            for suffix in suffixes:
                total = costs[begun] + suffix.cost[node]
                total[weights[begun] + suffix.weight[node] > self.limit] = math.inf
                if len(total) and total.min() < self.value:
                    label = begun.start + int(total.argmin())
                    self._improve(_trace(nodes, parents, label) + _follow(suffix, node)[1:])
        return self.path

    def _promising(self, suffixes: list[_Suffix], node: int, cost: Floats, weight: Floats) -> NDArray[np.intp]:
        """Which of these partial paths to the node may become the best."""
        left = np.flatnonzero(weight <= self.limit)
        for suffix in suffixes:
            bound = cost[left] + suffix.value[node] - suffix.price * (self.limit - weight[left])
            left = left[bound < self.value * (1 - SAME)]
        return left

    def _thinned(self, paths: NDArray[np.intp], cost: Floats) -> NDArray[np.intp]:
        """If they are too many: of those with nearly the same cost, the lightest. They come lightest, so dearest, first."""
        most = WORK // len(self.cost) ** 2
        if len(paths) <= most:
            return paths
        width = float(cost[paths[0]] - cost[paths[-1]]) / (most - 1)
        self.loss += width
        bins = ((cost[paths] - cost[paths[-1]]) / width).astype(np.int64)
        return paths[np.concatenate([[True], bins[1:] != bins[:-1]])]

    def _improve(self, path: list[int]) -> bool:
        """Keep the path if it is within the limit and the best so far. True if it is within the limit."""
        cost = weight = 0.0
        for arc in pairwise(path):
            cost += float(self.cost[arc])
            weight += float(self.weight[arc])
        if weight <= self.limit and cost < self.value:
            self.path, self.value = path, cost
        return weight <= self.limit

    def _suffix(self, price: float) -> _Suffix:
        last = len(self.cost) - 1
        value, cost, weight = np.zeros((3, last + 1))
        suffix = _Suffix(price, value, cost, weight, np.full(last + 1, last))
        for node in range(last - 1, -1, -1):
            ahead = slice(node + 1, None)
            ways = self.cost[node, ahead] + price * self.weight[node, ahead] + suffix.value[ahead]
            after = node + 1 + int(ways.argmin())
            suffix.after[node], suffix.value[node] = after, ways[after - node - 1]
            suffix.cost[node] = self.cost[node, after] + suffix.cost[after]
            suffix.weight[node] = self.weight[node, after] + suffix.weight[after]
        return suffix

    def _priced(self, free: _Suffix) -> list[_Suffix]:
        """The relaxations at the price with the best bound (by secants, as Handler and Zang), and at some around it."""
        heavy_cost, heavy, light_cost = float(free.cost[0]), float(free.weight[0]), self.value
        light = math.fsum(self.weight[arc] for arc in pairwise(self.path))
        price = 0.0
        for _ in range(64):
            better = (light_cost - heavy_cost) / (heavy - light) if heavy > light else math.inf
            if not math.isfinite(better) or math.isclose(better, price, rel_tol=1e-9):
                break
            price = better
            found = self._suffix(price)
            self._improve(_follow(found, 0))
            if found.weight[0] > self.limit:
                heavy_cost, heavy = float(found.cost[0]), float(found.weight[0])
            else:
                light_cost, light = float(found.cost[0]), float(found.weight[0])
        factors = (1.0, 0.97, 1.03, 0.9, 1.1, 0.8, 1.25, 0.6, 1.6, 0.3, 3.0)
        return [self._suffix(price * factor) for factor in factors]


def _undominated(cost: Floats, weight: Floats) -> NDArray[np.intp]:
    """The pairs that no other one equals or beats in both, lightest first."""
    order = np.lexsort((cost, weight))
    best = np.minimum.accumulate(np.concatenate([[math.inf], cost[order]]))
    return order[best[1:] < best[:-1]]


def _follow(suffix: _Suffix, node: int) -> list[int]:
    path = [node]
    while path[-1] < len(suffix.after) - 1:
        path.append(int(suffix.after[path[-1]]))
    return path


def _trace(nodes: NDArray[np.intp], parents: NDArray[np.intp], label: int) -> list[int]:
    path = []
    while label >= 0:
        path.append(int(nodes[label]))
        label = int(parents[label])
    return path[::-1]

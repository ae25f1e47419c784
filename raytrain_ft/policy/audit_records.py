"""The part of a run's event log that the audit looks at, parsed: who committed what, what was lost, who resumed where.

The records are dicts that may be damaged; what cannot be used becomes a violation, never an exception. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from raytrain_ft.checks import is_whole
from raytrain_ft.policy.forward import complement
from raytrain_ft.policy.sampling import Position, Range, Sampling, joined


@dataclass(frozen=True, slots=True)
class Commit:
    """One `StepsCommitted`: `rank` committed steps [first_step, stop_step), beginning at `position`."""

    member: str
    rank: int
    world_size: int
    incarnation: int
    first_step: int
    stop_step: int
    position: Position
    ids_digest: str
    weights: tuple[float, ...] | None  # of the ranks' shares, when they were not equal

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ({self.member}) of incarnation {self.incarnation}, steps [{self.first_step}, {self.stop_step})"
        )


@dataclass(frozen=True, slots=True)
class Loss:
    """One `SamplesLost`: positions [start, stop) of `epoch` were dropped by step `step`, and perhaps are to be read again."""

    step: int
    epoch: int
    start: int
    stop: int
    incarnation: int | None
    returned: bool = False

    def __str__(self) -> str:
        return f"SamplesLost of step {self.step}, positions [{self.start}, {self.stop}) of epoch {self.epoch}"


@dataclass(slots=True)
class Story:
    """The records, parsed. `begins`, `worlds`, `limits`: where each incarnation resumed, of how many, and how many steps its
    run was to have; `weights`: how it shared out each step; `stored`: what a checkpoint says of steps that nobody may have
    lived to tell of; `stages`: of a pipeline, which draw as one rank; `earlier`: the incarnations of runs before this one;
    `listed`: the positions of `losses`, by step, epoch and incarnation."""

    sampling: Sampling | None = None
    max_steps: int = 0
    stages: int = 1
    earlier: frozenset[int] = frozenset()
    finished_at: int | None = None
    begins: dict[int, int] = field(default_factory=dict)
    worlds: dict[int, int] = field(default_factory=dict)
    limits: dict[int, int] = field(default_factory=dict)
    weights: dict[tuple[int, int], tuple[float, ...] | None] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    stored: list[Commit] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    listed: defaultdict[tuple[int, int, int | None], list[Range]] = field(default_factory=lambda: defaultdict(list))
    violations: list[str] = field(default_factory=list)

    def begin_lineage(self) -> None:
        """A log that does not say where its first incarnation began: it began at step 0."""
        named = [commit.incarnation for commit in self.commits]
        first = min(named, default=0)
        if not self.begins or first < min(self.begins):
            self.begins[first] = 0

    def owned(self, incarnation: int) -> range:
        """The steps for which the word of `incarnation` stands."""
        taken_over = [step for younger, step in self.begins.items() if younger > incarnation]
        return range(self.begins[incarnation], min([self.limit(incarnation), *taken_over]))

    def limit(self, incarnation: int) -> int:
        """How many steps the run of `incarnation` was to have: a later one of the same name may have fewer."""
        return self.limits.get(incarnation, self.max_steps)


def read_story(records: Iterable[dict[str, Any]]) -> Story:
    """The records that the audit needs, in log order; events it does not know are passed over."""
    story = Story()
    readers = {
        "RunStarted": _read_started,
        "Resumed": _read_resumed,
        "StepsCommitted": lambda story, record: story.commits.append(_commit(record)),
        "StepsStored": lambda story, record: story.stored.append(_commit(record)),
        "SamplesLost": _read_loss,
        "RunFinished": _read_finished,
    }
    for number, record in enumerate(records):
        event = record.get("event") if isinstance(record, dict) else None
        if not isinstance(event, str):
            story.violations.append(f"record {number} has no event: {str(record)[:100]}")
        elif event in readers:
            if event == "RunStarted" and record.get("stored") == []:
                story = Story()  # it began anew: what an earlier run of its name did is no part of it
            try:
                readers[event](story, record)
            except (KeyError, TypeError, ValueError) as error:  # ConfigError is a ValueError
                story.violations.append(f"record {number} ({event}) is unusable: {type(error).__name__} {error}")
    return story


def _number(record: dict[str, Any], key: str, below: int = 2**63) -> int:
    value = record[key]
    if not is_whole(value, 0) or value >= below:
        raise ValueError(f"{key}={value!r} is not a whole number from 0 to {below - 1}")
    return value


def _read_started(story: Story, record: dict[str, Any]) -> None:
    if isinstance(record.get("details"), dict):  # where the supervisor's event keeps what it does not look at itself
        record = {**record["details"], **record}
    size, batch = _number(record, "dataset_size"), _number(record, "global_batch_size")
    seed = _number(record, "seed", below=2**64)
    if not isinstance(record["shuffle"], bool) or not isinstance(record["drop_last"], bool):
        raise ValueError("shuffle and drop_last must be true or false")
    sampling = Sampling(size, batch, seed, record["shuffle"], record["drop_last"])
    if story.sampling not in (None, sampling):
        raise ValueError(f"the run went on with {sampling} after {story.sampling}")
    story.sampling, story.max_steps = sampling, _number(record, "max_steps")
    story.stages = _number(record, "stages") if "stages" in record else 1
    story.earlier = frozenset(story.begins)


def _read_resumed(story: Story, record: dict[str, Any]) -> None:
    incarnation, step, world_size = (_number(record, key) for key in ("incarnation", "step", "world_size"))
    newest = max(story.begins, default=-1)
    if incarnation == newest and (story.begins.get(newest), story.worlds.get(newest)) == (step, world_size):
        return  # said again by a supervisor that had been lost in between
    if incarnation <= newest:
        raise ValueError(f"incarnation {incarnation} was resumed after incarnation {newest}")
    story.begins[incarnation], story.worlds[incarnation] = step, world_size
    story.limits[incarnation] = story.max_steps
    story.finished_at = None


def _commit(record: dict[str, Any]) -> Commit:
    rank, world_size, incarnation, first, stop, epoch, start = (
        _number(record, key) for key in ("rank", "world_size", "incarnation", "first_step", "stop_step", "epoch", "start")
    )
    weights = record.get("weights")
    commit = Commit(
        member=str(record["member"]),
        rank=rank,
        world_size=world_size,
        incarnation=incarnation,
        first_step=first,
        stop_step=stop,
        position=Position(epoch, start, joined(_ranges(record.get("owed", ())))),
        ids_digest=str(record["ids_digest"]),
        weights=None if weights is None else tuple(weights),
    )
    if first >= stop or rank >= world_size:
        raise ValueError(f"{commit}, in a world of {world_size}")
    return commit


def _ranges(value: Any) -> tuple[Range, ...]:
    found = tuple((start, stop) for start, stop in value)
    if not all(type(start) is type(stop) is int and 0 <= start < stop for start, stop in found):
        raise ValueError(f"owed={value!r} is not a list of positions [start, stop)")
    return found


def _read_loss(story: Story, record: dict[str, Any]) -> None:
    step, epoch, start, stop = (_number(record, key) for key in ("step", "epoch", "start", "stop"))
    # By default that which owned the step when the record was written: only the log's writer resumes incarnations.
    owner = max((i for i, begin in story.begins.items() if begin <= step), default=None)
    incarnation = _number(record, "incarnation") if "incarnation" in record else owner
    if start >= stop:
        raise ValueError(f"positions [{start}, {stop}) are none")
    for more in _not_listed(story, (step, epoch, incarnation), (start, stop)):
        story.losses.append(Loss(step, epoch, *more, incarnation, record.get("returned") is True))
        story.listed[step, epoch, incarnation].append(more)


def _not_listed(story: Story, where: tuple[int, int, int | None], positions: Range) -> tuple[Range, ...]:
    """What of these positions is news. A run begins with what its checkpoint says of the last steps of one before it, whose log
    may list the same losses, for its workers lived to tell of them; no run lists those of its own steps twice."""
    return complement(positions, story.listed[where]) if where[-1] in story.earlier else (positions,)


def _read_finished(story: Story, record: dict[str, Any]) -> None:
    story.finished_at = _number(record, "steps")

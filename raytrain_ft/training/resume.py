"""Going on from a checkpoint of `raytrain_ft.checkfreq`: found, read, compared with what is there, and only then loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raytrain_ft.errors import ConfigError, MismatchError, StorageError
from raytrain_ft.policy.sampling import Position
from raytrain_ft.policy.sketch import as_records, of_records, unlike
from raytrain_ft.storage import checkpoint
from raytrain_ft.storage import manifest as manifests
from raytrain_ft.storage.checkpoint import Content
from raytrain_ft.storage.filesystem import Storage
from raytrain_ft.storage.manifest import Manifest, Name
from raytrain_ft.training import objects as states
from raytrain_ft.training.random import seed_all, step_seed
from raytrain_ft.training.ranks import current
from raytrain_ft.training.resumable import Loader, position_of, two_integers

KIND = "raytrain_ft.checkfreq-1"


# ---------------------------------------------------------------- what is stored beside the tensors


def values(
    objects: Mapping[str, Any],
    loaders: Mapping[str, Loader],
    data: Mapping[str, Position],
    world: int,
    ended_by: Collection[str] | None,
    parts: states.Parts | None = None,
    overridden: Collection[str] = (),
) -> dict[str, Any]:
    """For the manifest; JSON. `data`: where each loader stands; `ended_by`: the loaders that ended the last step, none if the
    loop said itself that it was over, None if whatever is asked for next comes next; `parts`: the objects' state, if it has
    been taken apart; `overridden`: what this launch was told to leave as it is."""
    return {
        "kind": KIND,
        "world": world,
        **({} if ended_by is None else {"ended_by": sorted(ended_by)}),
        **({"overridden": sorted(overridden)} if overridden else {}),
        "data": {name: two_integers(one) for name, one in data.items()},
        "datasets": {name: asdict(one.sampling) | {"samples": as_records(one.sketches)} for name, one in loaders.items()},
        "objects": states.describe(objects, parts),
    }


@dataclass(frozen=True, slots=True)
class _Stored:
    """Those values, read and checked."""

    world: int
    ended_by: set[str] | None
    overridden: set[str]
    data: dict[str, Position]
    datasets: dict[str, dict[str, Any]]
    objects: dict[str, dict[str, Any]]


def _stored(manifest: Manifest) -> _Stored:
    found = manifest.values
    if found.get("kind") != KIND:
        raise MismatchError(f"{manifest.name} was not written by raytrain_ft.checkfreq (kind {found.get('kind')!r})")
    try:
        data = {name: position_of(one) for name, one in found["data"].items()}
        datasets = {name: dict(one) for name, one in found["datasets"].items()}
        for one in datasets.values():
            of_records(one.get("samples", []))
        objects = {name: states.described(one) for name, one in found["objects"].items()}
        ended_by = {str(name) for name in found["ended_by"]} if "ended_by" in found else None
        overridden = {str(name) for name in found.get("overridden", [])}
        return _Stored(int(found["world"]), ended_by, overridden, data, datasets, objects)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StorageError(f"{manifest.name} does not have the values of a {KIND}: {error!r}") from error


# ---------------------------------------------------------------- finding


def read(storage: Storage, name: str) -> Content:
    """A checkpoint that rank 0 found, verified.

    Raises:
        StorageError: it is damaged, or out of reach. MismatchError: it is none of ours. ConfigError: this process does not see
            it at all.
    """
    manifest = checkpoint.patiently(lambda: _manifest(storage, name))
    _stored(manifest)
    return checkpoint.read(storage, manifest)


def _manifest(storage: Storage, name: str) -> Manifest:
    parsed = Name.parse(name)
    if parsed is None or storage.size(f"{name}/{manifests.FILE}") is None:
        raise ConfigError(f"{storage.uri} does not hold {name} here: is it a directory that all ranks share?")
    return checkpoint.read_manifest(storage, parsed)


# ---------------------------------------------------------------- comparing, then loading


@dataclass(frozen=True, slots=True)
class Plan:
    """What is about to be loaded: everything fits.

    Attributes:
        states: (object, its state dict); left_out: (object, buffers that its state dict does not have).
        positions: (loader, where it goes on); generators: their states.
        step: steps committed; world: how many ranks it was stored by; notes: what was overridden, in words.
        ended_by: the loaders at whose next batch, or without any at `Run.commit`, the loop is where it was; None if that is
            not known.
    """

    states: list[tuple[Any, Any]]
    left_out: list[tuple[Any, Any]]
    positions: list[tuple[Loader, Position]]
    generators: dict[str, Any]
    step: int
    world: int
    notes: list[str]
    ended_by: set[str] | None

    def goes_on_at(self, name: str | None) -> bool:
        """Whether the loop is where it was when it asks this loader for a batch, or (None) says itself that a step is over. A
        validation that comes first may draw: it has been done before."""
        return name is None or self.ended_by is None or name in self.ended_by


def plan(
    content: Content, objects: Mapping[str, Any], loaders: Mapping[str, Loader], override: Collection[str], rank: int
) -> Plan:
    """Compares, and puts together what is to be loaded. Changes nothing.

    Raises:
        MismatchError: with every difference that `override` does not allow. StorageError: a part is missing. ConfigError: a
            name in `override` is not known; or a rank would have nothing to do at the end of the epoch.
    """
    stored = _stored(content.manifest)
    here = states.describe(objects)
    unknown = set(override) - stored.objects.keys() - here.keys() - {"dataset"}
    if unknown:
        names = sorted({*stored.objects, *here, "dataset"})
        raise ConfigError(f"checkfreq.open(override=...): {sorted(unknown)} are not among {names}")
    apart: dict[str, list[str]] = {}
    for name in sorted(stored.objects.keys() | here.keys()):
        if name not in here:
            apart[name] = [f"{name} is in the checkpoint, and was not passed to checkfreq.open"]
        elif name not in stored.objects:
            apart[name] = [f"{name} was passed to checkfreq.open, and is not in the checkpoint"]
        else:
            apart[name] = states.differences(name, stored.objects[name], here[name])
    lines = [line for name, found in apart.items() if name not in override for line in found]
    data = _data_differences(stored, loaders)
    lines += [line for found in data.values() for line in found if "dataset" not in override]
    if lines:
        raise MismatchError(
            f"{content.manifest.name} does not fit; nothing was loaded:\n"
            + "\n".join(f"  {line}" for line in lines)
            + '\nTo go on without what differs, pass its name in override={...} ("dataset" for the data)'
        )
    positions = _positions(stored, loaders)
    source = rank if rank < stored.world else 0
    skeletons = states.stored_skeletons(content, source)
    # a launch with the same options as the one that stored this goes on with what was left as it is then
    alike = {name for name in here if name in override and not apart[name]}
    left = alike - stored.overridden
    chosen = [name for name in here if not apart[name] and name not in left]
    try:
        found = [(objects[name], states.put_together(content, skeletons[name], source)) for name in chosen]
        generators = states.put_together(content, skeletons[states.GENERATORS], source)
        buffers = states.left_out(content, skeletons, source)
    except KeyError as error:
        raise StorageError(f"{content.manifest.name} lacks the state of {error}") from error
    notes = [f"overridden: {line}" for lines in (*apart.values(), *data.values()) for line in lines]
    notes += [f"overridden: {name} is left as it is" for name in sorted(left)]
    notes += [
        f"{name} was overridden by the launch that stored this already, and is loaded; to override it anew, launch once without"
        for name in sorted(alike - left)
    ]
    if rank >= stored.world:
        generators = {}
    ended_by = stored.ended_by
    if ended_by:
        ended_by = ended_by & loaders.keys() or None  # None: they have other names now
    left_out = [(objects[name], buffers[name]) for name in chosen if name in buffers]
    return Plan(found, left_out, positions, generators, content.manifest.step, stored.world, notes, ended_by)


def _data_differences(stored: _Stored, loaders: Mapping[str, Loader]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in sorted(stored.datasets.keys() | loaders.keys()):
        if name not in loaders or name not in stored.data or name not in stored.datasets:
            found[name] = [f"loader {name} is {'in the checkpoint' if name not in loaders else 'here'} only"]
            continue
        here, before = asdict(loaders[name].sampling), stored.datasets[name]
        found[name] = [
            f"{name}: {key} is {before.get(key)} in the checkpoint, {here[key]} here"
            for key in here
            if before.get(key) != here[key]
        ]
        # in another order, other samples were looked at
        other = "" if found[name] else unlike(of_records(before.get("samples", [])), loaders[name].sketches)
        found[name] += [f"{name}: dataset of the same length with other content: {other}"] if other else []
    return found


def _positions(stored: _Stored, loaders: Mapping[str, Loader]) -> list[tuple[Loader, Position]]:
    """Where each loader goes on.

    Raises:
        ConfigError: a rank would have nothing to do at the end of the epoch, in each launch anew.
    """
    found = [(loaders[name], _position(stored, loaders[name], name)) for name in loaders if name in stored.data]
    for loader, position in found:
        loader.check_world(current()[1], position)
    return found


def _position(stored: _Stored, loader: Loader, name: str) -> Position:
    """Where to go on. In another order of samples that is the beginning of the epoch."""
    here, before = asdict(loader.sampling), stored.datasets[name]
    same = all(before.get(key) == here[key] for key in ("dataset_size", "seed", "shuffle"))
    return stored.data[name] if same else Position(stored.data[name].epoch, 0)


def load(plan: Plan) -> None:
    """Loads all of it but the generators.

    Raises:
        ConfigError: an object does not take its own state back.
    """
    for value, state in plan.states:
        try:
            states.put_back(value, state)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{type(value).__name__}.load_state_dict failed (to leave it as it is, pass its name in override={{...}}): "
                f"{type(error).__name__}: {error}"
            ) from error
    for value, buffers in plan.left_out:
        states.put_back_left_out(value, buffers)
    for loader, position in plan.positions:
        loader.load_state_dict(two_integers(position))


def set_generators(plan: Plan, rank: int) -> None:
    """Puts the random generators where they were. A rank that did not exist then gets streams of its own."""
    if plan.generators:
        states.set_generators(plan.generators)
    else:
        seed_all(step_seed(0, plan.step, rank, 0))

"""A study's file: YAML whose every fault is told with its line, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from raytrain_ft.config import NAME
from raytrain_ft.errors import ConfigError, ScenarioError
from raytrain_ft.scenario.events import Index, Model, Share, Whole
from raytrain_ft.scenario.file import Place, Source
from raytrain_ft.study.cuts import Cut
from raytrain_ft.study.models import MODELS, data
from raytrain_ft.study.protocol import ModelStudy, Plan

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LONGEST = 100_000
"""Mini-batches of a training."""
QUICK_SEEDS, QUICK_STEP = 2, 20


class CutFields(Model):
    """A place in back-propagation; `25%` alone means `{tensors: 25%}`. See `study.Cut`."""

    tensors: Share | None = None
    bytes: Share | None = None
    name: str | None = None
    layer: Index | None = None

    @model_validator(mode="after")
    def _one(self) -> CutFields:
        if len(self.model_fields_set) != 1:
            raise PydanticCustomError("one_of", "give exactly one of tensors, bytes, name, layer")
        return self

    @property
    def cut(self) -> Cut:
        """What it stands for."""
        return Cut(**self.model_dump())


Cuts = Annotated[
    tuple[Annotated[CutFields, BeforeValidator(lambda value: value if isinstance(value, dict) else {"tensors": value})], ...],
    Field(min_length=1),
]


class ModelFields(Model):
    """See `study.ModelStudy`."""

    model: Literal["resnet", "nt3"]
    batch: Whole
    lr: Rate
    adam_lr: Rate = 1e-3
    at: Annotated[tuple[Index, ...], Field(min_length=1)]
    cuts: Cuts = (CutFields(tensors=0.25), CutFields(tensors=0.5), CutFields(tensors=0.75))


class StudyFields(Model):
    """See `study.Plan`."""

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    about: str = ""
    workers: Annotated[Whole, Field(ge=2, le=64)] = 4
    survivors: Annotated[tuple[Index, ...], Field(min_length=1)] = (1, 2, 3)
    seeds: Annotated[Whole, Field(le=100)] = 3
    after: Annotated[Index, Field(le=LONGEST)] = 10
    optimizers: tuple[Literal["sgd", "momentum", "weight_decay", "adam"], ...] = ("sgd", "momentum", "weight_decay", "adam")
    models: Annotated[tuple[ModelFields, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> StudyFields:
        found = [
            InitErrorDetails(type=PydanticCustomError("impossible", "{why}", {"why": why}), loc=place, input=value)
            for place, value, why in _problems(self)
        ]
        if found:
            raise ValidationError.from_exception_data("Study", found)
        return self


def load_plan(path: Path) -> Plan:
    """What a file asks for.

    Raises:
        ScenarioError: it cannot be read, or it asks for what cannot be; every fault with its line.
        ConfigError: scikit-learn, which brings the data, is not there.
    """
    source, fields = Source.read(path)
    try:
        known = StudyFields.model_validate(fields)
    except ValidationError as error:
        raise ScenarioError(source.explain(error, StudyFields)) from error
    models = tuple(
        ModelStudy(
            model=one.model,
            batch=one.batch,
            lr=one.lr,
            adam_lr=one.adam_lr,
            at=tuple(sorted(one.at)),
            cuts=tuple(each.cut for each in one.cuts),
        )
        for one in known.models
    )
    plain = known.model_dump(include={"name", "workers", "survivors", "seeds", "after", "optimizers"})
    return Plan(models=models, **plain)


def quick(plan: Plan) -> Plan:
    """The same study in a fraction of the time, to see that it runs: fewer seeds, and one point early in the training."""
    models = tuple(replace(one, at=(min(one.at[0], QUICK_STEP),)) for one in plan.models)
    return replace(plan, models=models, seeds=min(plan.seeds, QUICK_SEEDS), after=min(plan.after, 2))


def _problems(study: StudyFields) -> Iterator[tuple[Place, Any, str]]:
    """What cannot be although each field by itself could."""
    for number, survivors in enumerate(study.survivors):
        if not 1 <= survivors < study.workers:
            left = f"of {study.workers} workers 1 to {study.workers - 1} can survive a failure"
            yield ("survivors", number), survivors, left
    yield from _twice(("survivors",), study.survivors)
    yield from _twice(("optimizers",), study.optimizers)
    yield from _twice(("models",), [one.model for one in study.models], "model")
    for number, one in enumerate(study.models):
        for place, value, why in _of_model(study, one):
            yield ("models", number, *place), value, why


def _of_model(study: StudyFields, one: ModelFields) -> Iterator[tuple[Place, Any, str]]:
    size = len(data(one.model).labels)
    if one.batch % study.workers or one.batch < 2 * study.workers:
        yield ("batch",), one.batch, f"use a multiple of {study.workers} workers, with at least 2 samples for each"
    elif one.batch > size:
        yield ("batch",), one.batch, f"there are {size:,} samples to train on"
    for number, step in enumerate(one.at):
        if step > LONGEST:
            yield ("at", number), step, f"use mini-batches 0 to {LONGEST:,}"
    yield from _twice(("at",), one.at)
    cuts = [each.cut for each in one.cuts]
    yield from _twice(("cuts",), [cut.label for cut in cuts])
    model = MODELS[one.model]()
    for number, cut in enumerate(cuts):
        try:
            cut.done(model)
        except ConfigError as error:
            field = next(iter(one.cuts[number].model_fields_set))
            yield ("cuts", number, field), getattr(cut, field), str(error)


def _twice(place: Place, values: Sequence[Any], *field: str) -> Iterator[tuple[Place, Any, str]]:
    for number, value in enumerate(values):
        if value in values[:number]:
            yield (*place, number, *field), value, "this is given twice"

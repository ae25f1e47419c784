"""A scenario as a whole, and how it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from raytrain_ft.config import NAME
from raytrain_ft.errors import ConfigError, ScenarioError
from raytrain_ft.loading import line_of, load_module
from raytrain_ft.scenario.checks import problems
from raytrain_ft.scenario.events import Event, Index, Model, Point, Seconds, Share, ShareOrNone, When, Who, Whole
from raytrain_ft.scenario.file import Place, Source


class Thresholds(Model):
    """What a run must keep to pass. That it ends, and that its records prove every sample, is always asked.

    Attributes:
        goodput: at least; committed steps, as a share of those of an undisturbed run in the same time.
        pause_p95, detection_p95: at most.
        samples_lost: at most.
        guarantee: the weakest that is allowed: exact, rounding or lossy.
    """

    goodput: Share | None = None
    pause_p95: Seconds | None = None
    detection_p95: Seconds | None = None
    samples_lost: Index = 0
    guarantee: Literal["exact", "rounding", "lossy"] | None = None


class Job(Model):
    """What is trained.

    Attributes:
        task: "tiny", a small model whose step takes a fixed time, or FILE.py:Task (relative to the scenario's file) or
            module:Task.
        arguments: of the task's class; of tiny: step_seconds.
    """

    task: str = "tiny"
    arguments: dict[str, Any] = Field(default_factory=dict)


class Assumed(Model):
    """What things cost where they were not measured: for the simulator.

    Attributes:
        step_s: of a step of all workers. costs: fields of `simulate.Costs`, such as detect_s, start_s, state_bytes.
    """

    step_s: Seconds
    costs: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)


class Scenario(Model):
    """A job, and what happens to it.

    Attributes:
        name: of its runs.
        workers: a number, or (least, most). stages: of a pipeline. nodes: of the laptop cluster; by default one for each worker
            and spare. micro_batches: of a step and replica.
        steps, batch, seed, bucket_bytes, first_bucket_bytes: as in `Trainer`.
        strategy, quorum, lost_samples, update, replacement, spares, hang_timeout, replacement_timeout,
            max_fruitless_recoveries: as in `RecoveryConfig`.
        checkpoint_every: as `CheckpointConfig.every`.
        events: what happens. pass_if: what the run must keep. assumed: what things cost, for the simulator.
    """

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    about: str = ""
    job: Annotated[Job, BeforeValidator(lambda value: {"task": value} if isinstance(value, str) else value)] = Job()
    workers: Whole | tuple[Whole, Whole]
    stages: Whole = 1
    micro_batches: Whole | None = None
    nodes: Whole | None = None
    steps: Whole
    batch: Whole
    seed: Annotated[int, Field(strict=True)] = 0
    bucket_bytes: Whole = 25 * 2**20
    first_bucket_bytes: Whole = 2**20
    strategy: str = "auto"
    quorum: ShareOrNone = 0.5
    lost_samples: str = "drop"
    update: str = "barrier"
    replacement: str = "wait"
    spares: Index = 1
    hang_timeout: Seconds = 60.0
    replacement_timeout: Seconds = 60.0
    max_fruitless_recoveries: Whole = 10
    checkpoint_every: Whole | Literal["auto"] | None = "auto"
    events: tuple[Event, ...] = ()
    pass_if: Thresholds = Thresholds()
    assumed: Assumed | None = None
    _source: Source = PrivateAttr(default_factory=Source)

    @classmethod
    def load(cls, path: str | Path) -> Scenario:
        """Reads a YAML file; or executes a Python file, as any job's, and takes what it calls `scenario`.

        Raises:
            ScenarioError: it cannot be read, or something in it cannot be; every fault with its line.
        """
        path = Path(path)
        if path.suffix == ".py":
            return _made_in(path)
        source, fields = Source.read(path, plain=("job", "arguments"))
        try:
            scenario = cls.model_validate(fields)
        except ValidationError as error:
            raise ScenarioError(source.explain(error, cls)) from error
        scenario._source = source
        return scenario

    def error(self, place: tuple[str | int, ...], message: str) -> ScenarioError:
        """An error about a field, with the file and the line that say it, or that made what has it."""
        source = self._source if self._source.path is not None else self._in_python()
        return ScenarioError(source.at(place, message))

    def relative(self, path: str) -> Path:
        """A path that the scenario names: as seen from its file."""
        return self._source.directory / path

    @property
    def range(self) -> tuple[int, int]:
        """(least, most) workers."""
        return self.workers if isinstance(self.workers, tuple) else (self.workers, self.workers)

    @property
    def count_micro_batches(self) -> int:
        """Of a step and replica."""
        return self.micro_batches or (2 * self.stages if self.stages > 1 else 1)

    def _in_python(self) -> Source:
        """The Python file that made this, with the lines of the calls that made its parts."""
        parts: dict[Place, Model] = {(): self}
        for number, event in enumerate(self.events):
            parts["events", number] = event
            inner = {name: getattr(event, name) for name in ("who", "when", "at")}
            parts |= {("events", number, name): part for name, part in inner.items() if part is not None}
        path = self._made.path
        return Source(Path(path), {place: part._made.line for place, part in parts.items() if part._made.path == path})

    @model_validator(mode="after")
    def _check(self) -> Scenario:
        source = self._in_python()
        found = [
            InitErrorDetails(
                type=PydanticCustomError(
                    "impossible", "{why}", {"why": why, "file": str(source.path), "line": source.line(place)}
                ),
                loc=place,
                input=value,
            )
            for place, value, why in problems(self)
        ]
        if found:
            raise ValidationError.from_exception_data("Scenario", found)
        return self


MODELS = {model.__name__: model for model in (Scenario, Event, Who, When, Point, Job, Thresholds, Assumed)}
"""By the names that pydantic's errors have for them."""


def _made_in(path: Path) -> Scenario:
    """What a Python file calls `scenario`."""
    try:
        found = getattr(load_module(str(path)), "scenario", None)
    except ConfigError as error:
        cause = error.__cause__
        if not isinstance(cause, ValidationError) or cause.title not in MODELS:
            raise ScenarioError(str(error)) from error
        lines: dict[Place, int] = {(): line_of(cause, str(path)) or 1}
        for fault in cause.errors():
            context = fault.get("ctx", {})
            if context.get("file") == str(path.resolve()):
                lines[fault["loc"]] = context["line"]
        raise ScenarioError(Source(path, lines).explain(cause, MODELS[cause.title])) from error
    if not isinstance(found, Scenario):
        what = "it has no `scenario`" if found is None else f"its `scenario` is a {type(found).__name__}"
        raise ScenarioError(f"{path}: {what}: write scenario = Scenario(...), of raytrain_ft.scenario")
    if found._source.path is None:  # else it is one that was read from a file
        python = found._in_python()
        found._source = Source(path, python.lines if python.path == path.resolve() else {})
    return found

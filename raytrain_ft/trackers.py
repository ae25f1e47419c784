"""Callbacks that bring a run into TensorBoard, MLflow or Weights & Biases: loss, step time, workers, and every recovery.

A run that goes on from a checkpoint continues what an earlier run of its name began: no second curve, no step written twice.
Each of them asks its own store how far it had come, so not even a driver that was killed makes it repeat a step.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from raytrain_ft.callbacks import Callback, RunInfo, Seen
from raytrain_ft.errors import ConfigError
from raytrain_ft.places import told
from raytrain_ft.policy.chronicle import Steps
from raytrain_ft.policy.strategy import Recovery
from raytrain_ft.progress import describe
from raytrain_ft.storage.draft import draft_of

LOSS, PAUSE = "train/loss", "recovery/pause_seconds"
SUCCESS = "FINISHED"
RECOVERY = "recovery "
"""Of MLflow's tags: the number of a recovery comes after it, those of earlier runs of the name included."""
FINISH_S = 60.0
"""How long the end of a run waits for W&B's server."""


def _scalars(steps: Steps) -> dict[str, float]:
    """What is drawn over the steps."""
    known = {LOSS: steps.loss, "train/workers": steps.world_size, "train/step_seconds": steps.step_seconds}
    return {name: float(value) for name, value in known.items() if value is not None}


def _marks(recovery: Recovery) -> dict[str, float]:
    """What is drawn at the step that training went on from."""
    return {PAUSE: recovery.seconds or 0.0, "recovery/workers_lost": float(len(recovery.lost))}


class TensorBoard(Callback):
    """Event files in `<run's directory>/tensorboard`: `tensorboard --logdir STORAGE_PATH` shows every run under its name.

    A run that begins anew under an old name hides the old curve, in the way that TensorBoard has for it; its files stay.
    """

    def on_start(self, run: RunInfo) -> Seen | None:
        # Comes with ray[train]. Its FileWriter has a queue that `flush` does not wait for; this one writes at once.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]  (made by protobuf)

        directory = run.directory / "tensorboard"
        files = sorted(directory.glob("events.out.tfevents.*"))
        continues = run.resumed or any(run.run_id in file.name for file in files)  # which a driver before this one wrote
        seen = _written(files, run.run_id) if continues else Seen(0)
        directory.mkdir(parents=True, exist_ok=True)
        # A name of its own: tensorboardX overwrites the file of another writer of the same second.
        self._writer = EventsWriter(str(directory / "events"), f".{len(files):04d}.{run.run_id}")
        if files and not continues:
            self._writer.write_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))
        return seen

    def on_steps(self, steps: Steps) -> None:
        self._write(_scalars(steps), steps.stop)

    def on_recovery(self, recovery: Recovery) -> None:
        from tensorboardX.summary import text

        account = text("recovery", "\n".join(f"    {line}" for line in describe(recovery).splitlines()))
        self._write(_marks(recovery), recovery.step, account.value)

    def on_end(self, state: str) -> None:
        self._writer.close()

    def _write(self, scalars: dict[str, float], step: int, more: Sequence[Any] = ()) -> None:
        """One event, so that it is there as a whole or not at all."""
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  (made by protobuf)
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]  (made by protobuf)

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        summary = Summary(value=[*values, *more])
        self._writer.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()


def _written(files: list[Path], run_id: str) -> Seen:
    """What is in these event files; only the newest ones have to be read."""
    from tensorboardX.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]  (made by protobuf)

    steps, recoveries = None, 0
    for file in reversed(files):
        if steps is not None and run_id not in file.name:
            break
        furthest = None
        for event in _events(file):
            if event.session_log.status == SessionLog.START:
                furthest = 0
            tags = {value.tag for value in event.summary.value}
            if LOSS in tags:
                furthest = max(furthest or 0, event.step)
            recoveries += PAUSE in tags and run_id in file.name
        steps = furthest if steps is None else steps
    return Seen(steps or 0, recoveries)


def _events(file: Path) -> Iterator[Any]:
    """The events of a file, up to one that was cut short: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  (made by protobuf)

    data, at = file.read_bytes(), 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        end = at + 12 + length + 4
        if end > len(data):
            return
        try:
            yield Event.FromString(data[at + 12 : end - 4])
        except DecodeError:
            return
        at = end


class MLflow(Callback):
    """One MLflow run per run, named like it. Needs `pip install -e '.[mlflow]'` in the clone.

    Args:
        tracking_uri: as MLflow takes it; None is MLflow's own choice (MLFLOW_TRACKING_URI).
        experiment: its name; made if there is none.

    Raises:
        ConfigError: MLflow is not installed, or refuses the URI.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "raytrain_ft") -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise ConfigError("MLflow is not installed: pip install -e '.[mlflow]' in the clone of raytrain_ft") from error
        try:
            self._client: Any = MlflowClient(tracking_uri)
        except Exception as error:  # it may say the whole URI
            raise ConfigError(f"MLflow(tracking_uri={told(str(tracking_uri))!r}): {told(str(error))}") from None
        self._experiment = experiment
        self._recoveries = self._before = 0

    def on_start(self, run: RunInfo) -> Seen | None:
        note = run.directory / "mlflow.json"
        self._run_id = run.run_id
        earlier = json.loads(note.read_text())["run"] if note.exists() else None
        tags = self._tags_of(earlier)
        told_by, told = tags.get("raytrain_ft.run_id"), int(tags.get("raytrain_ft.steps", 0))
        self._recoveries = int(tags["raytrain_ft.recoveries"]) if told_by == run.run_id else 0
        self._before = sum(tag.startswith(RECOVERY) for tag in tags) - self._recoveries
        if tags and (run.resumed or told_by == run.run_id):
            self._id = earlier
            self._client.update_run(earlier, status="RUNNING")
            self._log({}, told, {})
            return Seen(told, self._recoveries)
        self._before = 0
        experiment = self._client.get_experiment_by_name(self._experiment)
        place = experiment.experiment_id if experiment is not None else self._client.create_experiment(self._experiment)
        self._id = self._client.create_run(place, run_name=run.name).info.run_id
        self._log({}, 0, {})
        _write_whole(note, {"run": self._id})
        for name, value in run.config.items():
            self._client.log_param(self._id, name, value)
        return Seen(0)

    def _tags_of(self, earlier: str | None) -> dict[str, str]:
        """Of a run that MLflow has from before; none if there is none, be it deleted since or in another store."""
        from mlflow.exceptions import MlflowException

        try:
            return dict(self._client.get_run(earlier).data.tags) if earlier is not None else {}
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return {}

    def on_steps(self, steps: Steps) -> None:
        self._log(_scalars(steps), steps.stop, {"raytrain_ft.steps": str(steps.stop)})

    def on_recovery(self, recovery: Recovery) -> None:
        self._recoveries += 1
        self._log(_marks(recovery), recovery.step, {f"{RECOVERY}{self._before + self._recoveries}": describe(recovery)})

    def on_end(self, state: str) -> None:
        self._client.set_terminated(self._id, "FINISHED" if state == SUCCESS else "FAILED")

    def _log(self, scalars: dict[str, float], step: int, tags: dict[str, str]) -> None:
        """How far it has come goes with the values, in one batch."""
        from mlflow.entities import Metric, RunTag

        now = int(time.time() * 1000)
        place = {"raytrain_ft.run_id": self._run_id, "raytrain_ft.recoveries": str(self._recoveries)}
        metrics = [Metric(name, value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._id, metrics, tags=[RunTag(name, value) for name, value in (place | tags).items()])


class WandB(Callback):
    """One Weights & Biases run per run, named like it. Needs `pip install -e '.[wandb]'` in the clone.

    Args:
        project: its name.
        mode: "offline" writes into the run's directory, for `wandb sync`; "online" needs a login.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, project: str = "raytrain_ft", mode: Literal["online", "offline"] = "online") -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("wandb is not installed: pip install -e '.[wandb]' in the clone of raytrain_ft") from error
        self._wandb: Any = wandb
        self._project, self._mode = project, mode

    def on_start(self, run: RunInfo) -> Seen | None:
        self._note = run.directory / "wandb.json"  # an offline store cannot be asked
        told = json.loads(self._note.read_text()) if self._note.exists() else {}
        same = told.get("run_id") == run.run_id
        if not told or not (run.resumed or same):
            told = {"run": run.run_id, "steps": 0}
        self._told = told | {"run_id": run.run_id, "recoveries": told["recoveries"] if same else 0}
        self._untold: list[dict[str, float]] = []
        about = {"project": self._project, "name": run.name, "id": self._told["run"], "resume": "allow", "mode": self._mode}
        settings = self._wandb.Settings()
        if hasattr(settings, "finish_timeout"):  # without it, newer versions wait for a server that is away for ever
            settings.finish_timeout = FINISH_S
        self._run = self._wandb.init(**about, dir=str(run.directory), config=run.config, settings=settings)
        return Seen(self._told["steps"], self._told["recoveries"])

    def on_steps(self, steps: Steps) -> None:
        self._log(_scalars(steps), steps.stop)

    def on_recovery(self, recovery: Recovery) -> None:
        """Told with the steps that come next: W&B takes one row for each step, and none for an earlier one."""
        self._untold.append(_marks(recovery))

    def on_end(self, state: str) -> None:
        if self._untold:
            self._log({}, self._told["steps"] + 1)
        self._run.finish(exit_code=int(state != SUCCESS))

    def _log(self, scalars: dict[str, float], step: int) -> None:
        """A whole row, which W&B takes at once, and then the note of it. Of a step that it has, at the next: a run that goes on
        may begin with the one at which the last recovery was told."""
        marks = {name: value for one in self._untold for name, value in one.items()}
        self._run.log(marks | scalars, step=max(step, self._run.step), commit=True)
        self._told |= {"recoveries": self._told["recoveries"] + len(self._untold)} | ({"steps": step} if scalars else {})
        self._untold = []
        _write_whole(self._note, self._told)


def _write_whole(path: Path, values: dict[str, Any]) -> None:
    with draft_of(path) as file:
        json.dump(values, file)

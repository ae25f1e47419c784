"""A pipeline that loses stages: survivors keep what they have, lost ones replay what they were sent, the bits are the same."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from click.testing import CliRunner
from conftest import PIPELINE_STEPS as STEPS
from conftest import STAGES, pipeline, promise_kept, train
from ray.exceptions import RayError
from safetensors.torch import load_file
from toy import Toy

import raytrain_ft as ft
from raytrain_ft.cli.main import main
from raytrain_ft.errors import ConfigError
from raytrain_ft.policy.strategy import Guarantee, Strategy
from raytrain_ft.runtime.event_log import read_records
from raytrain_ft.runtime.spec import NAMESPACE
from raytrain_ft.storage.arrow import read_tensors
from raytrain_ft.training import aside

UNHURRIED = 0.15
"""Seconds of a micro-batch with which a few steps take longer than a worker took to build its model: else nobody helps."""
NONE_YET = ft.CheckpointConfig(every=100)
"""A replay is from the beginning, so there is something to help with, and somewhere to strike, wherever a worker is lost."""
HELPED: dict[str, Any] = {"max_grad_norm": 0.5, "replay_workers": 3, "checkpoints": NONE_YET}
"""As `calm_stages`, whose lost stages are replayed by three."""


class Alike(Toy):
    """Without what depends on how a batch is cut: dropout, and statistics over a part of it."""

    def model(self, stage: int) -> torch.nn.Module:
        layers = [torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)]
        return torch.nn.Sequential(*layers)


def events(result: ft.Result, name: str) -> list[dict[str, Any]]:
    return [record for record in read_records(Path(result.path) / "events.jsonl") if record["event"] == name]


def weights(task: Any, result: ft.Result) -> list[torch.Tensor]:
    return list(ft.load_model(task, result).parameters())


@pytest.fixture(scope="module")
def in_one_piece(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> ft.Result:
    path = tmp_path_factory.mktemp("whole")
    return train(path, "whole", task=Alike(), workers=1, steps=STEPS, drop_last=True, max_grad_norm=0.5)


def is_that_of(whole: ft.Result, cut: ft.Result) -> bool:
    for a, b in zip(weights(Alike(), whole), weights(Alike(), cut), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return cut.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-4)


@pytest.fixture(scope="module")
def calm_stages(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> ft.Result:
    return pipeline(tmp_path_factory.mktemp("calm"), "run", task=Alike(), max_grad_norm=0.5)


def test_the_result_is_that_of_the_model_in_one_piece(in_one_piece: ft.Result, calm_stages: ft.Result) -> None:
    assert is_that_of(in_one_piece, calm_stages)


@pytest.mark.long
def test_a_stage_with_a_replica_is_filled_from_it(in_one_piece: ft.Result, tmp_path: Path) -> None:
    """It is on another node, so nothing is logged: neither what is sent to it, nor what all agree upon."""
    how = {"task": Alike(), "stages": 2, "workers": 4, "schedule": "gpipe", "max_grad_norm": 0.5}
    calm = pipeline(tmp_path, "calm", **how)
    assert is_that_of(in_one_piece, calm)
    assert events(calm, "LogWritten") == []
    result = pipeline(tmp_path, "run", **how, faults=[fault(1, 9, "forward", 1)])
    assert result.digest == calm.digest
    assert [(r.strategy, r.guarantee) for r in result.recoveries] == [(Strategy.REPLICATION, Guarantee.EXACT)]
    assert promise_kept(result) == []


@pytest.mark.long
def test_a_stage_whose_replicas_are_all_lost_replays_in_step(cluster: Any, tmp_path: Path) -> None:
    """They reduce their gradients together, so when one is lost in the midst of it both begin anew."""
    how = {"stages": 2, "workers": 4, "micro_batches": 2, "num_spares": 2, "strategy": "logging"}
    calm = pipeline(tmp_path, "calm", **how)
    lost = [fault(rank, 9, "data") for rank in (1, 3)]
    result = pipeline(tmp_path, "run", **how, faults=[*lost, fault(3, 6, "replay")], checkpoints=NONE_YET)
    assert result.digest == calm.digest
    assert promise_kept(result) == []
    assert {(r.strategy, r.guarantee) for r in result.recoveries} == {(Strategy.LOGGING, Guarantee.EXACT)}
    assert len(list((Path(result.path) / "faults").iterdir())) == 3, "every fault has struck"


def test_logging_changes_nothing(undisturbed_pipeline: ft.Result, tmp_path: Path) -> None:
    written = events(undisturbed_pipeline, "LogWritten")
    agreed = STEPS * (4 + 3) * 8
    crossing = {2: STEPS * 2 * 32 * 64 * 4, 1: STEPS * 32 * 64 * 4}  # two boundaries of [32, 64] floats, for the middle stage
    assert sorted(e["payload_bytes"] - agreed for e in written) == sorted([crossing[1], crossing[2], crossing[1]])
    result = pipeline(tmp_path, "run", log=ft.LogConfig(enabled=False))
    assert result.digest == undisturbed_pipeline.digest


def fault(rank: int, step: int, phase: str, micro_batch: int | None = None, **more: Any) -> ft.FailAt:
    return ft.FailAt(rank=rank, step=step, phase=phase, micro_batch=micro_batch, **more)


def survivors_changed(result: ft.Result, recovery: ft.Recovery) -> list[str]:
    """Those who hold something else after a recovery than before it, by the hashes of their state."""
    before, after = (
        {r["member"]: r["digests"] for r in events(result, name) if r["incarnation"] == recovery.incarnation}
        for name in ("Reconciled", "Filled")
    )
    survivors = [member for member, digests in before.items() if digests and member in after]
    assert len(survivors) == recovery.world_after - len(recovery.lost)
    return [member for member in survivors if before[member] != after[member]]


PHASES_OF_A_STAGE = [
    *(("forward", 0), ("forward", 3)),  # 1F1B warms up (but for the last stage), and goes one forward, one backward
    *(("backward_pass", 0), ("backward_pass", 3)),  # that; and it cools down
    *(("send", 1), ("receive", 2), ("update", None), ("commit", None)),
]


@pytest.mark.long
@pytest.mark.parametrize("stage", range(STAGES))
def test_a_stage_dies_in_every_phase_one_after_the_other(undisturbed_pipeline: ft.Result, tmp_path: Path, stage: int) -> None:
    faults = [fault(stage, 2 * number + 2, *phase) for number, phase in enumerate(PHASES_OF_A_STAGE)]
    result = pipeline(tmp_path, "run", faults=faults)
    assert result.digest == undisturbed_pipeline.digest
    assert promise_kept(result) == []
    assert len(list((Path(result.path) / "faults").iterdir())) == len(faults), "every fault has struck"
    assert {(r.strategy, r.guarantee) for r in result.recoveries} == {(Strategy.LOGGING, Guarantee.EXACT)}
    assert all(r.redone == 0 for r in result.recoveries), "survivors kept what they had"
    assert [survivors_changed(result, recovery) for recovery in result.recoveries] == [[]] * len(faults)


@pytest.mark.long
def test_a_backward_pass_in_two_parts(in_one_piece: ft.Result, tmp_path: Path) -> None:
    """Stages die between the two, in the second, and in a replay."""
    how = {"task": Alike(), "schedule": "zero_bubble", "max_grad_norm": 0.5}
    calm = pipeline(tmp_path, "calm", **how)
    assert is_that_of(in_one_piece, calm)
    faults = [fault(2, 4, "weight_pass", 0), fault(1, 9, "backward_pass", 2), fault(1, 14, "weight_pass", 3)]
    result = pipeline(tmp_path, "run", **how, faults=[*faults, fault(1, 12, "replay")], checkpoints=NONE_YET)
    assert result.digest == calm.digest
    assert promise_kept(result) == []
    assert len(list((Path(result.path) / "faults").iterdir())) == 4, "every fault has struck"
    assert {(r.strategy, r.guarantee) for r in result.recoveries} == {(Strategy.LOGGING, Guarantee.EXACT)}


class Deep(Alike):
    """Many layers with something to train."""

    def __init__(self, hidden: int = 2, step_seconds: float = 0.0) -> None:
        super().__init__(step_seconds)
        self.hidden = hidden

    def model(self, stage: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(16, 32), *(Hidden() for _ in range(self.hidden)), torch.nn.Linear(32, 4))


class Hidden(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Tanh(), torch.nn.Linear(32, 32))


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["zero_bubble", "1f1b"])
def test_stages_of_several_chunks(cluster: Any, tmp_path: Path, schedule: str) -> None:
    """Two stages, each of which feeds the other in both passes; one replays with a helper, and then both by themselves."""
    whole = train(tmp_path, "whole", task=Deep(), workers=1, steps=STEPS, drop_last=True, max_grad_norm=0.5)
    how = {"task": Deep(), "split": (1, 2, 3), "schedule": schedule, "stages": 2, "workers": 2, "max_grad_norm": 0.5}
    how |= {"num_spares": 2, "num_pp_chunks": 2, "replay_workers": 2}
    calm = pipeline(tmp_path, "calm", **how)
    for a, b in zip(weights(Deep(), whole), weights(Deep(), calm), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    faults = [fault(1, 5, "forward", 6), fault(0, 9, "backward_pass", 5), fault(1, 13, "send", 1), fault(1, 12, "replay")]
    how |= {"task": Deep(step_seconds=UNHURRIED), "checkpoints": NONE_YET}
    result = pipeline(tmp_path, "run", **how, faults=faults)
    assert result.digest == calm.digest
    assert promise_kept(result) == []
    assert "by 2 workers" in result.recoveries[0].reason
    assert len(list((Path(result.path) / "faults").iterdir())) == len(faults), "every fault has struck"
    assert {(r.strategy, r.guarantee) for r in result.recoveries} == {(Strategy.LOGGING, Guarantee.EXACT)}
    exported = tmp_path / "model.safetensors"
    CliRunner().invoke(main, ["checkpoints", "export", result.path, str(exported)], catch_exceptions=False)
    assert load_file(exported).keys() == Deep().model(0).state_dict().keys()


@pytest.mark.long
def test_first_and_last_of_several_chunks_die_together(cluster: Any, tmp_path: Path) -> None:
    """They are no neighbours, but the last feeds the first."""
    how = {"task": Deep(hidden=4), "split": (1, 2, 3, 4, 5), "num_pp_chunks": 2, "num_spares": 2, "schedule": "gpipe"}
    calm = pipeline(tmp_path, "calm", **how)
    result = pipeline(tmp_path, "run", **how, faults=[fault(rank, 9, "data", together=2) for rank in (0, 2)])
    assert result.digest == calm.digest
    assert promise_kept(result) == []
    assert [len(r.lost) for r in result.recoveries] == [2]
    assert {(r.strategy, r.guarantee) for r in result.recoveries} == {(Strategy.LOGGING, Guarantee.EXACT)}


class Tied(Alike):
    """The first layer's weights are the last one's, too."""

    def model(self, stage: int) -> torch.nn.Module:
        first, last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        last.weight = first.weight
        return torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), last)


class TiedStages(Tied):
    """The same, in two stages that the task gives."""

    def model(self, stage: int) -> torch.nn.Module:
        layers = list(super().model(0))
        return torch.nn.Sequential(*(layers[:3] if stage == 0 else layers[3:]))

    def tied(self) -> list[tuple[str, str]]:
        return [("0.0.weight", "1.1.weight")]


def copies(result: ft.Result, names: dict[int, str]) -> list[torch.Tensor]:
    """Of a shared parameter, by what it is called in each stage."""
    return [read_tensors(Path(result.path) / f"final-stage-{stage}.arrow")[0][name] for stage, name in names.items()]


SHARING = [
    *(fault(0, 3, "tied"), fault(2, 6, "tied"), fault(1, 8, "forward", 1)),
    *(fault(rank, 11, "data", together=2) for rank in (0, 2)),  # who share something replay it together
    *(fault(2, 15, "update"), fault(2, 14, "replay")),
]


@pytest.mark.long
def test_stages_that_share_weights_train_them_as_one(cluster: Any, tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", task=Tied(), workers=1, steps=STEPS, drop_last=True, max_grad_norm=0.5)
    how = {"task": Tied(), "split": (2, 4), "max_grad_norm": 0.5, "num_spares": 2}
    calm = pipeline(tmp_path, "calm", **how)
    for a, b in zip(weights(Tied(), whole), weights(Tied(), calm), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    first, last = copies(calm, {0: "0.weight", 2: "0.weight"})
    assert torch.equal(first, last)
    result = pipeline(tmp_path, "run", **how, faults=SHARING, checkpoints=NONE_YET)
    assert result.digest == calm.digest
    assert promise_kept(result) == []
    assert len(list((Path(result.path) / "faults").iterdir())) == len(SHARING), "every fault has struck"
    assert {(r.strategy, r.guarantee) for r in result.recoveries} == {(Strategy.LOGGING, Guarantee.EXACT)}


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 4])
def test_neighbours_that_share_weights(cluster: Any, tmp_path: Path, workers: int) -> None:
    """By themselves with a helper, and with replicas all of which are lost."""
    how = {"task": TiedStages(), "split": "task", "stages": 2, "workers": workers, "micro_batches": 2, "num_spares": 2}
    helped = {"replay_workers": 2, "task": TiedStages(UNHURRIED), "checkpoints": NONE_YET}
    calm = pipeline(tmp_path, "calm", **how)
    how |= helped if workers == 2 else {"strategy": "logging"}
    assert torch.equal(*copies(calm, {0: "0.weight", 1: "1.weight"}))
    result = pipeline(tmp_path, "run", **how, faults=[fault(rank, 9, "data") for rank in range(1, workers, 2)])
    assert result.digest == calm.digest
    assert promise_kept(result) == []
    assert workers == 4 or "by 2 workers" in result.recoveries[0].reason
    assert {(r.strategy, r.guarantee) for r in result.recoveries} == {(Strategy.LOGGING, Guarantee.EXACT)}


TOGETHER = {
    "neighbours": (fault(0, 3, "data", together=2), fault(1, 3, "data", together=2)),
    "two apart": (fault(0, 8, "data", together=2), fault(2, 8, "data", together=2)),
    # with its second micro-batch the neighbour has begun the step for certain, so its fault is due
    "a neighbour during the recovery": (fault(1, 12, "forward", 2), fault(2, 12, "reconcile")),
    "the replacement in its replay": (fault(1, 17, "forward", 1), fault(1, 14, "replay")),
}


def test_several_losses_at_once(undisturbed_pipeline: ft.Result, tmp_path: Path) -> None:
    faults = [fault for pair in TOGETHER.values() for fault in pair]
    result = pipeline(tmp_path, "run", faults=faults, num_spares=2, checkpoints=NONE_YET)
    assert result.digest == undisturbed_pipeline.digest
    assert promise_kept(result) == []
    assert {r.strategy for r in result.recoveries} == {Strategy.LOGGING}
    assert len(list((Path(result.path) / "faults").iterdir())) == len(faults), "every fault has struck"
    assert [len(r.lost) for r in result.recoveries[:2]] == [2, 2], "together"


class Dawdling(Toy):
    """Its first stage takes its time, in a replay too."""

    def model(self, stage: int) -> torch.nn.Module:
        model = super().model(stage)
        model[0].register_forward_pre_hook(lambda *_: time.sleep(0.03))  # type: ignore[operator]
        return model


def kill_in_a_replay(name: str, rank: int, struck: list[str], refused: list[str]) -> None:
    """Kills this rank's worker as soon as it is seen that another stage is replayed. Before that it is asked to sleep."""
    deadline = time.monotonic() + 120
    while not struck and time.monotonic() < deadline:
        time.sleep(0.02)
        with suppress(ValueError, RayError):  # it is not there yet
            account = ray.get(ray.get_actor(f"supervisor:{name}", namespace=NAMESPACE).status.remote(), timeout=10)
            if not refused and account["state"] == "RUNNING":
                try:
                    ft.suspend(name, rank)
                except ConfigError as error:
                    refused.append(str(error))
            if account["state"] == "REBUILD":
                member = account["world"][rank]
                os.kill(account["pids"][member], signal.SIGKILL)
                struck.append(member)


@pytest.mark.long
def test_a_stage_dies_while_another_is_replayed(undisturbed_pipeline: ft.Result, tmp_path: Path) -> None:
    """They are no neighbours: who replays the first one goes on where it stood."""
    struck: list[str] = []
    refused: list[str] = []
    striker = threading.Thread(target=kill_in_a_replay, args=("run", 2, struck, refused), daemon=True)
    striker.start()
    # with a checkpoint of the step before, as there may be one, nothing would be replayed
    faults = [fault(0, 18, "forward", 1)]
    result = pipeline(tmp_path, "run", task=Dawdling(), faults=faults, num_spares=2, checkpoints=NONE_YET)
    striker.join(10)
    assert result.digest == undisturbed_pipeline.digest
    assert promise_kept(result) == []
    assert struck[0] in {member for recovery in result.recoveries for member in recovery.lost}
    assert refused == ["a stage of a pipeline cannot sleep: the others need what it computes"]
    assert {(r.strategy, r.guarantee) for r in result.recoveries} == {(Strategy.LOGGING, Guarantee.EXACT)}


@pytest.mark.long
def test_all_stages_die_and_everybody_goes_back_to_the_checkpoint(undisturbed_pipeline: ft.Result, tmp_path: Path) -> None:
    faults = [fault(rank, 12, "data", together=STAGES) for rank in range(STAGES)]
    result = pipeline(tmp_path, "run", faults=faults, checkpoints=ft.CheckpointConfig(every=5))
    assert result.digest == undisturbed_pipeline.digest
    assert [r.strategy for r in result.recoveries] == [Strategy.CHECKPOINT]
    assert promise_kept(result) == []


def test_a_frozen_stage_replays_from_a_checkpoint_and_the_log_is_trimmed(
    undisturbed_pipeline: ft.Result, tmp_path: Path
) -> None:
    faults = [fault(1, 13, "forward", 2, action="sigstop")]
    result = pipeline(tmp_path, "run", faults=faults, checkpoints=ft.CheckpointConfig(every=5))
    assert result.digest == undisturbed_pipeline.digest
    (recovery,) = result.recoveries
    assert recovery.strategy == Strategy.LOGGING
    assert recovery.replayed <= 8, "no further back than the checkpoint before the newest"
    assert not (Path(result.path) / "logs").exists(), "nothing is left of the log after the run"


@pytest.mark.long
def test_a_run_goes_on_where_it_ended(undisturbed_pipeline: ft.Result, tmp_path: Path) -> None:
    often = ft.CheckpointConfig(every=5)
    pipeline(tmp_path, "run", steps=8, checkpoints=often)
    result = pipeline(tmp_path, "run", checkpoints=often)
    assert result.digest == undisturbed_pipeline.digest
    assert events(result, "Resumed")[0]["step"] == 8
    exported = tmp_path / "model.safetensors"
    outcome = CliRunner().invoke(main, ["checkpoints", "export", result.path, str(exported)])
    assert outcome.exit_code == 0, outcome.output
    trained, tensors = ft.load_model(Toy(), result).state_dict(), load_file(exported)
    assert tensors.keys() == trained.keys() == Toy().model(0).state_dict().keys(), "the names of the model in one piece"
    assert all(torch.equal(tensors[name], trained[name]) for name in trained)
    stored = ft.load_model(Toy(), result.checkpoint).state_dict()
    assert all(torch.equal(stored[name], trained[name]) for name in trained)


@pytest.mark.parametrize("sums", ["exact", pytest.param("fast", marks=pytest.mark.long)])
def test_survivors_help_with_the_replay_and_come_back_to_their_own_state(
    in_one_piece: ft.Result, calm_stages: ft.Result, tmp_path: Path, sums: Any
) -> None:
    faults = [fault(1, 9, "forward", 1)]
    how = {"max_grad_norm": 0.5, "replay_workers": 3, "replay_sums": sums, "checkpoints": NONE_YET}
    result = pipeline(tmp_path, "run", task=Alike(UNHURRIED), faults=faults, **how)
    (recovery,) = result.recoveries
    assert "by 3 workers" in recovery.reason
    if sums == "exact":
        assert result.digest == calm_stages.digest
        assert recovery.guarantee == Guarantee.EXACT
    else:
        assert is_that_of(in_one_piece, result)
        assert recovery.guarantee == Guarantee.ROUNDING
    assert survivors_changed(result, recovery) == [], "they hold what they held before they helped"


class Crowded(Alike):
    """Its workers have no memory for another stage beside their own."""

    def __init__(self, pace_s: float, disk: str = aside.DISK) -> None:
        super().__init__(pace_s)
        self._disk = disk

    def model(self, stage: int) -> torch.nn.Module:
        if ray.get_runtime_context().get_actor_id() is not None:  # not in the driver, which is this process
            answers = itertools.cycle([False, True])  # beside its own there is no room, without it there is
            aside.fits_beside, aside.DISK = (lambda *_: next(answers)), self._disk
        return super().model(stage)


class Forgetful(Crowded):
    """Its workers do not get back what they have set aside."""

    def model(self, stage: int) -> torch.nn.Module:
        if ray.get_runtime_context().get_actor_id() is not None and not hasattr(aside, "forgets"):
            real, aside.forgets = aside._have_back, True  # pyright: ignore

            def have_back(regions: Any, hashes: list[str], file: Any) -> None:
                real(regions, ["of something else" for _ in hashes], file)

            aside._have_back = have_back
        return super().model(stage)


@pytest.mark.long
def test_helpers_without_room_for_two_stages_have_their_own_on_the_disk(calm_stages: ft.Result, tmp_path: Path) -> None:
    result = pipeline(tmp_path, "run", task=Crowded(UNHURRIED), faults=[fault(1, 9, "forward", 1)], **HELPED)
    (recovery,) = result.recoveries
    assert "by 3 workers" in recovery.reason
    assert (result.digest, recovery.guarantee) == (calm_stages.digest, Guarantee.EXACT)
    assert survivors_changed(result, recovery) == [], "they hold what they held before they helped"
    helpers = {e["member"]: e["size"] for e in events(result, "SetAside")}
    assert len(helpers) == 2
    assert all(size > 0 for size in helpers.values())


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_while_states_are_on_the_disk(calm_stages: ft.Result, tmp_path: Path, rank: int) -> None:
    """Of a helper, with which the only copy of its stage goes; and of who is helped: the helpers have theirs back."""
    faults = [fault(1, 9, "forward", 1), fault(rank, 5, "replay")]
    result = pipeline(tmp_path, "run", task=Crowded(UNHURRIED), faults=faults, **HELPED)
    assert result.digest == calm_stages.digest
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert (len(recovery.lost), recovery.attempts) == (2, 2), "nobody else was lost with it"


@pytest.mark.long
def test_helpers_that_do_not_get_their_states_back_have_lost_their_stages(calm_stages: ft.Result, tmp_path: Path) -> None:
    task = Forgetful(UNHURRIED)
    result = pipeline(tmp_path, "run", task=task, faults=[fault(1, 9, "forward", 1)], **HELPED)
    assert result.digest == calm_stages.digest
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert "has lost stage 0" in recovery.cause or "has lost stage 2" in recovery.cause
    assert "stages 0, 2 had no replica left" in recovery.reason


@pytest.mark.long
def test_helpers_that_have_room_nowhere_do_not_help(calm_stages: ft.Result, tmp_path: Path) -> None:
    """The disk refuses what they hold, which they keep, and the stage is replayed by its replacement alone."""
    task = Crowded(UNHURRIED, str(tmp_path / "no such directory"))
    result = pipeline(tmp_path, "run", task=task, faults=[fault(1, 9, "forward", 1)], **HELPED)
    assert result.digest == calm_stages.digest
    assert promise_kept(result) == []
    (recovery,) = result.recoveries
    assert recovery.attempts > 1
    assert events(result, "SetAside") == []


def test_a_helper_killed_in_the_replay_is_a_stage_lost_as_well(calm_stages: ft.Result, tmp_path: Path) -> None:
    """Rank 0 helps to replay stage 1; with it goes the only copy of stage 0, which is replayed then, too."""
    faults = [fault(1, 9, "forward", 1), fault(0, 5, "replay")]
    result = pipeline(tmp_path, "run", task=Alike(UNHURRIED), faults=faults, **HELPED)
    assert promise_kept(result) == []
    assert result.digest == calm_stages.digest
    (recovery,) = result.recoveries
    assert (len(recovery.lost), recovery.attempts, recovery.guarantee) == (2, 2, Guarantee.EXACT)
    assert "stages 0, 1" in recovery.reason, recovery.reason


def test_a_log_that_is_full_means_going_back_to_the_checkpoint(undisturbed_pipeline: ft.Result, tmp_path: Path) -> None:
    result = pipeline(
        tmp_path,
        "run",
        faults=[fault(1, 13, "forward", 1)],
        log=ft.LogConfig(quota_bytes=20_000),
        checkpoints=ft.CheckpointConfig(every=10),
    )
    assert result.digest == undisturbed_pipeline.digest
    reasons = [e["reason"] for e in events(result, "LogFailed")]
    assert any("20000 bytes is used up, of which checkpoints need" in reason for reason in reasons), reasons
    assert [r.strategy for r in result.recoveries] == [Strategy.CHECKPOINT]


class Slow(Toy):
    """Leaves the time to damage its log."""

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        time.sleep(0.03)
        return super().loss(output, batch)


def damage(log: Path) -> None:
    """Flips bits in the middle of everything that has been logged."""
    for path in log.glob("*.arrow"):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"\xa5" * 64)


@pytest.mark.long
def test_a_damaged_log_is_not_replayed(undisturbed_pipeline: ft.Result, tmp_path: Path) -> None:
    def wait_and_damage() -> None:
        records, deadline = tmp_path / "run" / "events.jsonl", time.monotonic() + 60
        while time.monotonic() < deadline:
            if records.exists() and any(r.get("stop_step", 0) > 6 for r in read_records(records)):
                damage(tmp_path / "run" / "logs")
                return
            time.sleep(0.05)

    thread = threading.Thread(target=wait_and_damage)
    thread.start()
    faults = [fault(1, 19, "forward", 1)]
    how = {"checkpoints": ft.CheckpointConfig(every=100), "log": ft.LogConfig(memory_bytes=2**14)}  # it is written as it goes
    result = pipeline(tmp_path, "run", task=Slow(), faults=faults, **how)
    thread.join()
    assert result.digest == undisturbed_pipeline.digest, "from the beginning, for there is no checkpoint yet"
    (recovery,) = result.recoveries
    assert recovery.strategy == Strategy.CHECKPOINT
    assert "damaged" in recovery.cause or "is not there" in recovery.cause, recovery.cause


class Noise(torch.nn.Module):
    """Draws from where nobody can draw the same again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(time.monotonic_ns()))


class Nondeterministic(Toy):
    def model(self, stage: int) -> torch.nn.Module:
        layers = [torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), Noise(), torch.nn.Linear(64, 4)]
        return torch.nn.Sequential(*layers)


def test_a_replay_that_diverges_is_noticed_and_the_record_says_so(cluster: Any, tmp_path: Path) -> None:
    how = {"task": Nondeterministic(), "split": (2, 4), "checkpoints": ft.CheckpointConfig(every=5)}
    result = pipeline(tmp_path, "run", faults=[fault(1, 13, "forward", 1)], **how)
    (recovery,) = result.recoveries
    assert "is another than before" in recovery.cause
    assert (recovery.strategy, recovery.guarantee) == (Strategy.CHECKPOINT, Guarantee.ROUNDING)

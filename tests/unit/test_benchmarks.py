"""What benchmarks say of what they could not measure, or only in part."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from ray.exceptions import GetTimeoutError, RayError

from benchmarks import checkfreq, detection, exactness, forward, goodput, paced, recovery, step_overhead, undo
from benchmarks.harness import FEWEST, Report, median_ratio, p95_of, percentile, total_ratio
from benchmarks.peers.kills import Kill
from raytrain_ft.drill.played import Played
from raytrain_ft.result import Result
from raytrain_ft.storage.arrow import write_tensors
from raytrain_ft.training.memory import STREAMING

SKIPPED = "SKIPPED [11] tests/unit/test_crash_consistency.py:186: strace is not installed"


@pytest.mark.parametrize(
    ("said", "value", "why"),
    [
        ("....\n30 passed in 9.0s", 0.0, None),
        (f"{SKIPPED}\n19 passed, 11 skipped in 9.0s", None, "11 of its tests were skipped: strace is not installed"),
        (f"{SKIPPED}\n1 failed, 18 passed, 11 skipped in 9.0s", 1.0, None),
        ("2 errors in 1.0s", 2.0, None),
        ("no tests ran in 0.01s", None, "the tests did not run: no tests ran in 0.01s"),
        ("", None, "the tests did not run: "),
    ],
    ids=["all passed", "some skipped", "one failed, some skipped", "errors", "none ran", "nothing said"],
)
def test_no_crash_point_is_bad_only_where_all_were_tried(said: str, value: float | None, why: str | None) -> None:
    report = Report("checkfreq", checkfreq.GOALS)
    checkfreq.count_crashes(report, said)
    found = report._estimates["crash_points_without_valid_checkpoint"]
    assert (found.value, found.why) == (value, why)


def test_what_is_interrupted_tells_what_it_knows() -> None:
    report = Report("goodput", goodput.GOALS)
    with report.until_interrupted():
        report.add("samples_lost", 0.0)
        raise KeyboardInterrupt
    metrics = report.to_json()["metrics"]
    assert metrics["samples_lost"]["value"] == 0.0
    assert metrics["drain_pause_p95_steps"]["why"] == "this run did not measure it"


@pytest.mark.parametrize("share", [0.95, 0.99])
def test_a_percentile_is_bounded_as_often_as_it_says(share: float) -> None:
    """Of so many samples from a distribution whose percentile is known; a bootstrap of 30 missed it in three of four."""
    draws, truth, samples = np.random.default_rng(3), -np.log(1 - share), 2000
    for size in (400, 1000):
        found = [percentile(draws.exponential(size=size).tolist(), share) for _ in range(samples)]
        assert not any(one.open for one in found)
        assert sum(one.high < truth for one in found) <= 0.035 * samples
        assert sum(one.low > truth for one in found) <= 0.035 * samples


def test_too_few_observations_bound_no_percentile() -> None:
    for share, fewest in ((0.95, 72), (0.99, 368)):
        for size, is_open in ((fewest - 1, True), (fewest, False)):
            found = percentile(range(size), share)
            assert (found.open, found.high) == (is_open, size - 1)
    assert str(percentile([1.0, 2.0, 4.0], 0.95)) == "3.8 [2, largest 4] (n=3)"
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 0.95)


@pytest.mark.parametrize(("seconds", "verdict"), [(0.2, "met"), (9.0, "NOT met")])
def test_of_few_observations_no_percentile_is_judged(seconds: float, verdict: str) -> None:
    """All that a few show is their largest; what a median or a single number is judged by stays as it is."""
    report = Report("recovery", recovery.GOALS)
    judged = "all met" if verdict == "met" else verdict
    for number, said in ((1, "too few"), (FEWEST - 1, "too few"), (FEWEST, judged), (72, verdict)):
        report.add("detect_sigstop_p95_s", [seconds] * number, statistic=p95_of)
        assert report.verdict("detect_sigstop_p95_s") == said
    report.add("full_strength_ratio_vs_torchft", [seconds] * 2)
    report.add("samples_lost", seconds)
    assert report.verdict("full_strength_ratio_vs_torchft") == verdict
    assert report.verdict("samples_lost") == "NOT met"
    shown = Report("forward", forward.GOALS)
    shown.add("suspend_latency_p95_steps", [seconds], statistic=p95_of)
    assert shown.verdict("suspend_latency_p95_steps") == "report"


def test_throughputs_compare_by_all_of_the_time() -> None:
    """A step that stands still now and then costs what it costs, however rarely; and what drifts alike cancels out."""
    drift = [1.0, 1.3, 0.8, 1.1]
    same = total_ratio([[d, d] for d in drift], [[d / 2] * 3 for d in drift])
    assert (same.value, same.low, same.high) == pytest.approx((2.0, 2.0, 2.0))
    halts = total_ratio([[1.0, 1.0]] * 19 + [[1.0, 3.0]], [[1.0]] * 20)
    assert halts.value == pytest.approx(1.05)
    assert halts.low == pytest.approx(1.0)
    assert halts.value < halts.high <= 1.3
    with pytest.raises(ValueError, match="same number of blocks"):
        total_ratio([[1.0]], [])


def test_what_varies_on_either_side_is_in_the_interval_of_a_ratio() -> None:
    ours, theirs = [1.0, 1.0, 1.0, 3.0, 3.0], [10.0] * 5
    one = median_ratio(ours, theirs)
    assert (one.value, one.low, one.high) == (0.1, 0.1, 0.3)
    other = median_ratio(theirs, ours)
    assert (other.value, round(other.low, 2), other.high) == (10.0, 3.33, 10.0)
    with pytest.raises(ValueError, match="both sides"):
        median_ratio([1.0], [])


def test_the_undo_is_compared_with_its_step_at_each_size() -> None:
    ratios = {key for key in undo.GOALS if key.startswith("undo_ratio_")}
    assert ratios == {f"undo_ratio_{name}{size}" for name in undo.TIMED for size in undo.SIZES.values()}
    assert undo.SIZES.keys() == undo.WIDTHS.keys()


def test_goodput_says_how_many_failures_could_not_strike(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    report = Report("goodput", goodput.GOALS)
    goodput._add_share(report, 15, [Played(path=tmp_path, missed=[3, 4])], Played(path=tmp_path), steps_per_s=1.0, run_s=30.0)
    assert "mean time between failures 15 s: 0 kills in 0.0 s, 0 steps; 2 more were due when it ended" in report._notes
    assert report.verdict("committed_share_mtbf_15") == "n/a"


@pytest.mark.parametrize("seconds", [15, 40, 400])
def test_what_is_left_of_training_is_measured_as_long_as_kills_are_drawn(seconds: int, tmp_path: Path) -> None:
    """As with others: where a run goes on for longer, nobody dies there, and that makes up for nothing."""
    commits = [(5.0 + at, at // 2 if at <= 30 else at - 15) for at in range(1, seconds + 1)]  # at half the pace for 30 s
    records = [{"event": "State", "state": "RUNNING", "at": 5.0}]
    records += [{"event": "StepsCommitted", "first_step": 0, "stop_step": step, "at": at} for at, step in commits]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = goodput.shares(Played(path=tmp_path), steps_per_s=1.0, run_s=30.0, window_s=6.0)
    assert np.mean(found) == pytest.approx(0.5, abs=0.04)


def test_all_are_struck_at_the_same_moments_and_each_run_at_others() -> None:
    runs = [goodput.kill_times(0, mtbf, number, 2000.0) for mtbf in (15, 60) for number in range(3)]
    assert goodput.kill_times(0, 15, 0, 2000.0) == runs[0]
    for kills, mtbf in zip(runs, (15, 15, 15, 60, 60, 60), strict=True):
        assert 0 < kills[0] <= kills[-1] < 2000
        assert 0.6 * 2000 / mtbf < len(kills) < 1.5 * 2000 / mtbf
    firsts = [round(kills[0] / mtbf, 6) for kills, mtbf in zip(runs, (15, 15, 15, 60, 60, 60), strict=True)]
    assert len(set(firsts)) == len(runs), "no two are the same draw, stretched"


def test_the_mean_of_stretches_is_judged_with_their_spread() -> None:
    """3.8 % on average may be 4.3 %: a mean without its interval would be within half a point of 3.5 %."""
    spread = checkfreq.error_points([0.024, 0.105, *[0.0364] * 28], bound=True)
    assert (spread.value or 0) < 0.5 < spread.high
    assert 0.0 <= spread.low < 0.1
    assert spread.n == 30
    below = checkfreq.error_points([-0.3] * 5, bound=True)
    assert below.value == pytest.approx(33.5), "a baseline that was too slow is no budget that was kept"
    assert checkfreq.error_points([-0.3] * 5, bound=False).high == 0.0


def test_what_is_not_a_number_is_no_small_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the benchmark nor in the demo."""
    monkeypatch.setitem(sys.modules, "train_digits", SimpleNamespace(Digits=object, accuracy=None))
    demo, files = runpy.run_path(str(Path(__file__).parents[2] / "jobs" / "demo.py")), []
    for name, value in (("ours", float("nan")), ("theirs", 1.0)):
        files.append(str(tmp_path / f"{name}.arrow"))
        write_tensors(files[-1], {"a": torch.ones(3), "b": torch.full((3,), value)}, {})
    ours, theirs = (Result({}, "", final_state=file) for file in files)
    for distance in (exactness.distance, demo["distance"]):
        assert distance(theirs, theirs) == 0.0
        assert not distance(ours, theirs) <= 1e-5


def test_a_run_that_was_not_struck_is_no_killed_run(tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    with pytest.raises(RuntimeError, match="of 1 kills 0 struck"):
        exactness.check_struck([Result({}, str(tmp_path))], 1)


def test_a_step_again_is_one_that_nobody_had_in_hand() -> None:
    """A smaller world's first step is, however soon; not if it only completed the interrupted one."""
    about = {"full_strength_s": 9.0, "caught_up_s": 9.0, "step_s": 0.45, "steps_redone": 0, "batches_dropped": 0}
    quick, completed, slow = (
        Kill(first_step_s=first, fewer_s=fewer, killed_at=at, **about)
        for at, first, fewer in ((1.0, 1.6, 0.42), (11.0, 0.6, 0.1), (21.0, 0.7, 0.7))
    )
    told = ((101.1, False), (105.0, False), (111.1, True), (121.1, False))  # nobody was killed at 105: it is nobody's
    records = [{"event": "Recovery", "lost": ["w1"], "detected": at, "completes": completes} for at, completes in told]
    grown = [{"event": "Recovery", "lost": [], "detected": at + 1.0, "completes": False} for at, _ in told]
    records = [record for pair in zip(records, grown, strict=True) for record in pair]
    assert recovery.steps_again([quick, completed, slow], records, 100.0) == [0.42, 0.6, 0.7]


def test_all_sides_of_a_step_write_large_copies_past_the_caches_as_ours_do() -> None:
    assert step_overhead.EQUAL_TERMS.items() >= STREAMING.items()


STARTER = """
import os, subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", *sys.argv[1:], str(os.getpid())]).pid, flush=True)
time.sleep(60)
"""


def test_who_keeps_the_disk_busy_ends_with_whoever_started_it(tmp_path: Path) -> None:
    file = tmp_path / "written"
    with subprocess.Popen([sys.executable, "-c", STARTER, paced.THIEF, str(file)], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        thief = psutil.Process(int(starter.stdout.readline()))
        try:
            deadline = time.monotonic() + 30
            while not file.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert file.exists(), "it goes on as long as that lives"
            starter.kill()
            thief.wait(30)
        finally:
            starter.kill()
            if thief.is_running():
                thief.kill()


def test_who_keeps_a_processor_busy_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([5, 5, 5, 1])
    monkeypatch.setattr(exactness.os, "nice", lambda more: 0)
    monkeypatch.setattr(exactness.os, "getppid", lambda: next(parents))
    exactness.spin(5)
    assert list(parents) == [], "it went on as long as that lived"


def test_what_ray_does_not_tell_of_is_no_time_in_which_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer to a call that was waited for too long is one of its errors, too."""
    answers = {"unplugged": GetTimeoutError(), "frozen_node": RayError(), "killed_raylet": RayError()}

    def get(asked: str | list[str], timeout: float) -> None:
        if isinstance(asked, str):
            raise answers[asked]

    def actor(kind: str) -> SimpleNamespace:
        ready, rest = (SimpleNamespace(remote=lambda said=said: said) for said in ("ready", kind))
        return SimpleNamespace(__ray_ready__=ready, rest=rest)

    kinds = iter(detection.KINDS)
    remote = SimpleNamespace(options=lambda **about: SimpleNamespace(remote=lambda: actor(next(kinds))))
    cluster: Any = SimpleNamespace(**dict.fromkeys(("unplug", "freeze_node", "kill_node"), lambda node: None))
    cluster.add_node = lambda: "0" * 56
    monkeypatch.setattr(detection, "ray", SimpleNamespace(remote=lambda kind: remote, get=get))
    monkeypatch.setattr(detection.time, "sleep", lambda seconds: None)
    watch = detection.RayWatch(cluster)
    watch.wait()
    assert watch.seconds.keys() == {"frozen_node", "killed_raylet"}
    assert str(watch) == "unplugged nothing within 150 s, frozen_node 0.0 s, killed_raylet 0.0 s"

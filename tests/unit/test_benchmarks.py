"""What benchmarks say of what they could not measure, or only in part."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import checkfreq, forward, goodput, recovery, undo
from benchmarks.harness import FEWEST, Report, p95_of, total_ratio
from benchmarks.peers.kills import Kill
from raytrain_ft.drill.played import Played

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


@pytest.mark.parametrize(("seconds", "verdict"), [(0.2, "met"), (9.0, "NOT met")])
def test_of_few_observations_no_percentile_is_judged(seconds: float, verdict: str) -> None:
    """All that a few show is their largest; what a median or a single number is judged by stays as it is."""
    report = Report("recovery", recovery.GOALS)
    for number, said in ((1, "too few"), (FEWEST - 1, "too few"), (FEWEST, verdict)):
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


def test_the_undo_is_compared_with_its_step_at_each_size() -> None:
    ratios = {key for key in undo.GOALS if key.startswith("undo_ratio_")}
    assert ratios == {f"undo_ratio_{name}{size}" for name in undo.TIMED for size in undo.SIZES.values()}
    assert undo.SIZES.keys() == undo.WIDTHS.keys()


def test_goodput_says_how_many_failures_could_not_strike(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    report = Report("goodput", goodput.GOALS)
    goodput._add_share(report, 15, Played(path=tmp_path, dropped=3), Played(path=tmp_path), steps_per_s=1.0)
    said = "mean time between failures 15 s: 0 kills in 0.0 s, 0 steps; 3 more were drawn and could not strike"
    assert said in report._notes


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

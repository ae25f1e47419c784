"""The audit accepts every honest log, and none that was damaged so as to hide a lost or repeated sample."""

from __future__ import annotations

import copy
import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_ft.policy.audit import Audit, _claims, audit
from raytrain_ft.policy.audit_records import read_story
from raytrain_ft.policy.sampling import Position, Sampling, after_loss, digest_of_ids, next_batch, sample_ids, share

quick = settings(max_examples=60)
Record = dict[str, Any]


class Run:
    """Writes the log of a run, as the trainer would: `live` for some steps, then anything may happen."""

    def __init__(self, sampling: Sampling, max_steps: int) -> None:
        self.sampling, self.step, self.incarnation = sampling, 0, -1
        self.positions = [Position()]  # before each step
        self.records: list[Record] = [
            {
                "event": "RunStarted",
                "dataset_size": sampling.dataset_size,
                "global_batch_size": sampling.global_batch_size,
                "seed": sampling.seed,
                "shuffle": sampling.shuffle,
                "drop_last": sampling.drop_last,
                "max_steps": max_steps,
            }
        ]

    def resume(self, step: int, world_size: int) -> None:
        self.incarnation, self.step, self.world_size = self.incarnation + 1, step, world_size
        del self.positions[step + 1 :]
        self.records.append({"event": "Resumed", "incarnation": self.incarnation, "step": step, "world_size": world_size})

    def live(self, steps: int, witnesses: list[int] | None = None) -> None:
        """All ranks (or `witnesses`) do and record `steps` steps."""
        first, start = self.step, self.positions[self.step]
        batches = []
        for _ in range(steps):
            batch, after = next_batch(self.sampling, self.positions[-1])
            batches.append(batch)
            self.positions.append(after)
            self.step += 1
        for rank in range(self.world_size) if witnesses is None else witnesses:
            shares = [(batch, share(batch, rank, self.world_size)) for batch in batches]
            ids = [sample_ids(self.sampling, batch.epoch, mine, batch.owed) for batch, mine in shares]
            self.records.append(
                {
                    "event": "StepsCommitted",
                    "member": f"w{rank}",
                    "rank": rank,
                    "world_size": self.world_size,
                    "incarnation": self.incarnation,
                    "first_step": first,
                    "stop_step": self.step,
                    "epoch": start.epoch,
                    "start": start.consumed,
                    "owed": [list(one) for one in start.owed],
                    "ids_digest": digest_of_ids(ids),
                }
            )

    def lose(self, step: int, epoch: int, start: int, stop: int, **more: Any) -> None:
        self.records.append(
            {"event": "SamplesLost", "step": step, "epoch": epoch, "start": start, "stop": stop, "why": "lossy", **more}
        )

    def owe(self, start: int, stop: int) -> None:
        """The last step lost these positions, which are to be read again."""
        batch, _ = next_batch(self.sampling, self.positions[-2])
        self.lose(self.step - 1, batch.epoch, start, stop, returned=True, incarnation=self.incarnation)
        self.positions[-1] = after_loss(self.sampling, batch, [(start, stop)])

    def finish(self) -> list[Record]:
        self.records.append({"event": "RunFinished", "steps": self.step})
        return self.records


def honest() -> Run:
    """20 samples, batches of 6 (4 steps an epoch), 10 steps: 4 by three workers, 5 from step 3 by two, 2 by three."""
    run = Run(Sampling(20, 6, seed=5), max_steps=10)
    run.resume(0, 3)
    run.live(2)
    run.live(2)
    run.resume(3, 2)
    run.live(5, witnesses=[1])
    run.resume(8, 3)
    run.live(2)
    run.finish()
    return run


def commits(run: Run) -> list[Record]:
    return [record for record in run.records if record["event"] == "StepsCommitted"]


def refused(records: list[Record], *words: str) -> Audit:
    result = audit(records)
    assert not result.ok
    for word in words:
        assert any(word in violation for violation in result.violations), (word, result.violations)
    return result


# ---------------------------------------------------------------- honest logs


def test_an_honest_log_is_accepted_and_counted() -> None:
    result = audit(honest().records)
    assert result == Audit(True, 10, 2, 20 + 20 + 12, 0, ())
    assert result.ok


@quick
@given(st.data())
def test_any_honest_history_is_accepted(data: st.DataObject) -> None:
    """Any worlds, any roll-backs, records of workers in any order, any witnesses (at least one of each stretch)."""
    size, drop_last = data.draw(st.integers(3, 30)), data.draw(st.booleans())
    sampling = Sampling(size, data.draw(st.integers(1, size)), 3, True, drop_last)
    run = Run(sampling, max_steps=200)
    run.resume(0, data.draw(st.integers(1, 4)))
    for _ in range(data.draw(st.integers(1, 5))):
        for _ in range(data.draw(st.integers(1, 3))):
            everybody = range(run.world_size)
            run.live(
                data.draw(st.integers(1, 6)),
                data.draw(st.lists(st.sampled_from(everybody), min_size=1, unique=True)),
            )
        run.resume(data.draw(st.integers(0, run.step)), data.draw(st.integers(1, 4)))
    run.live(data.draw(st.integers(1, 9)))
    finished = data.draw(st.booleans())
    records = run.finish() if finished else run.records
    own, others = [r for r in records if r["event"] != "StepsCommitted"], commits(run)
    random.Random(data.draw(st.integers(0, 9))).shuffle(others)
    cut = data.draw(st.integers(1, len(own)))
    result = audit([*own[:cut], *others, *own[cut:], {"event": "Something", "else": 1}])
    assert result.violations == ()
    assert (result.finished, result.steps) == (finished, run.step)
    assert result.epochs_complete == run.positions[-1].epoch
    per_epoch = size - size % sampling.global_batch_size if drop_last else size
    assert result.samples_used == per_epoch * result.epochs_complete + run.positions[-1].consumed
    assert result.samples_lost == 0


def test_a_log_that_begins_without_resumed_begins_at_step_0() -> None:
    run = honest()
    del run.records[1]
    assert audit(run.records).ok


def test_the_settings_may_lie_in_the_details_of_the_event() -> None:
    run = honest()
    details = {key: run.records[0].pop(key) for key in list(run.records[0]) if key != "event"}
    run.records[0]["details"] = details
    assert audit(run.records) == audit(honest().records)


def test_an_unfinished_run_is_audited_up_to_its_last_commit() -> None:
    result = audit(honest().records[:-1])
    assert (result.ok, result.finished, result.steps) == (True, False, 10)
    run = honest()  # a finished run that is told to go on is unfinished again
    run.records[0]["max_steps"] = 20
    run.resume(10, 1)
    run.live(1)
    result = audit(run.records)
    assert (result.ok, result.finished, result.steps) == (True, False, 11)


def test_void_commits_do_not_count_however_wrong_they_are() -> None:
    """A fenced worker's last words about steps that a younger incarnation took over."""
    run = honest()
    zombie = {**commits(run)[0], "first_step": 3, "stop_step": 4, "ids_digest": "0" * 32, "start": 7}
    run.records.append(zombie)
    assert audit(run.records) == audit(honest().records)


def test_weighted_shares() -> None:
    sampling, weights = Sampling(10, 10, 0), [3, 1, 0]
    run = Run(sampling, 1)
    run.resume(0, 3)
    batch, _ = next_batch(sampling, Position())
    run.live(1)
    for record in commits(run):
        mine = share(batch, record["rank"], 3, weights)
        record |= {"weights": weights, "ids_digest": digest_of_ids([sample_ids(sampling, 0, mine)])}
    assert audit(run.finish()).ok
    record = commits(run)[1]
    record["weights"] = [1, 1, 1]
    refused(run.records, "drew other samples")
    mine = share(batch, record["rank"], 3, [1, 1, 1])  # by its own account; but the ranks do not agree
    record["ids_digest"] = digest_of_ids([sample_ids(sampling, 0, mine)])
    refused(run.records, "weights")


# ---------------------------------------------------------------- losses


def test_lossy_forward_lists_the_share_of_the_casualty() -> None:
    run = Run(Sampling(12, 6, 1), 4)
    run.resume(0, 3)
    run.live(2, witnesses=[0, 1])
    run.lose(1, 0, 10, 12)  # rank 2's share of step 1
    run.resume(2, 2)
    run.live(2)
    result = audit(run.finish())
    assert result == Audit(True, 4, 2, 22, 2, ())


def debtor() -> Run:
    """12 samples, batches of 6: of the first, two are lost; of those that come again, one; then it comes again."""
    run = Run(Sampling(12, 6, 1), 6)
    run.resume(0, 3)
    run.live(1)
    run.owe(2, 4)
    run.live(2)
    run.owe(13, 14)
    run.live(1, witnesses=[0])
    run.live(1, witnesses=[0])
    return run


def test_what_was_lost_and_read_again_is_not_lost() -> None:
    run = debtor()
    assert run.positions[-1] == Position(1, 6)
    run.live(1)
    assert audit(run.finish()) == Audit(True, 6, 2, 24, 0, ())


def test_in_which_pieces_it_is_told_what_is_to_be_read_again_does_not_count() -> None:
    """Who told of a part of it was lost in the recovery, and those that were left lost more of the step."""
    run = debtor()
    whole = next(record for record in run.records if record["event"] == "SamplesLost")
    at = run.records.index(whole)
    run.records[at : at + 1] = [whole | {"start": 3}, whole | {"stop": 3}]
    run.live(1)
    assert audit(run.finish()) == Audit(True, 6, 2, 24, 0, ())
    for record in commits(run):
        record["owed"] = [[position, position + 1] for start, stop in record["owed"] for position in range(start, stop)]
    assert audit(run.records) == Audit(True, 6, 2, 24, 0, ())


def test_a_debt_that_is_not_paid_is_found() -> None:
    run = debtor()
    again = run.records[-2]
    refused([*run.records[:-2], again | {"owed": []}], "impossible")
    refused([*run.records[:-2], again | {"owed": [[2, 4], [9, 10]]}], "drew other samples")
    run.records[-3]["returned"] = False  # of the second loss: nothing was to come again
    refused(run.records, "step 3 drew")
    run = debtor()
    forgotten = [record for record in run.records if record.get("first_step") != 3]
    run.records = forgotten
    refused(run.records, "step 3: no commit of it stands")
    early = Run(Sampling(12, 6, 1), 4)
    early.resume(0, 1)
    early.live(1)
    early.lose(0, 0, 2, 4, returned=True)
    early.live(2)  # as if nothing were owed
    refused(early.records, "was next")


@pytest.mark.parametrize("owed", [[[4, 2]], [[1]], [1], "12", [["a", "b"]], [[True, 2]]])
def test_debts_that_are_none(owed: Any) -> None:
    run = debtor()
    commits(run)[0]["owed"] = owed
    refused(run.records, "unusable")


def test_a_skipped_step_without_commits_is_covered_when_all_of_it_is_listed() -> None:
    run = Run(Sampling(12, 6, 1), 4)
    run.resume(0, 2)
    run.live(2)
    del run.records[2:]  # nobody committed steps 0 and 1 ...
    run.lose(0, 0, 0, 6)  # ... which were both dropped
    run.lose(1, 0, 6, 12)
    run.resume(2, 2)
    run.live(2)
    assert audit(run.finish()) == Audit(True, 4, 2, 12, 12, ())
    run.records = [record for record in run.records if record.get("start") != 6]
    refused(run.records, "step 1: no commit", "6 samples neither drawn nor listed as lost, at positions [6, 12)")


@pytest.mark.parametrize("explicit", [False, True])
def test_a_step_that_goes_on_with_later_samples_must_list_those_passed_over(explicit: bool) -> None:
    run = Run(Sampling(12, 4, 1), 4)
    run.resume(0, 2)
    run.live(1)
    if explicit:
        run.lose(1, 0, 4, 8, incarnation=1)  # recorded before the incarnation that it belongs to
    run.resume(1, 1)
    if not explicit:
        run.lose(1, 0, 4, 8)
    run.positions[1] = Position(0, 8)
    run.live(3)
    assert audit(run.finish()) == Audit(True, 4, 1, 8 + 8, 4, ())
    without = [record for record in run.records if record["event"] != "SamplesLost"]
    refused(without, "step 1 drew", "4 samples neither drawn nor listed as lost, at positions [4, 8)")


def test_a_loss_is_void_when_its_step_is_done_again() -> None:
    run = Run(Sampling(12, 6, 1), 3)
    run.resume(0, 2)
    run.live(2)
    run.lose(1, 0, 6, 9)
    run.resume(1, 2)  # back to a checkpoint: step 1 is done again, with all its samples
    run.live(2)
    assert audit(run.finish()) == Audit(True, 3, 1, 18, 0, ())


@pytest.mark.parametrize(
    ("loss", "word"),
    [
        ({"step": 1, "epoch": 0, "start": 0, "stop": 2}, "that step drew"),
        ({"step": 0, "epoch": 0, "start": 4, "stop": 7}, "that step drew"),
        ({"step": 0, "epoch": 1, "start": 0, "stop": 2}, "that step drew"),
        ({"step": 9, "epoch": 0, "start": 0, "stop": 2}, "has no such step"),
        ({"step": 0, "epoch": 0, "start": 0, "stop": 2, "incarnation": 7}, "incarnation 7 was resumed"),
        ({"step": 0, "epoch": 0, "start": 2, "stop": 2}, "are none"),
        ({"step": 1, "epoch": 0, "start": 6, "stop": 99}, "the epoch has 12"),
        ({"step": 1, "epoch": 0, "start": 6, "stop": 2**62, "returned": True}, "the epoch has 12"),
    ],
)
def test_a_loss_that_fits_no_step_is_refused(loss: Record, word: str) -> None:
    run = Run(Sampling(12, 6, 1), 4)
    run.resume(0, 1)
    run.live(4)
    run.lose(**loss)
    refused(run.finish(), word)


def test_a_loss_listed_twice_is_refused() -> None:
    run = Run(Sampling(12, 6, 1), 4)
    run.resume(0, 1)
    run.live(4)
    run.lose(0, 0, 2, 4)
    run.lose(0, 0, 3, 4)
    refused(run.finish(), "1 samples listed as lost more than once, at positions [3, 4)")


@pytest.mark.parametrize(
    ("returned", "pieces"),
    [(False, [(2, 4)]), (False, [(2, 3), (3, 4)]), (False, [(3, 4)]), (False, []), (True, [(2, 4)]), (True, [(3, 4)])],
    ids=["in one", "in pieces", "in part", "untold", "returned", "returned in part"],
)
def test_what_an_earlier_run_and_its_checkpoint_both_list_as_lost_is_lost_once(
    returned: bool, pieces: list[tuple[int, int]]
) -> None:
    """The checkpoint was taken before a worker told of its last steps, which it then lived to do, and the next run begins with
    it."""
    run = Run(Sampling(12, 6, 1), 4)
    run.resume(0, 1)
    run.live(1)
    if returned:
        run.owe(2, 4)
        run.records.pop()
    for piece in pieces:
        run.lose(0, 0, *piece, returned=returned, incarnation=0)
    run.records.append(run.records[0] | {"stored": [{"name": "of the first run", "step": 1}]})
    run.lose(0, 0, 2, 4, returned=returned, incarnation=0)
    run.resume(1, 1)
    run.live(3)
    result = audit(run.finish())
    assert (result.violations, result.samples_lost) == ((), 0 if returned else 2)
    run.lose(1, 0, 6, 8, incarnation=1)
    run.lose(1, 0, 6, 8, incarnation=1)
    refused(run.records, "listed as lost more than once")


# ---------------------------------------------------------------- damaged logs


def test_a_missing_step_is_found() -> None:
    run = honest()
    run.records = [r for r in run.records if r.get("first_step") != 2]  # steps 2 and 3 of the first incarnation
    refused(run.records, "step 2: no commit of it stands", "at positions [12, 18)")


def test_a_missing_last_step_is_found() -> None:
    run = honest()
    run.records = [r for r in run.records if r.get("first_step") != 8]
    refused(run.records, "step 8: no commit of it stands", "step 9: no commit of it stands")


def test_commits_that_only_a_void_record_backs_are_missing() -> None:
    """The younger incarnation took steps over and never committed them: the older one's word is worth nothing."""
    run = honest()
    run.records = [r for r in run.records if not (r["event"] == "StepsCommitted" and r["incarnation"] == 1)]
    refused(run.records, "step 3: no commit of it stands")


def test_a_doubled_step_is_found() -> None:
    run = honest()
    refused([*run.records, commits(run)[0]], "step 0 was committed before by the same rank")


def test_a_step_that_was_done_again_within_a_longer_stretch_is_found() -> None:
    """Also if a shorter one came in between: what counts is the latest end of all."""
    run = Run(Sampling(100, 5, 0), 12)
    run.resume(0, 1)
    run.live(8)
    positions = list(run.positions)
    for first, steps in ((2, 2), (6, 6)):
        run.step, run.positions = first, positions[: first + 1]
        run.live(steps)
    found = [one for one in audit(run.finish()).violations if "was committed before" in one]
    assert [one.split(": ")[1] for one in found] == [
        f"step {step} was committed before by the same rank" for step in (2, 3, 6, 7)
    ]


def test_the_memory_of_a_proof_does_not_grow_with_the_ranks_of_each_step() -> None:
    def most(world_size: int) -> int:
        run = Run(Sampling(3200, 16, 0), 2000)
        run.resume(0, world_size)
        for _ in range(20):
            run.live(100)
        story = read_story(run.finish())
        story.begin_lineage()
        assert story.sampling is not None
        tracemalloc.start()
        try:
            _claims(story, story.sampling)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert most(16) < 1.5 * most(1)


def test_a_batch_drawn_twice_is_found() -> None:
    """Each rank's record is consistent in itself, but the second stretch begins where the first one did."""
    run = Run(Sampling(20, 5, 0), 4)
    run.resume(0, 2)
    run.live(2)
    run.positions[2] = Position(0, 5)
    run.live(2)
    refused(run.finish(), "step 2 drew", "5 samples drawn more than once, at positions [5, 10)")


def test_another_number_of_committed_steps_than_the_run_finished_with_is_found() -> None:
    run = honest()
    for steps, word in ((9, "step 9 is committed"), (11, "was to have 10")):
        run.records[-1] = {"event": "RunFinished", "steps": steps}
        refused(run.records, word)


def test_ranks_that_disagree_are_found() -> None:
    run = Run(Sampling(20, 5, 0), 4)
    run.resume(0, 2)
    run.live(4)
    other = Run(Sampling(20, 5, 0), 4)
    other.resume(0, 2)
    other.positions[0] = Position(0, 5)
    other.live(4)
    run.records[-1] = other.records[-1]  # rank 1 was one batch ahead all the time
    refused(run.finish(), "the ranks drew different batches")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"ids_digest": "0" * 32}, "it drew other samples"),
        ({"rank": 1, "member": "w1"}, "it drew other samples"),
        ({"start": 1}, "it drew other samples"),
        ({"epoch": 1}, "it drew other samples"),
        ({"start": 21}, "impossible"),
        ({"stop_step": 3}, "it drew other samples"),
        ({"stop_step": 11}, "the run has 10 steps"),
        ({"stop_step": 0}, "unusable"),
        ({"world_size": 2}, "others say 3"),
        ({"world_size": 0}, "unusable"),
        ({"rank": 3}, "unusable"),
        ({"rank": -1}, "unusable"),
        ({"rank": True}, "unusable"),
        ({"rank": "0"}, "unusable"),
        ({"member": "w9"}, "another member has this rank"),
        ({"member": "w1"}, "this member another rank"),
        ({"incarnation": 2}, "goes on from step 8"),
        ({"incarnation": 3}, "where this incarnation was resumed"),
        ({"first_step": None}, "unusable"),
        ({"epoch": 2**63}, "unusable"),
        ({"weights": "abc"}, "weights"),
    ],
)
def test_a_damaged_commit_is_found(change: Record, word: str) -> None:
    run = honest()
    position = [i for i, record in enumerate(run.records) if record["event"] == "StepsCommitted"][3]
    run.records[position] = {**run.records[position], **change}  # rank 0's second record
    refused(run.records, word)


@pytest.mark.parametrize("key", ["dataset_size", "global_batch_size", "seed", "shuffle", "max_steps"])
def test_a_damaged_beginning_is_found(key: str) -> None:
    run = honest()
    run.records[0][key] = {"shuffle": False, "max_steps": 9}.get(key, run.records[0][key] + 1)
    refused(run.records)
    del run.records[0][key]
    refused(run.records, "RunStarted", "nothing is proven")


def test_settings_that_change_and_incarnations_that_go_back_are_found() -> None:
    run = honest()
    refused([*run.records, {**run.records[0], "seed": 6}], "the run went on with")
    again = [record for record in run.records if record["event"] == "Resumed"][1]
    refused([*run.records, again], "was resumed after incarnation 2")


@pytest.mark.parametrize("step", [2, 4])
def test_a_wrong_step_of_resumption_is_found(step: int) -> None:
    run = honest()
    [record for record in run.records if record["event"] == "Resumed"][1]["step"] = step
    refused(run.records, "goes on from step 4" if step == 4 else "step 2: no commit of it stands")


@pytest.mark.parametrize("records", [[], [{}], [None], [{"event": 3}], honest().records[1:], honest().records[:2]], ids=str)
def test_a_log_without_evidence_proves_nothing(records: list) -> None:
    refused(records, "nothing is proven")


def test_a_run_that_began_anew_is_not_its_predecessor() -> None:
    """Of the same name, with another batch and fewer steps: what lies before its beginning is no part of it."""
    again = Run(Sampling(20, 5, seed=6), max_steps=4)
    again.records[0]["stored"] = []
    again.incarnation = 7
    again.resume(0, 2)
    again.live(4)
    result = audit([*honest().records, *again.finish()])
    assert result.violations == ()
    assert (result.steps, result.samples_used) == (4, 20)
    del again.records[0]["stored"]
    refused([*honest().records, *again.records], "the run went on with")


def test_a_run_that_goes_on_may_have_fewer_steps() -> None:
    """Its predecessor had come further when it was lost; its last checkpoint was of step 6. What it says of steps beyond the
    new end, such as samples that were lost there, is void and no fault."""
    run = honest()
    run.lose(9, 2, 6, 7, incarnation=2)
    run.records = [record for record in run.records if record["event"] != "RunFinished"]
    run.records.append({**run.records[0], "max_steps": 8, "stored": [{"name": "step-6", "step": 6}]})
    run.resume(6, 2)
    run.live(2)
    result = audit(run.finish())
    assert (result.violations, result.steps) == ((), 8)


def test_a_checkpoint_that_tells_of_endless_steps_is_refused_at_once() -> None:
    run = honest()
    damaged = {**commits(run)[0], "event": "StepsStored", "stop_step": 2**62}
    refused([*run.records, damaged], "as a checkpoint has it: its run has 10 steps")


@quick
@given(st.data())
def test_every_record_that_is_the_only_witness_is_missed(data: st.DataObject) -> None:
    """Take any record out of a log with one worker: the proof must fail, or the run must no longer claim its end."""
    run = Run(Sampling(data.draw(st.integers(2, 30)), data.draw(st.integers(1, 9)), 0), 50)
    run.resume(0, 1)
    for _ in range(data.draw(st.integers(1, 6))):
        run.live(data.draw(st.integers(1, 8)))
    records = run.finish()
    gone = data.draw(st.integers(2, len(records) - 1))
    result = audit(records[:gone] + records[gone + 1 :])
    assert not result.ok or not result.finished


@quick
@given(st.data())
def test_any_changed_number_is_found_or_changes_nothing(data: st.DataObject) -> None:
    """Whatever number of whatever record is changed: never another account of the same run, at most a shorter one."""
    run = honest()
    truth, records = audit(run.records), copy.deepcopy(run.records)
    record = data.draw(st.sampled_from(records))
    key = data.draw(st.sampled_from([key for key, value in record.items() if isinstance(value, int)]))
    record[key] = data.draw(st.integers(-1, 22))
    result = audit(records)
    assert not result.ok or result == truth

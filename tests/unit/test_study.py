"""The study: the paper's formulas by hand, what zeros do that no update does not, and files that ask for the impossible."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from raytrain_ft.cli.main import main
from raytrain_ft.errors import ConfigError
from raytrain_ft.study import Cut, Group, ModelStudy, Outcome, Plan, Worker, estimate, lossy_mean, run, summarize
from raytrain_ft.study.cuts import backward_order, layers_of
from raytrain_ft.study.emulate import distance
from raytrain_ft.study.models import MODELS, data
from raytrain_ft.study.protocol import Arm
from raytrain_ft.study.summary import (
    Count,
    farther_with_cuts,
    nearer_than_rollback,
    nearer_with_cuts,
    nearer_with_survivors,
    over_points,
    trends,
)

TINY = Plan(
    name="tiny",
    models=(
        ModelStudy(model="nt3", batch=16, lr=0.1, at=(2,), cuts=(Cut(tensors=0.5),)),
        ModelStudy(model="resnet", batch=16, lr=0.05, at=(1,), cuts=(Cut(tensors=0.25),)),
    ),
    workers=4,
    survivors=(1, 3),
    seeds=2,
    after=1,
)


def group(optimizer: str = "sgd") -> Group:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    kinds = {
        "sgd": partial(torch.optim.SGD, lr=0.1),
        "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "weight_decay": partial(torch.optim.SGD, lr=0.1, weight_decay=0.5),
        "adam": partial(torch.optim.Adam, lr=0.1),
    }
    return Group(model, kinds[optimizer](model.parameters()))


def squared(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def workers(count: int = 4, seed: int = 1) -> list[Worker]:
    generator = torch.Generator().manual_seed(seed)
    shares = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [Worker(partial(squared, inputs=share), seed) for share in shares]


def weights(one: Group) -> list[Tensor]:
    return [p.detach().clone() for p in one.params]


def test_lossy_forward_is_the_mean_of_all_and_then_of_the_survivors() -> None:
    gradients = [[torch.tensor([1.0, 2.0]), torch.tensor([10.0])], [torch.tensor([3.0, 6.0]), torch.tensor([20.0])]]
    gradients += [[torch.tensor([5.0, 1.0]), torch.tensor([60.0])], [torch.tensor([7.0, 3.0]), torch.tensor([90.0])]]
    first, second = lossy_mean(gradients, done=1, survivors=3)
    assert first.tolist() == [4.0, 3.0]  # (1 + 3 + 5 + 7) / 4, (2 + 6 + 1 + 3) / 4
    assert second.tolist() == pytest.approx([30.0])  # (10 + 20 + 60) / 3
    assert lossy_mean(gradients, done=2, survivors=1)[1].tolist() == [45.0]
    assert lossy_mean(gradients, done=0, survivors=1)[0].tolist() == [1.0, 2.0]
    for survivors in (0, 5):
        with pytest.raises(ConfigError, match="1 to 4"):
            lossy_mean(gradients, 1, survivors)


@pytest.mark.parametrize("done", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("survivors", [1, 2, 3, 4])
def test_lossy_forward_equals_a_group_of_the_survivors_alone(done: int, survivors: int) -> None:
    """After the cut the weights are what a group without the casualties would have; before it, what everybody has."""
    start = group()
    everybody, alone, lossy = start.fork(), start.fork(), start.fork()
    everybody.train(start.gradients(workers()))
    alone.train(start.gradients(workers()[:survivors]))
    lossy.lossy(start.gradients(workers()), done, survivors)
    for number, (mine, full, few) in enumerate(zip(weights(lossy), weights(everybody), weights(alone), strict=True)):
        torch.testing.assert_close(mine, full if number < done else few, rtol=1e-12, atol=1e-15)
    if 1 < survivors < 4 and done < 4:
        assert distance(lossy, everybody) > 1e-4


def test_the_mean_over_workers_is_that_of_the_whole_batch() -> None:
    start = group()
    parts = workers()
    whole = torch.cat([part.loss.keywords["inputs"] for part in parts])  # type: ignore[attr-defined]
    together = start.fork()
    together.train(start.gradients([Worker(partial(squared, inputs=whole), 1)]))
    start.train(start.gradients(parts))
    for a, b in zip(weights(start), weights(together), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("done", [0, 1, 3, 4])
def test_zeros_are_no_update_for_plain_sgd_to_the_bit(done: int) -> None:
    start = group()
    start.train(start.gradients(workers(seed=3)))
    gradients = start.gradients(workers())
    skipped, zeroed = start.fork(), start.fork()
    twice = skipped.interrupt(gradients, done)
    zeroed.interrupt(gradients, done, "zero")
    assert twice == sum(p.numel() for p in start.params[:done])
    for number, (a, b, was) in enumerate(zip(weights(skipped), weights(zeroed), weights(start), strict=True)):
        assert torch.equal(a, b)
        assert torch.equal(a, was) == (number >= done)


def test_zeros_move_weights_with_momentum_weight_decay_and_adam() -> None:
    """By how much follows by hand: lr * momentum * velocity; lr * decay * weight; and Adam's biased moments."""
    for name in ("momentum", "weight_decay", "adam"):
        start = group(name)
        first = start.gradients(workers(seed=3))
        start.train(first)
        means = lossy_mean(first.of, 4, 4)
        gradients = start.gradients(workers())
        skipped, zeroed = start.fork(), start.fork()
        skipped.interrupt(gradients, 2)
        zeroed.interrupt(gradients, 2, "zero")
        for number, (was, a, b) in enumerate(zip(weights(start), weights(skipped), weights(zeroed), strict=True)):
            if number < 2:
                assert torch.equal(a, b)
                continue
            assert torch.equal(a, was)
            m, v = 0.9 * 0.1 * means[number] / (1 - 0.9**2), 0.999 * 0.001 * means[number] ** 2 / (1 - 0.999**2)
            moved = {
                "momentum": 0.1 * 0.9 * means[number],
                "weight_decay": 0.1 * 0.5 * was,
                "adam": 0.1 * m / (v.sqrt() + 1e-8),
            }
            torch.testing.assert_close(was - b, moved[name], rtol=1e-6, atol=1e-12)
            assert (was - b).abs().max() > 1e-4


def test_a_rollback_updates_what_came_before_the_cut_twice() -> None:
    """Worked out for y = a * b * x, loss y, x = 1 on average: only `a`, the last layer, is updated before the cut."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.fill_(3.0)  # b
        model[1].weight.fill_(2.0)  # a
    start = Group(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = [torch.tensor([[x]], dtype=torch.float64) for x in (0.5, 1.5)]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean()

    batch = [Worker(partial(loss, x=x), 0) for x in inputs]
    assert start.interrupt(start.gradients(batch), 1) == 1
    assert [p.item() for p in start.params] == pytest.approx([2 - 0.1 * 3, 3.0])
    start.train(start.gradients(batch))  # da = b = 3, db = a = 1.7
    assert [p.item() for p in start.params] == pytest.approx([1.7 - 0.1 * 3, 3 - 0.1 * 1.7])


def test_cuts_are_shares_of_tensors_or_bytes_names_or_layers() -> None:
    resnet, nt3 = MODELS["resnet"](), MODELS["nt3"]()
    assert (len(backward_order(resnet)), len(layers_of(resnet))) == (44, 29)
    assert [Cut(tensors=share).done(nt3) for share in (0.25, 0.5, 0.75, 1.0)] == [3, 5, 8, 10]  # of 10, rounded up
    assert [Cut(bytes=share).done(nt3) for share in (0.01, 0.25, 0.5, 0.75)] == [4, 6, 6, 6]  # the sixth holds 96 %
    huge = max(p.numel() for p in nt3.parameters())
    assert 0.95 < huge / sum(p.numel() for p in nt3.parameters()) < 0.97
    assert Cut(name="6.weight").done(nt3) == 5
    assert Cut(layer=2).done(nt3) == 4  # its bias comes first
    assert Cut(layer=28).done(resnet) == 0
    for cut in (Cut(layer=200), Cut(name="nobody"), Cut(tensors=1.5)):
        with pytest.raises(ConfigError):
            cut.done(resnet)


def test_half_a_group_of_batch_norms_leaves_no_trace_in_the_state() -> None:
    """Gradients are computed without a change; BatchNorm's statistics are the mean of those that finish."""
    model = MODELS["resnet"]()
    one = Group(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = data("resnet").inputs[:32]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    found = one.gradients([Worker(partial(loss, x=share), 0) for share in images.chunk(4)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    rolled_back = one.fork()
    rolled_back.interrupt(found, 22)  # the mini-batch is redone: a recovery puts back what its forward pass did to buffers
    assert all(torch.equal(value, before[name]) for name, value in rolled_back.model.named_buffers())
    one.lossy(found, 22, 2)
    mine = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for buffer, a, b in zip(mine, found.buffers[0], found.buffers[1], strict=True):
        torch.testing.assert_close(buffer, (a + b) / 2)


def test_a_back_propagation_that_ends_at_the_cut_has_the_same_gradients() -> None:
    start = group()
    whole = start.gradients(workers())
    for done in (0, 1, 3):
        part = start.gradients(workers(), done)
        assert [len(of) for of in part.of] == [done] * len(whole.of)
        for some, every in zip(part.of, whole.of, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(some, every[:done], strict=True))


def test_a_study_gives_the_same_numbers_again() -> None:
    done: list[None] = []
    results = run(TINY, lambda: done.append(None))
    assert len(done) == TINY.count
    assert len(results.outcomes) == 2 * 2 * (2 + 3)
    for one in summarize(results.outcomes):
        if one.arm.kind == "baseline":
            assert one.distance.mean == one.accuracy_off.mean == one.later_distance.mean == 0
        elif one.arm.kind == "before":
            assert one.of_a_step.mean == pytest.approx(1)
        else:
            assert one.distance.mean > 0
        assert (one.updated_twice > 0) == (one.arm.kind == "rollback")
        assert (one.slowdown.mean > 0) == (one.arm.kind != "before")
    apart = {(c.model, c.optimizer, c.seed): c.interrupted for c in results.contrasts}
    assert all((value == 0) == (name == "sgd") for (_, name, _), value in apart.items())
    fewer = run(replace(TINY, models=TINY.models[:1], survivors=(1,), seeds=1))
    mine = [one for one in results.outcomes if one.model == "nt3" and one.seed == 0 and one.arm.survivors in (0, 1)]
    but_for_time = [[replace(one, slowdown=0.0) for one in some] for some in (fewer.outcomes, mine)]
    assert but_for_time[0] == but_for_time[1]  # what else is studied changes nothing


def test_an_interval_is_student_s() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.half) == pytest.approx((2.0, 4.303 / 3**0.5))
    assert not found.differs
    assert estimate([2.0, 2.1, 1.9]).differs


@pytest.mark.parametrize("values", [[math.nan, 1.0], [math.inf, 1.0, 2.0], [math.inf, -math.inf]])
def test_a_training_that_diverged_has_no_interval(values: list[float]) -> None:
    found = estimate(values)
    assert not math.isfinite(found.mean)
    assert math.isnan(found.half)
    assert not found.differs


def outcome(step: int, seed: int, arm: Arm, distance: float, loss_off: float = 0.0, later: float = 0.0) -> Outcome:
    return Outcome(
        model="m",
        seed=seed,
        step=step,
        arm=arm,
        loss_off=loss_off,
        later_accuracy_off=later,
        distance=distance,
        of_a_step=10 * distance,
        **dict.fromkeys(("accuracy", "loss", "accuracy_off", "later_loss_off", "later_distance"), 0.0),
        updated_twice=0,
        slowdown=1.0,
    )


def cut_twice(step: int, seed: int, rollback: tuple[float, float], lossy: dict[int, tuple[float, float]]) -> list[Outcome]:
    """One training's point: distances of the early and the late cut, for rollback and by survivors."""
    arms = {Arm("rollback", cut): distance for cut, distance in zip(("early", "late"), rollback, strict=True)}
    for left, distances in lossy.items():
        arms |= {Arm("lossy", cut, left): one for cut, one in zip(("early", "late"), distances, strict=True)}
    return [outcome(step, seed, Arm("before"), 9.0), *(outcome(step, seed, arm, one) for arm, one in arms.items())]


def test_points_of_one_training_are_one_value_of_an_interval() -> None:
    some = [outcome(step, seed, Arm("rollback", "early"), step + seed) for step in (1, 3) for seed in (0, 1, 2)]
    assert over_points(some, lambda o: o.of_a_step) == estimate([20.0, 30.0, 40.0])


def test_trends_are_counted() -> None:
    known = [
        *cut_twice(1, 0, rollback=(2.0, 3.0), lossy={3: (1.0, 0.5), 1: (4.0, 2.0)}),  # all hold, but 1 left at the early cut
        *cut_twice(1, 1, rollback=(3.0, 3.0), lossy={3: (1.0, 1.0), 1: (1.0, 0.5)}),  # equal is neither nearer nor farther
    ]
    assert [nearer_than_rollback(o for o in known if o.arm.survivors in (0, left)) for left in (1, 3)] == [
        Count(3, 4),
        Count(4, 4),
    ]
    assert nearer_than_rollback(o for o in known if o.arm.cut == "early") == Count(3, 4)
    assert nearer_with_survivors(known) == Count(2, 4)  # both cuts of the first training; then equal, and the wrong way round
    assert nearer_with_cuts(known) == Count(3, 4)
    assert nearer_with_survivors(o for o in known if o.arm.survivors in (0, 3)) == Count(0, 0), "one is no trend"
    assert farther_with_cuts(known) == Count(1, 2)
    assert str(farther_with_cuts(known)) == "1 of 2"


def test_trends_of_loss_and_of_intervals_are_counted() -> None:
    rollback, lossy = Arm("rollback", "early"), Arm("lossy", "early", 1)
    known = [outcome(1, seed, rollback, 1.0, loss_off=-1.0 - 0.1 * seed, later=0.5 - seed) for seed in (0, 1, 2)]
    known += [outcome(1, seed, lossy, 2.0, loss_off=0.1 * seed, later=1.0 + 0.1 * seed) for seed in (0, 1, 2)]
    known += [outcome(1, seed, Arm("before"), 1.0, loss_off=-5.0, later=5.0) for seed in (0, 1, 2)]  # is no failure
    found = {trend.what: trend.count for trend in trends(known)}
    assert found["rollback: loss lower than Baseline's"] == Count(3, 3)
    assert found["lossy: loss lower than Baseline's"] == Count(0, 3)
    assert found["loss off Baseline's, interval without zero"] == Count(1, 2)
    assert found["later: accuracy off, interval without zero"] == Count(1, 2)
    assert found["lossy, 1 left: weights nearer to Baseline's than rollback's"] == Count(0, 3)


FILE = """\
name: small
workers: 4
survivors: [1, 3]
seeds: 2
after: 1
optimizers: [adam]
models:
  - model: nt3
    batch: 16
    lr: 0.1
    at: [2]
    cuts: [50%, {bytes: 50%}, {name: 9.weight}, {layer: 2}]
"""


def invoke(path: Path, text: str, *arguments: object):
    path.write_text(text)
    return CliRunner().invoke(main, ["study", str(path), *map(str, arguments)], env={"COLUMNS": "80"})


def test_the_command_writes_tables_plots_and_json(tmp_path: Path) -> None:
    out, plots = tmp_path / "out.json", tmp_path / "plots"
    result = invoke(tmp_path / "small.yaml", FILE, "--json", out, "--plots", plots)
    assert result.exit_code == 0, result.output
    assert "rollback 50% of bytes" in result.output
    assert "…" not in result.output  # no number is cut off
    assert "lossy layer 2, 3 left" in result.output
    found = json.loads(out.read_text())
    assert len(found["outcomes"]) == 2 * (2 + 4 * 3)
    assert {"model": "nt3", "what": "lossy: loss lower than Baseline's"}.items() <= found["trends"][-5].items()
    assert "in steps of an undisturbed mini-batch" in result.output
    assert "rollback: farther with each later cut" in result.output
    assert {one["arm"]["kind"] for one in found["summaries"]} == {"before", "baseline", "rollback", "lossy"}
    assert sorted(path.name for path in plots.iterdir()) == ["nt3.png", "training.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots.iterdir())


def test_what_was_measured_is_not_lost_with_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("raytrain_ft.cli.study_views.plot", fails)
    out = tmp_path / "out.json"
    result = invoke(tmp_path / "small.yaml", FILE, "--json", out, "--plots", tmp_path / "plots")
    assert result.exit_code == 1
    assert "No space left on device" in result.output
    assert json.loads(out.read_text())["outcomes"]


def test_what_was_measured_of_a_training_that_diverges_is_not_lost(tmp_path: Path) -> None:
    out, plots = tmp_path / "out.json", tmp_path / "plots"
    result = invoke(tmp_path / "wild.yaml", FILE.replace("    lr: 0.1", "    lr: 100000"), "--json", out, "--plots", plots)
    assert result.exit_code == 0, result.output
    assert None in [one["loss"] for one in json.loads(out.read_text())["outcomes"]]
    assert "nan" in result.output
    assert (plots / "nt3.png").exists()


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("{layer: 2}", "{layer: 200}", 12, "200: the model has 5 layers with parameters: use 0 to 4"),
        ("{name: 9.weight}", "{name: 9.wieght}", 12, "no parameter '9.wieght', but 0.weight, 0.bias"),
        ("[1, 3]", "[1, 5]", 3, "5: of 4 workers 1 to 3 can survive"),
        ("[1, 3]", "[0]", 3, "of 4 workers 1 to 3 can survive"),
        ("seeds: 2", "sedes: 2", 4, "did you mean 'seeds'"),
        ("    lr: 0.1", "    lr: .inf", 10, "finite"),
        ("    lr: 0.1", "    lr: 0", 10, "greater than 0"),
        ("batch: 16", "batch: 18", 9, "multiple of 4 workers"),
        ("batch: 16", "batch: 4096", 9, "1,347 samples"),
        ("[50%,", "[150%,", 12, "less than or equal to 1"),
        ("[50%,", "[50%, 50%,", 12, "given twice"),
        ("{bytes: 50%}", "{bytes: 50%, layer: 1}", 12, "exactly one of"),
        ("model: nt3", "model: bert", 8, "'resnet' or 'nt3'"),
        ("at: [2]", "at: [-2]", 11, "greater than or equal to 0"),
        ("at: [2]", "at: []", 11, "at least 1 item"),
        ("workers: 4", "workers: 1", 2, "greater than or equal to 2"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(old: str, new: str, line: int, words: str, tmp_path: Path) -> None:
    assert old in FILE
    result = invoke(tmp_path / "bad.yaml", FILE.replace(old, new))
    assert result.exit_code == 1
    assert f"bad.yaml, line {line}: " in result.output
    assert words in result.output
    assert ("at least 1 item" in result.output) == ("at least 1 item" in words), "a model with a fault is there all the same"
    assert "mini-batch 2" not in result.output

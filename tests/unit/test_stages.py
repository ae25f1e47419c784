"""The stages of a pipeline compute what the model in one piece computes, whatever goes between them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from raytrain_ft.errors import TaskError
from raytrain_ft.policy.sampling import Sampling
from raytrain_ft.task import TrainTask
from raytrain_ft.training.build import build_replica
from raytrain_ft.training.fence import Fence
from raytrain_ft.training.links import Links
from raytrain_ft.training.pipeline import Stage, _apart, _gradient, chunks_of, cut, sequential, taken_in
from raytrain_ft.training.settings import PipelineSettings, StepSettings
from raytrain_ft.training.solo import Solo

MICRO_BATCHES = 4


class Drawn(TrainTask):
    """Stages of different sizes, and a dataset that is drawn from the global generator."""

    def model(self, stage: int) -> nn.Module:
        return nn.Linear(4, 4 if stage == 0 else 1)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def dataset(self) -> TensorDataset:
        return TensorDataset(torch.randn(16, 4), torch.randn(16, 1))


def test_all_stages_read_the_same_data_however_much_their_models_drew() -> None:
    """The first reads the inputs and the last the targets: of the same samples."""
    settings = StepSettings(seed=3, pipeline=PipelineSettings(stages=2, micro_batches=2))
    sampling = Sampling(dataset_size=16, global_batch_size=8, seed=3)
    about: Any = {"use_gpu": False, "undo_mode": "exact", "probe": None}
    first, last = (build_replica(Drawn(), sampling, settings, stage=stage, **about).loader for stage in range(2))
    assert first.sketches
    assert first.sketches == last.sketches


class Wire:
    """Both ends of an edge. What was given is logged by reference, and what arrives is a copy, as it is over a network."""

    def __init__(self) -> None:
        self.logged: list[tuple[Tensor, Tensor]] = []
        self._boxes: defaultdict[int, SimpleQueue[list[Tensor]]] = defaultdict(SimpleQueue)
        self._lock = threading.Lock()

    def begin(self, *about: Any) -> None: ...

    def arrived(self, number: int) -> None: ...

    def give(self, number: int, tensors: Sequence[Tensor]) -> None:
        self.logged += [(tensor, tensor.clone()) for tensor in tensors]
        self._box(number).put([tensor.clone() for tensor in tensors])

    def take(self, number: int) -> list[Tensor]:
        return self._box(number).get(timeout=5)

    def _box(self, number: int) -> SimpleQueue[list[Tensor]]:
        with self._lock:
            return self._boxes[number]


def test_a_gradient_that_shares_memory_with_a_parameters_is_passed_on_by_itself() -> None:
    """The next micro-batch adds to the parameter's, and the log would take this one for changed. A prompt before the tokens."""
    prompt, x = nn.Parameter(torch.ones(1, 8)), torch.ones(4, 8, requires_grad=True)
    torch.cat([x, prompt]).square().sum().backward()
    assert x.grad is not None
    assert prompt.grad is not None
    assert x.grad.untyped_storage().data_ptr() == prompt.grad.untyped_storage().data_ptr(), "else this shows nothing"
    passed = _gradient(x, [prompt])
    version = passed._version
    prompt.grad.add_(1)
    assert (passed._version, passed.untyped_storage().nbytes()) == (version, passed.nbytes)
    assert torch.equal(passed, x.grad)


def test_a_gradient_that_is_a_parameters_too_is_passed_on_by_itself() -> None:
    """The next micro-batch adds to the parameter's, and the stage before would train with the sum, if it is slow to take it."""
    place, x = nn.Parameter(torch.ones(4, 8)), torch.ones(1, 4, 8)

    def step(x: Tensor) -> None:
        (taken_in([x])[0] + place[None]).square().sum().backward()

    step(x)
    assert x.grad is not None
    assert place.grad is not None
    assert x.grad.untyped_storage().data_ptr() == place.grad.untyped_storage().data_ptr(), "else this shows nothing"
    passed = _gradient(x, [nn.Parameter(torch.ones(4, 8)), place])
    right = x.grad.clone()
    step(torch.ones(1, 4, 8))
    assert torch.equal(passed, right)
    assert not torch.equal(x.grad, right), "else this shows nothing"


def gradients(model: nn.Sequential, batches: Sequence[Tensor], cuts: tuple[int, ...], **how: Any) -> list[Tensor | None]:
    """Of all parameters, after one step of a pipeline; the loss is the sum of squares."""
    settings = PipelineSettings(stages=2, micro_batches=len(batches), cuts=cuts, **how)
    looped = settings.chunks > 1
    there: Any = (Wire(), Wire())  # from each stage
    back: Any = (Wire(), Wire())  # to each stage

    def run(number: int, part: nn.Module) -> None:
        chunks = chunks_of(part)
        stage = Stage(
            number,
            settings,
            [list(chunk.parameters()) for chunk in chunks],
            forward=lambda passed, arguments: chunks[passed // len(batches)](*arguments),
            first_inputs=lambda passed: batches[passed].clone(),
            loss=lambda _, output: output.square().sum(),
            arm=lambda _: None,
            probe=lambda *_: None,
        )
        is_fed, feeds = looped or number == 1, looped or number == 0
        stage.run(
            0,
            Links(
                Fence(1),
                0,
                1,
                Solo(Fence(1)),
                activations=there[1 - number] if is_fed else None,
                gradients=back[number] if feeds else None,
                outputs=there[number] if feeds else None,
                input_gradients=back[1 - number] if is_fed else None,
            ),
        )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2), cut(model, settings.cuts or (), 2)))
    assert all(torch.equal(now, then) for wire in (*there, *back) for now, then in wire.logged), "what was sent has changed"
    return [p.grad for p in model.parameters()]


def in_one_piece(model: nn.Sequential, batches: Sequence[Tensor]) -> list[Tensor | None]:
    for batch in batches:
        model(batch.clone()).square().sum().backward()
    return [p.grad for p in model.parameters()]


def is_trained_alike(model: Any, cuts: tuple[int, ...], **how: Any) -> bool:
    """Whether a step gives the same gradients to the model that `model()` returns, cut and in one piece."""
    batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(number)) for number in range(MICRO_BATCHES)]
    torch.manual_seed(0)
    expected = in_one_piece(model(), batches)
    torch.manual_seed(0)
    for whole, parts in zip(expected, gradients(model(), batches, cuts, **how), strict=True):
        assert whole is not None
        torch.testing.assert_close(parts, whole)
    return True


class Scaled(nn.Module):
    """Changes what it is given, and a part of that once more."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2).add_(self.factor)
        x[:, :2].tanh_()
        return x * self.factor


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("inplace", [lambda: nn.ReLU(inplace=True), lambda: nn.Dropout(0.0, inplace=True), Scaled])
def test_the_first_layer_of_a_stage_may_change_what_it_is_given(inplace: Any, schedule: Any) -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 8), inplace(), nn.Linear(8, 2))

    assert is_trained_alike(model, (1,), schedule=schedule)


def test_the_first_layer_of_a_chunk_may_change_what_it_is_given() -> None:
    def model() -> nn.Sequential:
        layers = [layer for _ in range(4) for layer in (nn.ReLU(inplace=True), nn.Linear(4, 4))]
        return nn.Sequential(*layers)

    assert is_trained_alike(model, (2, 4, 6), chunks=2)


class Waves(nn.Module):
    """Complex, and conjugated as torch does it: as a note beside the bytes of another tensor. Beside it, a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        waves = torch.view_as_complex(self.layer(x).reshape(-1, 4, 2))
        return waves.conj(), waves.conj().imag


class Filter(nn.Module):
    """Complex to complex."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.layer = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        waves, heights = given
        return waves * torch.exp(1j * self.phase) + self.layer(heights)


class Heights(nn.Module):
    """Complex to real."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, waves: Tensor) -> Tensor:
        return self.layer(torch.fft.ifft(waves).real)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("cuts", [(1,), (2,)])
def test_complex_tensors_have_gradients_too(cuts: tuple[int, ...], schedule: Any) -> None:
    assert is_trained_alike(lambda: nn.Sequential(Waves(), Filter(), Heights()), cuts, schedule=schedule)


class Normalising(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input - 5)


def _scaled() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return model


def _hooked() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.register_forward_pre_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.Linear(2, 2), "is no torch.nn.Sequential"),
        (lambda: Normalising(nn.Linear(2, 2)), r"has a forward\(\) of its own"),
        (_scaled, "has scale beside its layers"),
        (_hooked, "has hooks"),
    ],
)
def test_a_model_that_does_more_than_its_layers_is_not_cut(build: Any, words: str) -> None:
    """Else its stages together would be another model."""
    with pytest.raises(TaskError, match=words):
        sequential(build())
    assert sequential(model := nn.Sequential(nn.Linear(2, 2))) is model


def test_what_is_passed_on_keeps_no_other_memory_and_is_written_to_by_nobody() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    whole = torch.ones(8, 4) @ weight.T
    mask = torch.ones(3)
    for passed in (weight, weight[1:], mask, mask[:2], whole[:, 0]):
        kept = _apart(passed)
        assert torch.equal(kept, passed)
        assert kept.untyped_storage().data_ptr() != passed.untyped_storage().data_ptr()
        assert kept.untyped_storage().nbytes() == passed.nbytes
    for passed in (whole, whole.T, whole.view(2, 12)):
        assert _apart(passed).data_ptr() == passed.data_ptr(), "what was computed for it is not copied"

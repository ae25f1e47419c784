"""One step of one pipeline stage: micro-batches in the order of a schedule, tensors in and out over its links.

The order is that of torch.distributed.pipelining. Its runtime is not used, for a replay has no neighbours to exchange shapes
with, and one loop for both is what makes a replay the same to the bit.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_ft.errors import ConfigError, StorageError, TaskError
from raytrain_ft.policy.schedule import Action, order
from raytrain_ft.training import split_backward
from raytrain_ft.training.backward import backward
from raytrain_ft.training.calls import call
from raytrain_ft.training.edges import WHOLE_STEP
from raytrain_ft.training.links import Links
from raytrain_ft.training.settings import PipelineSettings
from raytrain_ft.training.team import Team

BACKWARD = ("backward", "backward_input")
"""The passes that wait for gradients."""


def build_stage(task: Any, stage: int, settings: PipelineSettings | None) -> nn.Module:
    """The model of one stage, of several chunks a list of them; all of it without a pipeline.

    Raises:
        ConfigError, TaskError: see `slice_layers`.
    """
    if settings is None:
        return model_of(task, stage)
    if settings.cuts is None:
        return _stage([model_of(task, part) for part in range(stage, settings.chunks * settings.stages, settings.stages)])
    return cut(sequential(model_of(task, 0)), settings.cuts, settings.stages)[stage]


def model_of(task: Any, part: int) -> nn.Module:
    """What the task gives as its model, or as this part of it.

    Raises:
        ConfigError: it takes no number, or gives no module.
    """
    try:
        signature = inspect.signature(task.model, follow_wrapped=False)
    except ValueError:  # what is not written in Python may not say what it takes
        signature = inspect.Signature([inspect.Parameter("stage", inspect.Parameter.POSITIONAL_ONLY)])
    try:
        signature.bind(part)
    except TypeError as error:
        raise ConfigError(
            f"{type(task).__name__}.model{signature} cannot be called with the number of a stage: write "
            "def model(self, stage); without a pipeline it is always 0"
        ) from error
    model = call(task, "model", part)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{type(task).__name__}.model({part}) returned {model!r:.80}: it must return a torch.nn.Module")
    return model


def cut(model: nn.Sequential, cuts: Sequence[int], stages: int) -> list[nn.Module]:
    """Its stages. What they share of its parameters stays one in this process."""
    layers = list(model)
    parts = [_Part(*layers[start:stop]) for start, stop in pairwise([0, *cuts, len(layers)])]
    parts[-1].is_last = True
    return [_stage(parts[stage::stages]) for stage in range(stages)]


class _Chunks(nn.ModuleList):
    """The parts of the model that one stage has."""


def _stage(chunks: Sequence[nn.Module]) -> nn.Module:
    return chunks[0] if len(chunks) == 1 else _Chunks(chunks)


def chunks_of(model: nn.Module) -> Sequence[nn.Module]:
    """The parts of the model that a stage has; of a stage with one, or of a model in one piece, itself."""
    return list(model) if isinstance(model, _Chunks) else [model]


class _Part(nn.Sequential):
    """Some layers of a sequential model. A tuple that crosses a cut comes as several tensors, and the layer takes a tuple."""

    is_last = False

    def forward(self, *inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raises TaskError: a tuple of one would cross the cut, and come as a tensor."""
        output = super().forward(inputs[0] if len(inputs) == 1 else inputs)
        if not self.is_last and isinstance(output, tuple | list) and len(output) == 1:
            raise TaskError(
                f"the last layer before a cut ({type(self[-1]).__name__}) returns a {type(output).__name__} of one, which the "
                "layer behind the cut would get as a tensor: return the tensor itself, or cut elsewhere "
                "(ParallelismConfig(split=...))"
            )
        return output


def name_in_one_piece(name: str, stage: int, spread: Mapping[str, Any] | None, where: str) -> str:
    """What a tensor of a stage is called in the whole model: the Sequential that was cut, or else one of all parts.

    Args:
        spread: see `stored.spread_of`; None if the model is in one piece, whose names are its own.
        where: the name was read.

    Raises:
        StorageError: the stages do not have such a tensor.
    """
    if spread is None:
        return name
    part, rest = stage, name
    try:
        if spread["chunks"] > 1:
            chunk, _, rest = rest.partition(".")
            part += int(chunk) * spread["stages"]
        if spread["cuts"] is None:
            return f"{part}.{rest}"
        layer, _, rest = rest.partition(".")
        number, layers = int(layer) + [0, *spread["cuts"]][part], spread.get("layers")
        return f"{number if layers is None else layers[number]}.{rest}"
    except (ValueError, IndexError) as error:
        raise StorageError(f"{where}: with {dict(spread)}, stage {stage} has no tensor {name!r}") from error


def layers_of(model: nn.Sequential) -> tuple[str, ...] | None:
    """What its layers are called; None if by their numbers. Where it is cut, each part counts its own from 0."""
    names = tuple(model._modules)  # a layer may be there twice, of which `named_children` has one
    return None if names == tuple(map(str, range(len(names)))) else names


def sequential(model: nn.Module) -> nn.Sequential:
    """The model, which is to be cut into stages.

    Raises:
        TaskError: it is not sequential, or does more than its layers do one after the other.
    """
    name = type(model).__name__
    advice = 'return the part `stage` from TrainTask.model(stage), and use ParallelismConfig(split="task")'
    if not isinstance(model, nn.Sequential):
        raise TaskError(f"{name} is no torch.nn.Sequential, so it cannot be split by itself: {advice}")
    own = [*model._parameters, *model._buffers]  # not those of its layers
    hooks = (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
    if type(model).forward is not nn.Sequential.forward or own or any(hooks):
        what = f"has {', '.join(own)} beside its layers" if own else "has hooks" if any(hooks) else "has a forward() of its own"
        raise TaskError(f"{name} {what}, which none of the stages would have, so it cannot be split by itself: {advice}")
    return model


def _apart(tensor: Tensor) -> Tensor:
    """What is passed on, in memory that nothing else writes to, and that is not much larger: it may be kept until it is logged.
    A stage may pass on a mask, a weight, or one column of what it has computed."""
    base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
    shared = base.is_leaf or base.untyped_storage().nbytes() > 2 * tensor.nbytes
    return tensor.detach().clone() if shared else tensor.detach()


@dataclass(slots=True)
class _Saved:
    """What the backward pass of a micro-batch needs of its forward pass."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    weights: Any = None  # what is left of a backward pass in two parts


class _Changeable(torch.autograd.Function):
    """The identity, of the same memory. Of a tensor that gets a gradient, a model's first layer may then change what it is
    given in place, as that of a model in one piece may; torch forbids it for a leaf and for its views."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tensor.data  # `detach` would make a view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def has_gradient(tensor: Tensor) -> bool:
    """Whether a gradient comes back for what is passed on."""
    return tensor.is_floating_point() or tensor.is_complex()


def taken_in(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What came from another stage as this one's model takes it; each of `tensors` will get its gradient. They are the model's
    to change: nobody else holds them."""
    return [_Changeable.apply(one.requires_grad_()) if has_gradient(one) else one for one in tensors]


class Stage:
    """Runs the micro-batches of a step through one stage.

    Attributes:
        computed_s: seconds of the passes of the step at hand, without what is waited for between them.

    Args:
        params: what is trained here, by chunk.
        forward: runs the model on these inputs, as pass number so and so (`policy.schedule.Action`).
        loss: the weighted loss of an output of the last part; given that of a micro-batch.
        first_inputs: what the first part reads of a micro-batch.
        arm: told before a backward pass whether the gradients that it leaves are final.
        probe: told of the place and the pass.
    """

    def __init__(
        self,
        stage: int,
        settings: PipelineSettings,
        params: Sequence[Sequence[nn.Parameter]],
        *,
        forward: Callable[[int, Sequence[Any]], Any],
        first_inputs: Callable[[int], Any],
        loss: Callable[[int, Any], Tensor],
        arm: Callable[[bool], None],
        probe: Callable[[str, int | None], None],
    ) -> None:
        self._stage = stage
        self._settings, self._params = settings, params
        self._forward_of, self._first_inputs, self._loss = forward, first_inputs, loss
        self._arm = arm
        self._probe = probe
        self._saved: dict[int, _Saved] = {}
        self.computed_s = 0.0

    @contextmanager
    def _computing(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.computed_s += time.perf_counter() - began

    def forget(self) -> None:
        """Lets go of what the backward passes of an interrupted step would have needed: whole graphs, beside which a helper
        may have to hold a second stage."""
        self._saved = {}

    def run(self, step: int, links: Links) -> None:
        """One step, up to the gradients of this stage's parameters.

        Raises:
            FencedError, PeerLostError: it broke off. LogGapError: a replay lacks a record.
        """
        actions = self._actions(links.team)
        self._saved, self.computed_s = {}, 0.0
        if links.activations is not None:
            wanted = [a.number for a in actions if a.kind == "forward" and not self._is_first(a.number)]
            links.activations.begin(step, wanted)
        if links.gradients is not None:
            wanted = [a.number for a in actions if a.kind in BACKWARD and not self._is_last(a.number)]
            links.gradients.begin(step, wanted)
        for outbound in (links.outputs, links.input_gradients):
            if outbound is not None:
                outbound.begin(step)
        for tie in links.ties:
            tie.inbound.begin(step, (WHOLE_STEP,))
            tie.outbound.begin(step)
        final = {self._chunk(action.number): action for action in actions if action.kind == "backward"}  # the last one counts
        for action in actions:
            links.fence.check()
            self._act(action, links, final=action is final.get(self._chunk(action.number)))
        if links.team is not None:
            self._probe("wait", None)
            links.team.add_up(self._params)

    def _actions(self, team: Team | None) -> list[Action]:
        """What is done in a step; who replays with others takes some of the micro-batches."""
        how = self._settings
        numbers = range(how.micro_batches) if team is None else team.numbers
        found = []
        for action in order(how.schedule, self._stage, how.stages, len(numbers), how.chunks):
            chunk, place = divmod(action.number, len(numbers))
            found.append(Action(action.kind, chunk * how.micro_batches + numbers[place]))
        return found

    def _chunk(self, number: int) -> int:
        return number // self._settings.micro_batches

    def _is_first(self, number: int) -> bool:
        return self._stage == 0 and self._chunk(number) == 0

    def _is_last(self, number: int) -> bool:
        return self._stage == self._settings.stages - 1 and self._chunk(number) == self._settings.chunks - 1

    def _act(self, action: Action, links: Links, *, final: bool) -> None:
        number, team = action.number, links.team
        match action.kind:
            case "forward":
                self._forward(number, links)
                return
            case "backward_input":
                self._backward_input(number, links)
                return
            case "backward_weight":
                self._probe("weight_pass", number)
                with self._computing():
                    split_backward.of_weights(self._saved.pop(number).weights, self._params[self._chunk(number)])
            case "backward":
                self._arm(final and (team is None or not team.exact))
                self._backward(number, links)
        if team is not None:
            team.collect(number, self._params[self._chunk(number)])

    def _forward(self, number: int, links: Links) -> None:
        saved = self._saved[number] = _Saved()
        if self._is_first(number):
            arguments: Sequence[Any] = [self._first_inputs(number)]
        else:
            assert links.activations is not None
            self._await(number)
            saved.inputs = links.activations.take(number)
            arguments = taken_in(saved.inputs)
        self._probe("forward", number)
        with self._computing():
            output = self._forward_of(number, arguments)
            if self._is_last(number):
                saved.outputs = [self._loss(number % self._settings.micro_batches, output)]
        if self._is_last(number):
            return
        saved.outputs = passed_on(output, self._stage)
        if self._settings.schedule == "zero_bubble":
            saved.outputs = split_backward.separable(saved.outputs)
        assert links.outputs is not None
        self._probe("send", number)
        links.outputs.give(self._after(number), [_apart(tensor) for tensor in saved.outputs])

    def _after(self, number: int) -> int:
        """What the next stage calls this micro-batch: what goes from the last one to the first is for its next chunk."""
        return number + self._settings.micro_batches if self._stage == self._settings.stages - 1 else number

    def _backward(self, number: int, links: Links) -> None:
        saved = self._saved.pop(number)
        outputs, gradients = self._outputs(number, saved, links)
        with self._computing():
            backward(outputs, gradients)
        self._pass_back(number, saved, links)

    def _backward_input(self, number: int, links: Links) -> None:
        """Of a stage that is not the first. The gradients of the weights are for later."""
        saved = self._saved[number]
        outputs, gradients = self._outputs(number, saved, links)
        learned = [tensor for tensor in saved.inputs if has_gradient(tensor)]
        with self._computing():
            saved.weights = split_backward.of_inputs(outputs, gradients, learned, self._params[self._chunk(number)])
        self._pass_back(number, saved, links)

    def _outputs(self, number: int, saved: _Saved, links: Links) -> tuple[list[Tensor], list[Tensor] | None]:
        """Where a backward pass begins, and with which gradients; None is that of a loss."""
        if self._is_last(number):
            self._probe("backward_pass", number)
            return saved.outputs, None
        assert links.gradients is not None
        self._await(number)
        gradients = links.gradients.take(number)
        if links.outputs is not None:
            links.outputs.arrived(self._after(number))
        learned = [tensor for tensor in saved.outputs if has_gradient(tensor)]
        pairs = [(out, grad) for out, grad in zip(learned, gradients, strict=True) if out.requires_grad]
        self._probe("backward_pass", number)
        return [out for out, _ in pairs], [grad for _, grad in pairs]

    def _pass_back(self, number: int, saved: _Saved, links: Links) -> None:
        if self._is_first(number):
            return
        assert links.input_gradients is not None
        self._probe("send", number)
        there = number - self._settings.micro_batches if self._stage == 0 else number
        params = self._params[self._chunk(number)]
        links.input_gradients.give(there, [_gradient(tensor, params) for tensor in saved.inputs if has_gradient(tensor)])

    def _await(self, number: int) -> None:
        self._probe("receive", number)
        self._probe("wait", None)


def _gradient(tensor: Tensor, params: Iterable[Tensor]) -> Tensor:
    """What the stage before gets. A copy if it is also the gradient of one of these parameters, as of `w` in `x + w[None]`: the
    next micro-batch adds to that, while this is on its way. Or if it is a part of other memory: torch has one counter for all
    changes there, and the log would take it for changed; nor is the rest to be kept as long as this is."""
    if tensor.grad is None:
        return torch.zeros_like(tensor)
    memory = tensor.grad.untyped_storage()
    alike = (param.grad for param in params if param.numel() == tensor.numel() and param.grad is not None)
    shared = any(grad.untyped_storage().data_ptr() == memory.data_ptr() for grad in alike)
    return tensor.grad.clone() if shared or memory.nbytes() > tensor.grad.nbytes else tensor.grad


def passed_on(output: Any, stage: int) -> list[Tensor]:
    """What a stage passes on.

    Raises:
        TaskError: it is neither a tensor nor a tuple of tensors.
    """
    found = list(output) if isinstance(output, tuple | list) else [output]
    if not found or not all(isinstance(tensor, Tensor) for tensor in found):
        kinds = ", ".join(type(part).__name__ for part in found)
        raise TaskError(f"stage {stage} passes on {kinds or 'nothing'}: return a tensor, or a tuple of tensors")
    return found

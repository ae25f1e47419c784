"""One step of one pipeline stage: micro-batches in the order of a schedule, tensors in and out over its links.

The order is that of torch.distributed.pipelining. Its runtime is not used, for a replay has no neighbours to exchange shapes
with, and one loop for both is what makes a replay the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_ft.errors import TaskError
from raytrain_ft.policy.schedule import Action, order
from raytrain_ft.training.links import Links
from raytrain_ft.training.settings import PipelineSettings


def build_stage(task: Any, stage: int, settings: PipelineSettings | None) -> nn.Module:
    """The model of one stage; all of it without a pipeline.

    Raises:
        ConfigError, TaskError: see `slice_layers`.
    """
    if settings is None or settings.cuts is None:
        return task.model(stage)
    layers = list(sequential(task.model(0)))
    bounds = [0, *settings.cuts, len(layers)]
    return _Part(*layers[bounds[stage] : bounds[stage + 1]])


class _Part(nn.Sequential):
    """Some layers of a sequential model. A tuple that crosses a cut comes as several tensors, and the layer takes a tuple."""

    def forward(self, *inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(inputs[0] if len(inputs) == 1 else inputs)


def name_in_one_piece(name: str, stage: int, cuts: Sequence[int] | None) -> str:
    """What a tensor of a stage is called in the whole model: the Sequential that was cut, or else one of all stages."""
    if cuts is None:
        return f"{stage}.{name}"
    layer, _, rest = name.partition(".")
    return f"{int(layer) + [0, *cuts][stage]}.{rest}"


def sequential(model: nn.Module) -> nn.Sequential:
    """The model, which is to be cut into stages.

    Raises:
        TaskError: it is not sequential.
    """
    if not isinstance(model, nn.Sequential):
        raise TaskError(
            f"{type(model).__name__} is no torch.nn.Sequential, so it cannot be split by itself: return the part `stage` from "
            'TrainTask.model(stage), and use ParallelismConfig(split="task")'
        )
    return model


@dataclass(slots=True)
class _Saved:
    """What the backward pass of a micro-batch needs of its forward pass."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


class Stage:
    """Runs the micro-batches of a step through one stage.

    Args:
        params: what is trained here.
        forward: runs the model on these inputs, as micro-batch number so and so.
        loss: the weighted loss of an output of the last stage; given that of a micro-batch.
        first_inputs: what the first stage reads of a micro-batch.
        before_last: called before the last backward pass: the gradients that it leaves are final.
        probe: told of the place and the micro-batch.
    """

    def __init__(
        self,
        stage: int,
        settings: PipelineSettings,
        params: Sequence[nn.Parameter],
        *,
        forward: Callable[[int, Sequence[Any]], Any],
        first_inputs: Callable[[int], Any],
        loss: Callable[[int, Any], Tensor],
        before_last: Callable[[], None],
        probe: Callable[[str, int | None], None],
    ) -> None:
        self._stage = stage
        self._is_first, self._is_last = stage == 0, stage == settings.stages - 1
        self._settings, self._params = settings, params
        self._forward_of, self._first_inputs, self._loss = forward, first_inputs, loss
        self._before_last = before_last
        self._probe = probe
        self._saved: dict[int, _Saved] = {}

    def run(self, step: int, links: Links) -> None:
        """One step, up to the gradients of this stage's parameters.

        Raises:
            FencedError, PeerLostError: it broke off. LogGapError: a replay lacks a record.
        """
        numbers = tuple(range(self._settings.micro_batches)) if links.team is None else links.team.numbers
        actions = order(self._settings.schedule, self._stage, self._settings.stages, len(numbers))
        self._saved = {}
        for inbound in (links.activations, links.gradients):
            if inbound is not None:
                inbound.begin(step, numbers)
        for outbound in (links.outputs, links.input_gradients):
            if outbound is not None:
                outbound.begin(step)
        for action in actions:
            self._act(action, numbers, links)
        if links.team is not None:
            links.team.add_up(self._params)

    def _act(self, action: Action, numbers: Sequence[int], links: Links) -> None:
        links.fence.check()
        number = numbers[action.micro_batch]
        if action.kind == "forward":
            self._forward(number, links)
            return
        if action.micro_batch == len(numbers) - 1 and (links.team is None or not links.team.exact):
            self._before_last()
        self._backward(number, links)
        if links.team is not None:
            links.team.collect(number, self._params)

    def _forward(self, number: int, links: Links) -> None:
        saved = self._saved[number] = _Saved()
        if self._is_first:
            arguments: Sequence[Any] = [self._first_inputs(number)]
        else:
            assert links.activations is not None
            self._await(number)
            saved.inputs = links.activations.take(number)
            arguments = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in saved.inputs]
        self._probe("forward", number)
        output = self._forward_of(number, arguments)
        if self._is_last:
            saved.outputs = [self._loss(number, output)]
            return
        saved.outputs = passed_on(output, self._stage)
        assert links.outputs is not None
        self._probe("send", number)
        links.outputs.give(number, [tensor.detach() for tensor in saved.outputs])

    def _backward(self, number: int, links: Links) -> None:
        saved = self._saved.pop(number)
        if self._is_last:
            self._probe("backward_pass", number)
            saved.outputs[0].backward()
        else:
            assert links.gradients is not None
            self._await(number)
            gradients = links.gradients.take(number)
            floating = [tensor for tensor in saved.outputs if tensor.is_floating_point()]
            pairs = [(out, grad) for out, grad in zip(floating, gradients, strict=True) if out.requires_grad]
            self._probe("backward_pass", number)
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        if self._is_first:
            return
        assert links.input_gradients is not None
        self._probe("send", number)
        links.input_gradients.give(number, [_gradient(tensor) for tensor in saved.inputs if tensor.is_floating_point()])

    def _await(self, number: int) -> None:
        self._probe("receive", number)
        self._probe("wait", None)


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


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

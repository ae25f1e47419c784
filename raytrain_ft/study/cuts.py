"""Where a mini-batch's back-propagation is cut: how many of its gradient tensors were used for an update before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from raytrain_ft.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A place in back-propagation: exactly one of these. The paper has the first; a share of tensors may be a very different
    share of bytes, because tensors differ widely in size.

    Attributes:
        tensors: share of the gradient tensors that came before, from 0 to 1, rounded up (Nicolae et al., III-D).
        bytes: so many tensors came before that they hold at least this share of the gradients' bytes, from 0 to 1.
        name: of the parameter whose gradient is the first that is lost.
        layer: of those that have parameters, as the model lists them, from 0: its last gradient is the first that is lost.
    """

    tensors: float | None = None
    bytes: float | None = None
    name: str | None = None
    layer: int | None = None

    @property
    def label(self) -> str:
        """For tables."""
        if self.tensors is not None:
            return f"{self.tensors:.0%}"
        if self.bytes is not None:
            return f"{self.bytes:.0%} of bytes"
        return self.name if self.name is not None else f"layer {self.layer}"

    def done(self, model: nn.Module) -> int:
        """How many tensors, in the order of back-propagation, are updated before the cut.

        Raises:
            ConfigError: the model has no such place.
        """
        order = backward_order(model)
        if self.tensors is not None:
            return math.ceil(_share("tensors", self.tensors) * len(order))
        if self.bytes is not None:
            sums = [0, *accumulate(p.numel() * p.element_size() for _, p in order)]
            wanted = _share("bytes", self.bytes) * sums[-1]
            return next(number for number, total in enumerate(sums) if total >= wanted)
        if self.name is not None:
            names = [name for name, _ in order]
            if self.name not in names:
                raise ConfigError(f"the model has no parameter {self.name!r}, but {', '.join(reversed(names))}")
            return names.index(self.name)
        layers = layers_of(model)
        if self.layer is None or not 0 <= self.layer < len(layers):
            raise ConfigError(
                f"the model has {len(layers)} layers with parameters: use 0 to {len(layers) - 1}, not {self.layer}"
            )
        lost = {id(p) for p in layers[self.layer].parameters(recurse=False)}
        return next(number for number, (_, p) in enumerate(order) if id(p) in lost)


def backward_order(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters, the last one first."""
    return list(model.named_parameters())[::-1]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Modules with parameters of their own."""
    return [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={value!r}: use a share of back-propagation from 0 to 1")
    return value

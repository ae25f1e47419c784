"""What the first stage of a pipeline reads of a micro-batch. The last stage has the same one for the loss, in another process:
what `inputs` changes for the loss (the labels of a mixup) would change in one of them alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from raytrain_ft.errors import TaskError
from raytrain_ft.storage.tensors import hash_of
from raytrain_ft.training.layout import is_plain


def inputs_of(task: Any, batch: Any) -> Any:
    """What a task's `inputs` returns. It may change that in place, and take it out of the batch, but nothing that stays there.

    Raises:
        TaskError: it does.
    """
    before = {place: hash_of(tensor) for place, tensor in _tensors(batch)}
    inputs = task.inputs(batch)
    returned = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(inputs) if _is_compared(tensor)}
    for place, tensor in _tensors(batch):
        there = tensor.untyped_storage().data_ptr() in returned
        if place in before and not there and hash_of(tensor) != before[place]:
            raise TaskError(
                f"{type(task).__name__}.inputs() changes batch{place}, which it does not return. In a pipeline the last stage "
                "has a batch of its own for the loss, in which nothing is changed: let augment() or collate() do so, or train "
                "without a pipeline. If loss() does not read it, change a copy (.clone())"
            )
    return inputs


def _tensors(batch: Any) -> Iterable[tuple[str, Tensor]]:
    return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(batch)[0] if _is_compared(leaf)]


def _is_compared(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and is_plain(leaf)

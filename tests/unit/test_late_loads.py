"""What a training process does not load: a load in the middle of a step, or of a recovery, is a wait for everybody."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from raytrain_ft.storage.columns import integer_column, list_column, numpy_of, text_column
from raytrain_ft.training.backward import backward

STORES = """
import sys
from pathlib import Path
import torch
from raytrain_ft.storage.arrow import read_tensors, write_tensors
from raytrain_ft.storage.log_format import Key
from raytrain_ft.storage.log_reader import LogReader
from raytrain_ft.storage.shard import Piece, decode, encode
from raytrain_ft.storage.tensor_log import TensorLog

directory = Path(sys.argv[1])
tensor = torch.arange(6.0).reshape(2, 3)
log = TensorLog(directory / "log", "w0")
for micro_batch in range(2):
    log.append(Key(0, micro_batch, "activation", 0, 1), 1, [tensor, tensor])
assert log.flush(10)
reader = LogReader(directory / "log")
reader.refresh()
read = reader.read(Key(0, 1, "activation", 0, 1))
assert all(torch.equal(one, tensor) for one in read), read
log.close()
write_tensors(directory / "aside.arrow", {"a": tensor}, {})
assert torch.equal(read_tensors(directory / "aside.arrow")[0]["a"], tensor)
pieces = [Piece("a", "torch.float32", (2, 3), 0, 24)]
(directory / "shard.arrow").write_bytes(b"".join(encode(pieces, memoryview(tensor.numpy()).cast("B"))))
(rows,) = decode(pa.memory_map(str(directory / "shard.arrow")).read_buffer(), "shard.arrow")
assert rows.names == ["a"]
"""
BACKWARD = """
import sys
import torch
from raytrain_ft.training.backward import backward
out = torch.ones(3, requires_grad=True).exp()
backward([out], [torch.ones(3)])
"""
READS = """
import sys
import pyarrow.ipc
from raytrain_ft.storage.columns import text_column
from raytrain_ft.training.arrow_dataset import ArrowDataset
path = sys.argv[1] + "/rows.arrow"
with pyarrow.ipc.new_file(path, pa.schema([("t", pa.string())])) as writer:
    writer.write_batch(pa.record_batch([text_column(["a", "b"])], names=["t"]))
assert ArrowDataset(path)[1] == {"t": "b"}
"""
LOADED = 'print(sorted({"pandas", "pyarrow.compute", "sympy", "torch._dynamo", "matplotlib"} & sys.modules.keys()))\n'


@pytest.mark.parametrize("program", [STORES, READS, BACKWARD], ids=["stores", "reads", "backward"])
def test_nothing_is_loaded_for_it(program: str, tmp_path: Path) -> None:
    run = [sys.executable, "-c", "import pyarrow as pa\n" + program + LOADED, str(tmp_path)]
    assert subprocess.run(run, capture_output=True, text=True, check=True, timeout=120).stdout == "[]\n"


# ---------------------------------------------------------------- columns


@pytest.mark.parametrize("values", [[], ["a"], ["", "ä", "bc", ""]])
def test_texts_are_those_that_pyarrow_makes(values: list[str]) -> None:
    assert text_column(values).equals(pa.array(values, pa.string()))


@pytest.mark.parametrize("values", [[], [[]], [[1, 2], [], [3]]])
def test_lists_are_those_that_pyarrow_makes(values: list[list[int]]) -> None:
    made = list_column(values, integer_column([number for inner in values for number in inner]))
    made.validate(full=True)
    assert made.equals(pa.array(values, pa.list_(pa.int64())))


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float16(), pa.float64()], ids=str)
def test_a_column_is_read_as_pyarrow_reads_it(kind: pa.DataType) -> None:
    column = pa.array(np.arange(5).astype(kind.to_pandas_dtype()), kind)
    for part in (column, column[2:], column[5:], pa.array([], kind)):
        np.testing.assert_array_equal(numpy_of(part), part.to_numpy(zero_copy_only=False))
        assert numpy_of(part).dtype == kind.to_pandas_dtype()


def test_the_largest_numbers_fit() -> None:
    assert integer_column([2**64 - 1], pa.uint64()).to_pylist() == [2**64 - 1]
    assert integer_column([-(2**63)]).to_pylist() == [-(2**63)]


# ---------------------------------------------------------------- a backward pass from given gradients


def graph() -> tuple[list[Tensor], list[Tensor]]:
    """What was learned, and outputs of which one is computed from another and one is there twice."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    out = model(x)
    return [x, *model.parameters()], [out, (out * 2).tanh().to(torch.bfloat16), out]


def test_it_has_the_bits_of_torchs() -> None:
    (ours, outputs), (theirs, again) = graph(), graph()
    gradients = [torch.randn(4, 8).to(output.dtype) for output in outputs]
    torch.autograd.backward(outputs, gradients, retain_graph=True)  # of an earlier micro-batch: gradients add up
    backward(outputs, gradients)
    for _ in range(2):
        torch.autograd.backward(again, gradients, retain_graph=True)
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_a_loss_needs_no_gradient_and_no_outputs_need_no_pass() -> None:
    x = torch.ones(2, requires_grad=True)
    backward([(x * 3).sum()], None)
    backward([], [])
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


def test_a_gradient_of_another_shape_is_refused() -> None:
    _, outputs = graph()
    with pytest.raises(RuntimeError, match=r"got \[3, 8\]"):
        backward(outputs[:1], [torch.zeros(3, 8)])


def test_what_was_given_is_not_kept() -> None:
    x = torch.ones(4, requires_grad=True)
    given = torch.ones(4)
    backward([x.exp()], [given])
    kept = weakref.ref(given)
    del given
    x.grad = None
    assert kept() is None

"""torch's compiler is loaded by those who compile, and by nobody else. Each case needs a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAIN = """
import sys, torch
from raytrain_ft.training.lazy_compiler import compiler_is_loaded, load_compiler_late
if {late}:
    load_compiler_late()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
def step():
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
for _ in range(5):
    step()
    schedule.step()
optimizer.load_state_dict(optimizer.state_dict())
torch.distributed.destroy_process_group()
{then}
"""
BITS = "print([p.detach().numpy().tobytes().hex() for p in model.parameters()], file=sys.stderr)\n"
LATE = 'print(compiler_is_loaded(), "torch._dynamo.config" in sys.modules)\n'
COMPILE = """
assert torch.compile(model, backend="eager")(torch.ones(3, 4)).equal(model(torch.ones(3, 4)))
torch.compile(step, backend="eager")()
assert torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable is not torch.optim.Optimizer.zero_grad.__wrapped__
print(compiler_is_loaded())
"""
DISABLE = """
print(compiler_is_loaded())
for disable in (torch.compiler.disable, torch.compiler.disable(reason="why"), torch._dynamo.disable()):
    assert disable(lambda x: x + 1)(1) == 2
print(compiler_is_loaded())
"""
IMPORTS = """
print(callable(torch._dynamo.trace_rules.lookup))
import torch._dynamo.config
from torch._dynamo import OptimizedModule
print(torch._dynamo.config.verbose, compiler_is_loaded())
"""


def run(then: str, *, late: bool = True, optimizer: str = "AdamW") -> subprocess.CompletedProcess[str]:
    code = TRAIN.format(late=late, optimizer=optimizer, then=then)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_training_loads_no_compiler_and_has_the_same_bits(optimizer: str) -> None:
    late = run(LATE + BITS, optimizer=optimizer)
    usual = run(LATE + BITS, optimizer=optimizer, late=False)
    assert late.stdout.split() == ["False", "False"]
    assert usual.stdout.split() == ["True", "True"]
    assert late.stderr == usual.stderr
    assert len(late.stderr) > 100


@pytest.mark.parametrize(("then", "said"), [(COMPILE, "True"), (DISABLE, "False True"), (IMPORTS, "True False True")])
def test_whoever_needs_the_compiler_gets_it(then: str, said: str) -> None:
    assert " ".join(run(then).stdout.split()) == said


def test_a_look_through_all_modules_does_not_load_it() -> None:
    looks = "import inspect\ninspect.getmodule(step)\nprint([hasattr(m, '__file__') for m in sys.modules.values()] and None)\n"
    assert run(looks + LATE).stdout.split()[-2:] == ["False", "False"]

"""The site builds without a warning; links lead somewhere; code blocks are code, and run where they can."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import PAGES, ROOT, Block, blocks
from torch.nn import functional
from torch.utils.data import TensorDataset

import raytrain_ft as ft
from raytrain_ft.settings import TrainSettings

LINK = re.compile(r"\]\(([^()\s]+)\)")
STARTS = re.compile(r"\.fit\(|Cluster\(|\bdrill\(|\b(attach|suspend|resume|leave)\(")
ELSEWHERE = re.compile(r"[a-z]+:")


class Small(ft.TrainTask):
    """What stands for `task` in the pages."""

    def model(self, stage):
        return torch.nn.Linear(4, 2)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

    def dataset(self):
        return TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64))

    def loss(self, output, batch):
        return functional.cross_entropy(output, batch[1])


def undoable() -> dict[str, Any]:
    """What the page about undo takes for granted."""
    parameter = torch.nn.Parameter(torch.ones(3))
    return {"optimizer": torch.optim.SGD([parameter], lr=0.1), "loss": (parameter**2).sum(), "bucket": []}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip('no Sphinx: pip install "raytrain_ft[docs]"')
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "doctrees")]
    done = subprocess.run([*command, str(ROOT / "docs"), str(site)], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    shown = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").glob("*.md")}
    assert all((site / page).stat().st_size for page in shown)
    api = (site / "api.html").read_text()
    assert [name for name in ft.__all__ if name != "undo" and f'id="raytrain_ft.{name}"' not in api] == []
    assert 'id="module-raytrain_ft.training.undo"' in api


def test_relative_links_lead_somewhere() -> None:
    lost = []
    for page in PAGES:
        for target in LINK.findall(page.read_text()):
            path = target.partition("#")[0]
            if path and not ELSEWHERE.match(target) and not (page.parent / path).exists():
                lost.append(f"{page.relative_to(ROOT)}: {target}")
    assert lost == []


def test_what_the_journeys_name_is_in_the_code() -> None:
    """They are read beside it. `Owner.name` and `module.name` are looked for where the class is, or in that module."""
    files = [(path, path.read_text()) for path in (ROOT / "raytrain_ft").rglob("*.py")]
    missing: list[str] = []
    for page in sorted((ROOT / "docs").glob("journey-*.md")):
        for name in re.findall(r"`([A-Za-z_]+(?:[./][A-Za-z_]+)*)(?:\([^`]*\))?`", page.read_text()):
            if "/" in name or name.endswith(".py"):
                there = any(str(path).endswith(f"/{name}") for path, _ in files) or (ROOT / name).exists()
            else:
                owner, _, last = name.rpartition(".")
                theirs = [text for path, text in files if owner and (path.stem == owner or f"\nclass {owner}" in text)]
                there = any(re.search(rf"\b{last}\b", text) for text in theirs or [text for _, text in files])
            missing += [] if there else [f"{page.name}: {name}"]
    assert not missing


def test_every_code_block_compiles() -> None:
    found = blocks()
    assert len(found) > 25
    for block in found:
        compile(block.tree, block.name, "exec")


def test_what_code_blocks_import_and_pass_exists() -> None:
    """Also in blocks that cannot be run here."""
    wrong = []
    for block in blocks():
        for node in ast.walk(block.tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("raytrain_ft"):
                module = importlib.import_module(node.module)
                wrong += [f"{block.name}: {node.module}.{name.name}" for name in node.names if not hasattr(module, name.name)]
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ft":
                wrong += [f"{block.name}: ft.{node.attr}"] if node.attr not in ft.__all__ else []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "ft":
                wrong += [f"{block.name}: {ast.unparse(node.func)}({name}=)" for name in unknown(node)]
    assert wrong == []


def unknown(call: ast.Call) -> list[str]:
    """Keywords that what is called does not take."""
    assert isinstance(call.func, ast.Attribute)
    taken = set(inspect.signature(getattr(ft, call.func.attr)).parameters)
    if call.func.attr == "Trainer":
        taken |= set(TrainSettings.__dataclass_fields__)
    elif "kwargs" in taken or "args" in taken:
        return []
    return [word.arg for word in call.keywords if word.arg and word.arg not in taken]


@pytest.mark.parametrize("block", blocks("here"), ids=lambda block: block.name)
def test_a_code_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not STARTS.search(block.code), "mark a block that starts something, as tests/pages.py says"
    monkeypatch.chdir(tmp_path)
    names = {"ft": ft, "torch": torch, "nn": torch.nn, "F": functional, "timedelta": timedelta, "task": Small(), **undoable()}
    exec(compile(block.tree, block.name, "exec"), {"__name__": "a_page", **names})

"""The report in a real browser: it renders, says what it should, and complains of nothing."""

from __future__ import annotations

import io
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from test_report import HOSTILE, recovery, run_of_everything

from raytrain_ft.runtime import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTH, HEIGHT = 1200, 2400

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (`make setup` as root installs Debian's)")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    records = [*run_of_everything(), recovery(3.2, cause=HOSTILE, incarnation=3)]
    (directory / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return report.write(directory)


def browse(page: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage", "--no-first-run"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    logging = ["--enable-logging=stderr", "--log-level=0"]  # the page's console goes to stderr
    command = [CHROMIUM, *fixed, profile, *logging, *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)


def console(result: subprocess.CompletedProcess[str]) -> list[str]:
    """What the page wrote to the console: errors, and what its security policy refused."""
    return re.findall(r".*CONSOLE.*", result.stderr)


def test_the_page_says_what_it_should_and_complains_of_nothing(page: Path) -> None:
    result = browse(page, "--dump-dom")
    for heading in ("Steps over time", "Recoveries, phase by phase", "Loss over steps", "Checkpoints", "Checkpoint interval k"):
        assert re.search(rf"<h2[^>]*>{heading}</h2>", result.stdout), heading
    assert result.stdout.count("<svg") == 5
    assert "<script" not in result.stdout
    assert console(result) == []


def test_the_console_would_be_seen(tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<script>console.error('seen'); undefined_function()</script>")
    assert len(console(browse(broken, "--dump-dom"))) == 2


def test_the_page_is_drawn(page: Path) -> None:
    picture = page.parent / "report.png"
    browse(page, f"--screenshot={picture}", f"--window-size={WIDTH},{HEIGHT}")
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (WIDTH, HEIGHT)
    from matplotlib.image import imread

    pixels = (imread(io.BytesIO(data), format="png")[..., :3] * 255).round().astype("uint8")
    colours = {tuple(pixel) for row in pixels[::3] for pixel in row[::3].tolist()}
    assert len(colours) > 50
    for wanted in ((0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0x00, 0x9E, 0x73), (0xD5, 0x5E, 0x00)):
        assert (abs(pixels.astype(int) - wanted).sum(axis=2) < 6).sum() > 20, wanted

"""How the site is built from these pages: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

project = "raytrain_ft"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # docstrings with "Args:" and "Raises:"
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
html_theme = "furo"
html_title = "raytrain_ft"
html_copy_source = False
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True


ROOT = Path(__file__).parents[1]
AT_THE_ROOT = {"readme": "README.md", "security": "SECURITY.md"}
"""Pages that lie at the root of the repository, where one looks for them."""


def read_page(app: Any, page: str, source: list[str]) -> None:
    """Makes links within the repository links within the site."""
    if page in AT_THE_ROOT:
        app.env.note_dependency(str(ROOT / AT_THE_ROOT[page]), docname=page)
        text = (ROOT / AT_THE_ROOT[page]).read_text(encoding="utf-8")
        source[0] = re.sub(r"\]\((?!docs/|#|https?:)", "](../", text).replace("](docs/", "](")
    for name, file in AT_THE_ROOT.items():
        source[0] = source[0].replace(f"](../{file}", f"]({name}.md")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read_page)

"""Settings of Sphinx: `make docs` builds docs/ into build/docs."""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import docstrings  # noqa: E402 - It lies beside this file.
import generate  # noqa: E402

import jdag  # noqa: E402

project = "jdag"
author = "the authors of jdag"
copyright = "the authors of jdag"
release = version = jdag.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_generated"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Public names are documented under the names by which users import them.
nitpicky = True
nitpick_ignore_regex = docstrings.FOREIGN
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 78
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"jdag {release}"
html_static_path = ["_static"]
html_css_files = ["jdag.css"]
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = "$ "
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def setup(app: Any) -> None:
    """Write the generated pages, and read docstrings as they are written in jdag."""
    generate.write(HERE)
    docstrings.connect(app)

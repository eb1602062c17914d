"""Settings of the site: Sphinx with MyST for pages, autodoc for the reference. No network."""

import importlib.metadata

project = "lightning_hetero"
author = "the authors of lightning_hetero"
release = importlib.metadata.version("lightning-hetero")
html_title = f"lightning_hetero {release}"
html_theme = "furo"
root_doc = "index"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]

# Docstrings write code in single backticks, as Markdown does.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
# Docstrings of Lightning's hooks link to Lightning's own pages.
autodoc_inherit_docstrings = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
# Names of the package are also names of its rooms.
suppress_warnings = ["myst.header", "ref.python"]

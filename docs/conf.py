"""The documentation: sphinx-build -W docs docs/_build/html"""

from ipcsync import __version__

project = "ipcsync"
author = "the ipcsync maintainers"
copyright = author  # noqa: A001  (Sphinx's own name for it)
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "examples"]

html_theme = "furo"
html_title = f"ipcsync {version}"
html_extra_path = []

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True

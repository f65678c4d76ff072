"""The documentation: sphinx-build -W docs docs/_build/html"""

import sys
from pathlib import Path

from ipcsync import __version__

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "ipcsync"
author = "the ipcsync maintainers"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "command_help"]
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "examples"]

html_theme = "furo"
html_title = f"ipcsync {version}"

autodoc_mock_imports = ["torch"]  # ipcsync.torch is described without it
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True

"""Makes `import form` work in every test, whatever folder it lies in; a run draws the same examples as the last one.

`tools/fuzz` draws others, and so does `pytest --hypothesis-profile default`.
"""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parent))

import hypothesis

import form  # noqa: F401


hypothesis.settings.register_profile("suite", derandomize=True)
hypothesis.settings.load_profile("suite")

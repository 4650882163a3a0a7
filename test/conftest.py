"""Registers the form that is tested (`form.py`); a run draws the same examples as the last one.

`tools/fuzz` draws others, and so does `pytest --hypothesis-profile default`.
"""

import hypothesis

import form  # noqa: F401


hypothesis.settings.register_profile("suite", derandomize=True)
hypothesis.settings.load_profile("suite")

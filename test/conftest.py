"""Registers the form that is tested (`form.py`); a run draws the same examples as the last one.

`tools/fuzz` draws others, and so does `pytest --hypothesis-profile default`.
"""

import hypothesis
import pytest

import form
import patched_form


hypothesis.settings.register_profile("suite", derandomize=True)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--each-hook", action="store_true", help="in the patched form: few tests, which reach every hook")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--each-hook"):
        if not form.PATCHED:
            raise pytest.UsageError("--each-hook is for the patched form: tools/run_patched.py pytest --each-hook")
        patched_form.record()
        config.pluginmanager.register(patched_form.Plugin())

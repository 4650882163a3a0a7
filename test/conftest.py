"""Registers the form that is tested (`form.py`); a run draws the same examples as the last one.

`tools/fuzz` draws others, and so does `pytest --hypothesis-profile default`.
"""

import atexit
import collections
import gc
import logging
import os
import shutil
import sys
import tempfile

import hypothesis
import pytest


gc.disable()  # until all is collected: imports and trees of syntax make much, and hardly any garbage
os.environ["COLUMNS"] = "160"  # of commands; the workers of xdist say 80
if "OVERLAY_TEST_BUILDS" not in os.environ:  # for all processes of the run: `stand_ins/c_module.py`
    os.environ["OVERLAY_TEST_BUILDS"] = _builds = tempfile.mkdtemp()
    _own = os.getpid()
    atexit.register(lambda: os.getpid() == _own and shutil.rmtree(_builds, ignore_errors=True))
hypothesis.settings.register_profile("suite", derandomize=True)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also what carries the mark slow: whole corpora")
    parser.addoption("--each-hook", action="store_true", help="in the patched form: few tests, which reach every hook")


def pytest_configure(config: pytest.Config) -> None:
    if flags := os.environ.get("TORCH_OVERLAY_CFLAGS"):  # those of a sanitizer: tools/check
        import form
        from torch_overlay import csrc

        csrc.FLAGS += tuple(flags.split())
    if config.getoption("--each-hook"):
        import form
        import patched_form

        if not form.PATCHED:
            raise pytest.UsageError("--each-hook is for the patched form: tools/run_patched.py pytest --each-hook")
        patched_form.record()
        config.pluginmanager.register(patched_form.Plugin())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that is named on the command line runs, slow or not."""
    if config.getoption("--slow") or any("::" in argument for argument in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)


def pytest_collection_finish() -> None:
    """Tests may replace upstream's functions: the hooks are there already. And collections of garbage leave out the two
    million objects that imports have made, and are as many as a compilation makes worth it.
    """
    import form  # and torch, which the process that hands tests to workers doesn't need

    if not form.PATCHED:
        form.overlay.enable()
        # Upstream's TestCase has PyTorch write its structured trace, to nowhere. The patched form does.
        logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]
    gc.set_threshold(50_000, 20, 100)
    gc.enable()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries complain of objects that are left at the end


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """At the end of a file let go of what it compiled; what lives on is left out of later collections of garbage."""
    if nextitem is not None and nextitem.path != item.path and "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped, a line for each reason."""
    reports = terminalreporter.stats.get("skipped", ())
    reasons = collections.Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count} skipped: {reason}")

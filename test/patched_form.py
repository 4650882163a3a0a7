"""`--each-hook`: the patched form runs few tests, which together reach every hook of the patch series.

Both forms run the same text, so what the patched form has to show is that each hook is in its place. The first test of
each class runs, but for `test/unit`, and what carries `@pytest.mark.each_hook`. A hook that none of them calls is an
error.
"""

import re
from typing import Any

import pytest

import form


_FILE = re.compile(r"^\+\+\+ b/(\S+)$", re.MULTILINE)
_HOOK = re.compile(r'^\+ *@wrapped_by\("([^"]+)"\)$', re.MULTILINE)

UNIT = form.ROOT / "test" / "unit"

reached: set[str] = set()


def hooks() -> set[str]:
    """The implementations that the series calls from upstream's files."""
    found: set[str] = set()
    for path in (form.ROOT / "patches").glob("*/*.patch"):
        _, *parts = _FILE.split(path.read_text())
        for name, changes in zip(parts[::2], parts[1::2]):
            if not name.startswith("torch/_overlay/"):
                found.update(_HOOK.findall(changes))
    return found


def record() -> None:
    """From now on `reached` gets the implementation of each hook at its first call."""
    from torch._overlay import hooks as module  # pyrefly: ignore[missing-import]

    resolve = module.resolve

    def resolve_and_record(reference: str) -> Any:
        reached.add(reference)
        return resolve(reference)

    module.resolve = resolve_and_record


class Plugin:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        seen: set[Any] = set()
        kept, left = [], []
        for item in items:
            group = item.parent
            always = item.get_closest_marker("each_hook")
            is_skipped = item.get_closest_marker("gpu") or item.get_closest_marker("skip") or UNIT in item.path.parents
            (kept if always or not (group in seen or is_skipped) else left).append(item)
            if not is_skipped:
                seen.add(group)
        items[:] = kept
        config.hook.pytest_deselected(items=left)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        reached.update(getattr(node, "workeroutput", {}).get("reached", ()))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["reached"] = sorted(reached)
        elif not session.shouldstop and hooks() - reached:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if missing := sorted(hooks() - reached):
            terminalreporter.section("hooks that no test has called")
            for reference in missing:
                terminalreporter.line(reference)

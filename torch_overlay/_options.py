"""Checks options of `torch_overlay.config` where they are set: at an assignment, and at the import for environment
variables, not in the middle of a compilation.

Upstream's configuration accepts any value, and understands only "0" and "1" in a variable.
"""

from __future__ import annotations

import difflib
import logging
import os
import pickle
from typing import Any, NamedTuple, TYPE_CHECKING

from torch_overlay._functorch.offload.settings import parse, Settings


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

log = logging.getLogger(__name__)

MODES = ("relaunch", "trees", "off")
ON, OFF = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f")
PREFIX = "TORCH_OVERLAY_"
OTHERS = "DISABLE", "CFLAGS"  # variables that stand for no option
SPELLINGS = "1, true, yes or on, or 0, false, no or off"


class Option(NamedTuple):
    """`takes` describes the values that `accepts` allows; `read` converts a variable's text, or raises ValueError."""

    takes: str
    accepts: Callable[[Any], bool]
    read: Callable[[str], Any]
    spellings: str = ""


def read_switch(text: str) -> bool:
    word = text.lower()
    if word not in ON + OFF:
        raise ValueError(text)
    return word in ON


def _is_number(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, (int, float)) and value >= 0  # NaN compares as False


def _offload(value: Any) -> Settings | None:
    return parse(value, "torch_overlay.config.activation_offload")


def _is_offload(value: Any) -> bool:
    _offload(value)  # its error says what the option takes
    return True


def offload_settings(config: Any) -> Settings | None:
    """Return the settings; None if `config` has offload off. Raise ValueError if the option is not understood, or can't
    be followed."""
    found = _offload(config.activation_offload)
    if found is not None and not config.streams:
        raise ValueError(
            "torch_overlay.config.activation_offload needs torch_overlay.config.streams: copies to the host run on "
            "streams of their own. Set streams = True, or activation_offload = None."
        )
    return found


SWITCH = Option("True or False", lambda value: type(value) is bool, read_switch, SPELLINGS)
COUNT = Option("an int, not negative", lambda v: type(v) is not bool and isinstance(v, int) and v >= 0, int)
OPTIONS: Mapping[str, Option] = {
    "streams": SWITCH,
    "nvtx": Option(
        "None, True or False",
        lambda v: v is None or type(v) is bool,
        lambda text: None if text.lower() == "none" else read_switch(text),
        f"none, {SPELLINGS}",
    ),
    "fold_branches_below_us": Option("a number of microseconds, not negative", _is_number, float),
    "activation_offload": Option(
        'None, "auto" or a dict', _is_offload, str.lower, "auto, none, or a number of gigabytes of 10^9 bytes"
    ),
    "cudagraphs": Option('"relaunch", "trees" or "off"', lambda v: type(v) is str and v in MODES, str.lower),
    "cudagraph_templates": COUNT,
    "cudagraph_verify": SWITCH,
    "cudagraph_concurrency": SWITCH,
    "cudagraph_rewrites": SWITCH,
}


def check(name: str, value: Any) -> None:
    """Raise ValueError if the option doesn't take the value. Upstream refuses names that are no options."""
    option = OPTIONS.get(name)
    if option is not None and not option.accepts(value):
        raise ValueError(f"torch_overlay.config.{name} takes {option.takes}; it was set to {value!r:.200}")


def check_all(changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        check(name, value)


def variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def switched_on(variable: str) -> bool:
    """True if an environment variable that is a switch is on; off if it is not set, or empty."""
    text = os.environ.get(variable, "").strip()
    try:
        return bool(text) and read_switch(text)
    except ValueError:
        raise ValueError(f"{variable} is {text!r} in the environment; it takes {SPELLINGS}") from None


def from_environment() -> dict[str, Any]:
    """Return the values of the options whose variables are set, and not empty."""
    found = {}
    for name, option in OPTIONS.items():
        text = os.environ.get(variable(name), "").strip()
        if text:
            try:
                found[name] = option.read(text)
                check(name, found[name])
            except ValueError:
                takes = option.spellings or option.takes
                raise ValueError(f"{variable(name)} is {text!r} in the environment; it takes {takes}") from None
    return found


def warn_of_unknown_variables() -> None:
    known = {*OTHERS, *map(str.upper, OPTIONS)}
    for name in sorted({v.removeprefix(PREFIX) for v in os.environ if v.startswith(PREFIX)} - known):
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {variable(near[0])}?" if near else ""
        log.warning("%s is set in the environment, but torch_overlay reads no such variable%s", variable(name), hint)


def install(config: ModuleType) -> None:
    """Make the configuration module check values: all of those set together, before any of them is set."""
    warn_of_unknown_variables()
    for name, value in from_environment().items():
        config._config[name].env_value_default = value

    class Checked(type(config)):  # type: ignore[misc]
        def __setattr__(self, name: str, value: object) -> None:
            if name == "__spec__":  # importlib.reload
                raise ImportError(f"{config.__name__} can't be loaded again: set its options, or start a new process")
            check(name, value)
            super().__setattr__(name, value)

        def patch(self, *args: Any, **kwargs: Any) -> Any:
            patch = super().patch(*args, **kwargs)
            patch.changes = dict(patch.changes)
            check_all(patch.changes)
            return patch

        def _make_closure_patcher(self, **changes: Any) -> Any:
            check_all(changes)
            return super()._make_closure_patcher(**changes)

        def load_config(self, maybe_pickled_config: Any) -> None:
            saved = maybe_pickled_config
            values = saved if isinstance(saved, dict) else pickle.loads(saved)
            check_all(values)
            super().load_config(values)

    object.__setattr__(config, "__class__", Checked)

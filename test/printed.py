"""Calls a function, and returns what it prints, too."""

import contextlib
import io
from collections.abc import Callable
from typing import Any


def printed(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, str, str]:
    """Its result, and its text on stdout and on stderr."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        result = function(*arguments, **options)
    return result, out.getvalue(), errors.getvalue()

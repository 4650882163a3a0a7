"""Runs code in a process that is forked from one which has imported PyTorch and its compiler, and nothing of ours.

The imports cost a fresh interpreter five seconds of the processor. The child is as fresh in all else: its environment,
its `sys.path`, its `__main__` and its output are its own. Call it through `form.fork_python`.
"""

import atexit
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path


PRELOADED = ("torch._dynamo.backends.inductor", "torch._inductor.compile_fx", "torch._inductor.codecache")


def run(code: str, arguments: Sequence[str], environment: dict[str, str], outputs: Sequence[Path]) -> None:
    """Become `python -c code arguments`, and end as it would: by returning, or with its SystemExit or exception."""
    for number, name in enumerate(outputs, 1):
        file = os.open(name, os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(Path(__file__).parent)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv[:] = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(code, "<string>", "exec"), vars(main))
    finally:
        atexit._run_exitfuncs()

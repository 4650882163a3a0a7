"""The C sources: no compiler warns of one, and a change of any is built."""

import contextlib
import functools
import gc
import os
import subprocess
import sysconfig
import tempfile
import weakref
from pathlib import Path
from unittest import mock

from torch._dynamo.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form  # noqa: F401
from torch_overlay import csrc


SOURCES = sorted(path.name for path in csrc.FOLDER.glob("*.c"))


@instantiate_parametrized_tests
class TestSources(TestCase):
    @parametrize("name", SOURCES)
    def test_compiles_without_warnings(self, name: str) -> None:
        from triton.runtime.build import _find_compiler

        # CPython's signatures leave arguments unused, and its tables end in a row of one field.
        quiet = ("-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-cast-function-type")
        warnings = ("-Wall", "-Wextra", "-Werror", *quiet)
        flags = (*csrc.FLAGS, *warnings, "-O2", "-fsyntax-only", f"-I{sysconfig.get_paths()['include']}")
        command = [_find_compiler("c"), *flags, str(csrc.FOLDER / name)]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_change_of_any_file_builds_anew(self) -> None:
        before = csrc.arguments()
        names = [path.name for path in csrc.FOLDER.glob("*.[ch]") if path.name != csrc.MAIN]  # whose text Triton reads
        for name in names:
            read = Path.read_bytes
            changed = lambda path, name=name, read=read: read(path) + b" " * (path.name == name)  # noqa: E731
            with mock.patch.object(Path, "read_bytes", changed):
                self.assertNotEqual(csrc.arguments(), before, name)


class TestFailedBuild(TestCase):
    def test_compiler_that_hangs_has_a_time_limit(self) -> None:
        from triton.runtime import build

        with tempfile.TemporaryDirectory() as folder:
            compiler, alive = Path(folder, "cc"), Path(folder, "alive")
            compiler.write_text(f"#!/bin/sh\nsleep 1000 > {alive} &\nwait\n")
            compiler.chmod(0o755)
            os.mkfifo(alive)
            reader = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
            self.addCleanup(os.close, reader)
            hangs = mock.patch.object(build, "_find_compiler", lambda language: str(compiler))
            error = self.assertRaisesRegex(RuntimeError, f"the compiler {compiler} has not ended in 0.5 s")
            with hangs, mock.patch.object(csrc, "SECONDS", 0.5), error:
                csrc.build("libnone.so")
            self.assertIs(build.subprocess, subprocess)
            os.set_blocking(reader, True)
            self.assertEqual(os.read(reader, 1), b"")  # the compiler's child is gone

    def test_keeps_nothing_of_its_callers(self) -> None:
        held: list[weakref.ref[set[int]]] = []

        def call() -> None:
            local = set[int]()
            held.append(weakref.ref(local))
            with contextlib.suppress(csrc.NotBuiltError):  # `assertRaises` clears the frames
                csrc.extension()

        with (
            mock.patch.object(csrc, "_attempt", functools.cache(csrc._attempt.__wrapped__)),
            mock.patch.object(csrc, "build", mock.Mock(side_effect=RuntimeError)),
        ):
            for _ in range(3):
                call()
            gc.collect()
            self.assertEqual([local() for local in held], [None] * 3)

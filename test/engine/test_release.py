"""Releases of PyTorch: patch releases of the tested one are taken if all code at the seams is the same, no other is."""

from __future__ import annotations

import sys
import textwrap
import unittest
from typing import TYPE_CHECKING
from unittest import mock

import form
from fake_upstream import FakeUpstream, UPSTREAM


if not form.PATCHED:
    from torch_overlay._engine import verify
if TYPE_CHECKING:
    from torch_overlay.errors import OverlayError


@form.overlay_only
class TestRelease(FakeUpstream):
    def setUp(self) -> None:
        super().setUp()
        self.enterContext(mock.patch.dict(verify.base(), torch="2.15.0"))
        self.release("2.15.1+cu132")

    def release(self, version: str) -> None:
        self.enterContext(mock.patch.object(sys.modules["torch"], "__version__", version))

    def enabled(self):
        installer = self.installer(self.seam("plain"))
        with self.assertLogs("torch_overlay", "WARNING") as logged:
            installer.enable()
        self.assertEqual(self.load().plain(1), 20)
        (line,) = logged.output
        return installer, line

    def test_patch_release_with_the_same_code_is_enabled_with_one_line_that_names_both(self) -> None:
        line = "torch 2.15.1 was not tested; every function that the overlay changes is as in torch 2.15.0"
        self.assertIn(line, self.enabled()[1])

    def test_patch_release_before_the_tested_one_is_enabled(self) -> None:
        verify.base()["torch"] = "2.15.3"
        self.assertIn("torch 2.15.1 was not tested", self.enabled()[1])

    def test_patch_release_may_change_what_no_seam_touches(self) -> None:
        self.write("torchfake/upstream.py", textwrap.dedent(UPSTREAM).replace("x + 7", "x + 8"))
        self.assertEqual(self.enabled()[0].edited_files, ["torchfake/upstream.py"])

    def refused_by_version(self) -> OverlayError:
        with self.assertNoLogs("torch_overlay", "WARNING"):
            error = self.refused("wrong_version", self.seam("cached"), self.seam("plain"))
        self.assertEqual(error.expected, "torch 2.15.0, built with CUDA")
        return error

    def test_patch_release_with_other_code_at_a_seam_is_refused_by_both_names_and_the_seam(self) -> None:
        for old, new in (("x + 1", "x + 11"), ("def plain", "def renamed"), ("def plain", "deff plain")):
            with self.subTest(new):
                self.write("torchfake/upstream.py", UPSTREAM.replace(old, new))
                changed = "torchfake.upstream:cached" if new.startswith("deff") else "torchfake.upstream:plain"
                error = self.refused_by_version()
                self.assertEqual(error.found, f"torch 2.15.1+cu132, with {changed} changed")
                self.assertIn("Install torch==2.15.0, or the release of torch_overlay for torch 2.15.1.", str(error))
        (self.root / "torchfake" / "upstream.py").unlink()
        self.assertIn("torch 2.15.1+cu132, with torchfake.upstream:cached", self.refused_by_version().found)

    def test_other_releases_are_refused_whatever_their_code(self) -> None:
        for version in ("2.14.1", "2.16.0", "3.15.1", "2.15", "2.15.1rc1", "2.15.1.post1", "2.15.0a0+git1234"):
            with self.subTest(version):
                self.release(version)
                self.assertEqual(self.refused_by_version().found, f"torch {version}")

    def test_patch_release_without_cuda_is_refused(self) -> None:
        with mock.patch.object(sys.modules["torch"].version, "cuda", None):
            error = self.refused("wrong_version", self.seam("plain"))
        self.assertEqual(error.found, "torch 2.15.1+cu132 without CUDA")

    def in_a_process(self, code: str, **env: str) -> list[str]:
        """Lines that a patch release with the code of the installed PyTorch prints."""
        renamed = "import torch\ntorch.__version__ = torch.torch_version.TorchVersion('2.15.1+cu132')\n"
        result = form.fork_python(renamed + code, env=env)
        self.assertEqual(result.returncode, 0, result.stderr)
        return [line for line in (result.stdout + result.stderr).splitlines() if "2.15.1" in line]

    def test_all_seams_of_a_patch_release_are_checked_and_status_says_that_it_was_not_tested(self) -> None:
        (shown, logged) = self.in_a_process("import torch_overlay; print(torch_overlay.status().why)")
        self.assertIn("seams wait for the first compilation", shown)
        for line in (shown, logged):
            self.assertIn("torch 2.15.1 was not tested", line)

    def test_policy_alone_takes_a_patch_release_by_the_same_check(self) -> None:
        code = "import torch_overlay.cudagraphs\n"
        (logged,) = self.in_a_process(code, TORCH_OVERLAY_DISABLE="1")
        self.assertIn("torch 2.15.1 was not tested", logged)
        edited = (
            "from torch_overlay._engine import verify as v; v.fingerprint = lambda *_: ''; v.base()['files'] = {}\n"
        )
        refused = f"try: {code}except RuntimeError as error: print(' '.join(str(error).split()))"
        (error,) = self.in_a_process(edited + refused, TORCH_OVERLAY_DISABLE="1")
        self.assertRegex(
            error,
            r"wrong_version.* torch 2\.15\.0, built with CUDA found: torch 2\.15\.1\+cu132, with torch\.\S+ changed",
        )


class TestCacheKey(unittest.TestCase):
    def test_code_that_one_release_compiled_is_not_served_to_another(self) -> None:
        """Inductor's key and AOTAutograd's have this one in them."""
        from torch._inductor.codecache import FxGraphHashDetails, torch_key

        self.addCleanup(torch_key.clear)
        found = []
        for version in ("2.15.0", "2.15.1"):
            torch_key.clear()
            with mock.patch.object(sys.modules["torch"], "__version__", version):
                found.append(FxGraphHashDetails(None, [], {}, []).torch_version)
        self.assertNotEqual(*found)

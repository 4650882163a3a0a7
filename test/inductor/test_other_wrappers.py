"""Code for FX wrappers has streams as on stock PyTorch: text and errors are the same."""

from __future__ import annotations

import json

import other_wrappers
from torch._inductor.test_case import TestCase

import form


def everything(**env: str) -> dict[str, str]:
    """All texts and errors, from a process of its own."""
    made = form.fork_python(f"import runpy; runpy.run_path({other_wrappers.__file__!r}, run_name='__main__')", env=env)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout.splitlines()[-1])


class TestOtherWrappers(TestCase):
    def test_all_is_as_without_the_import(self) -> None:
        ours = everything()
        if not form.PATCHED:
            self.assertEqual(ours, everything(TORCH_OVERLAY_DISABLE="1"))

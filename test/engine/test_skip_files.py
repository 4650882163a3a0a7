"""Dynamo traces none of the package's own frames, by whatever names its folder is reached.

A code object carries the name by which its module was imported. Editable installs, conda environments and vendored
trees reach a package through symbolic links, so that this name is not the folder's own.
"""

import os
import shutil
import tempfile
import unittest
from pathlib import Path

import form


PACKAGE = Path(form.overlay.__path__[0]).resolve()

# Every module of ours that is loaded once a program was compiled, by the name in its code.
SKIPPED = """
from torch._dynamo import trace_rules

def traced():
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torch_overlay")]
    ours = [(module.__name__, vars(module).get("__file__")) for module in modules]
    assert len(ours) > 40, ours
    return [(name, file) for name, file in ours if file and not trace_rules.check_file(file).skipped]
"""

TRAIN = """
import sys, torch, form
import torch_overlay
from contextlib import nullcontext
from torch_overlay.testing import simulated_gpu
from torch._dynamo.convert_frame import dynamo_tls

with {gpu}:
    side = torch.cuda.Stream()
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)

    def step(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a = x @ weight
        torch.cuda.current_stream().wait_stream(side)
        (a * x).sum().backward()

    step = torch.compile(step, mode="reduce-overhead")
    with torch._dynamo.config.patch(compiled_autograd=True):
        for _ in range(6):
            step(torch.randn(64, 64, device="cuda"))
assert any("step" in frame for frame in dynamo_tls.traced_frame_infos), dynamo_tls.traced_frame_infos
print([frame for frame in dynamo_tls.traced_frame_infos if "torch_overlay/" in frame])
"""


@form.overlay_only
class TestLinks(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def link(self, name: str, to: Path = PACKAGE) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(to)
        return path

    def run_ok(self, code: str, *first: Path) -> str:
        """Runs code in a process that finds the package in the first of these folders."""
        text = f"import sys\nsys.path[:0] = {list(map(str, first))}\n{code}"
        result = form.run_python(text)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    @form.slow
    def test_frames_of_a_package_behind_a_link_are_not_traced(self) -> None:
        """Compiled autograd calls code of the package in frames that Dynamo looks at."""
        link = self.link("torch_overlay")
        output = self.run_ok(
            TRAIN.replace("{gpu}", "simulated_gpu()")
            + f"{SKIPPED}assert torch_overlay.__file__ == {str(link / '__init__.py')!r}\nprint(traced())",
            self.folder,
        )
        self.assertEqual(output.splitlines()[-2:], ["[]", "[]"])

    @form.needs_gpu
    def test_graphs_of_a_backward_behind_a_link(self) -> None:
        self.link("torch_overlay")
        output = self.run_ok(TRAIN.replace("{gpu}", "nullcontext()"), self.folder)
        self.assertEqual(output.splitlines()[-1], "[]")

    @form.slow
    def test_every_name_of_the_folder_is_skipped(self) -> None:
        self.link("direct/torch_overlay")
        self.link("chain/torch_overlay", self.folder / "direct" / "torch_overlay")
        self.link("parent", self.folder / "chain")
        self.link("other/torch_overlay")
        for first in ("direct", "chain", "parent", "parent/../chain", "parent/../direct"):
            with self.subTest(first):
                names = [str(self.folder / first), str(self.folder / "other"), str(PACKAGE.parent)]
                code = f"""
import torch, torch_overlay, os
torch_overlay.enable()
from torch._dynamo import trace_rules
before = list(trace_rules.SKIP_DIRS)
for folder in {names}:
    file = os.path.join(folder, "torch_overlay", "hooks.py")
    assert os.path.exists(file), file
    assert trace_rules.check_file(file).skipped, file
torch_overlay.disable()
left = [d for d in trace_rules.SKIP_DIRS if d not in before or "torch_overlay" in d]
assert not left and len(set(before)) >= len(set(trace_rules.SKIP_DIRS)), left
"""
                self.run_ok(code, Path(names[0]), Path(names[1]))

    @form.slow
    def test_folder_that_the_link_leads_to(self) -> None:
        """... from where nothing is imported."""
        far = self.folder / "far" / "torch_overlay"
        shutil.copytree(PACKAGE, far, ignore=shutil.ignore_patterns("__pycache__"))
        self.link("near/torch_overlay", far)
        self.run_ok(
            "import torch, torch_overlay\ntorch_overlay.enable()\nfrom torch._dynamo import trace_rules\n"
            f"for file in ({str(far / 'hooks.py')!r}, torch_overlay.__file__):\n"
            "    assert trace_rules.check_file(file).skipped, file",
            self.folder / "near",
        )

    @form.slow
    def test_another_package_beside_it_is_traced(self) -> None:
        """The rule names folders, not everything that begins like them."""
        self.link("torch_overlay")
        beside = self.folder / "torch_overlay_models" / "model.py"
        self.run_ok(
            "import torch, torch_overlay\ntorch_overlay.enable()\nfrom torch._dynamo import trace_rules\n"
            f"assert not trace_rules.check_file({str(beside)!r}).skipped",
            self.folder,
        )

    @form.slow
    def test_files_that_are_links_into_a_store(self) -> None:
        """Package managers may link file by file, to where no other file of the package lies beside."""
        store = self.folder / "store"
        store.mkdir()
        for number, path in enumerate(sorted(PACKAGE.rglob("*"))):
            if path.is_file() and path.suffix in (".py", ".json", ".c", ".h"):
                (store / str(number)).mkdir()
                kept = store / str(number) / f"{number}{path.suffix}"
                kept.write_bytes(path.read_bytes())
                self.link(os.path.join("tree", "torch_overlay", path.relative_to(PACKAGE)), kept)
        self.run_ok(
            TRAIN.replace("{gpu}", "simulated_gpu()")
            + SKIPPED
            + "assert torch_overlay.status().enabled and not traced(), traced()\n"
            "from torch_overlay.version import source_digest\n"
            f"sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
            "import runpy\n"
            f"found = runpy.run_path({str(PACKAGE / 'version.py')!r})\n"
            "assert source_digest() == found['source_digest']()",
            self.folder / "tree",
        )

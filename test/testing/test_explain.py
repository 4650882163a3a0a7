"""`python -m torch_overlay explain`: what it prints of a script and of a function."""

import contextlib
import json
import os
import re
import sys
import tempfile
import textwrap

from torch._dynamo.test_case import TestCase

import form  # noqa: F401
from printed import printed
from torch_overlay import config
from torch_overlay._cli import commands
from torch_overlay._inductor.relaunch import causes


PROGRAM = """\
    import torch

    side = torch.cuda.Stream()


    def branch_inputs():
        return torch.randn(8, 8, device="cuda"), torch.randn(8, 8, device="cuda")


    def branch(x, y):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a = x @ y
        b = y.cos()
        torch.cuda.current_stream().wait_stream(side)
        return a + b


    def alone():
        return torch.ones(4, device="cuda").sin()


    def needs(x):
        return x


    def breaks():
        x = torch.ones(4, device="cuda") + 1
        torch._dynamo.graph_break()
        return x * 2


    @torch.compile(fullgraph=True)
    def compiled(x):
        return x * 3


    if __name__ == "__main__":
        import sys

        print("arguments:", sys.argv[1:])
        compiled(torch.ones(4, device="cuda"))
        if "fail" in sys.argv:
            raise ValueError("told to fail")
"""


REFUSES = """
    from torch_overlay._inductor.relaunch.causes import CodeFacts, refuse, Refused

    code = CodeFacts("forward of 0/0", 0, source="model.py:3: y = f(x)")
    refuse(Refused.of("node-kind", "a library launched a CUDA graph of its own", region=code))
"""


OFFLOADS = """
    import torch

    layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(6)).to("cuda")


    @torch.compile
    def forward(x):
        for layer in layers:
            x = layer(x).relu()
        return x.sum()


    forward(torch.randn(8192, 1024, device="cuda")).backward()
"""

COPIES = """\


    def copies_inputs():
        return torch.randn(8, 8, device="cuda"), torch.randn(8, 8).pin_memory(), torch.randn(8, 8).pin_memory()


    def copies(x, host, ring):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a = host.to("cuda")
            b = host.to("cuda", non_blocking=True)
            ring[0].copy_(x[0], non_blocking=True)
            ring[:, 1:3].copy_(x[:, 1:3], non_blocking=True)
            own = torch.zeros(8, 8)
            own[0].copy_(x[0], non_blocking=True)
            more = host + 1
            c = more.to("cuda", non_blocking=True)
            pinned = torch.zeros(8, 8, pin_memory=True)
            pinned[0].copy_(x[0], non_blocking=True)
            was = pinned.clone()
            pinned[1].copy_(x[1], non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        return a + b, own, more, c, pinned, was


    def copies_alone(x, host, ring):
        x.copy_(host, non_blocking=True)


    copies_alone_inputs = copies_inputs
"""


class Explain(TestCase):
    def setUp(self):
        super().setUp()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.path = os.path.join(folder, "program.py")
        with open(self.path, "w") as f:
            f.write(textwrap.dedent(PROGRAM))

    def explain(self, *argv):
        self.code, out, self.errors = printed(commands.main, ["explain", "--simulate", *argv])
        return out

    def test_function(self):
        text = self.explain(f"{self.path}:branch")
        self.assertEqual(self.code, 0, self.errors)
        self.assertIn("simulated", text)
        self.assertRegex(text, r"graph breaks\W+none")
        self.assertRegex(text, r"streams\W+2, with the current stream")
        self.assertRegex(text, r"memory\W+\d.* at the peak of the inference graph")
        self.assertRegex(text, r"branch +\(.*program\.py:10\)")
        self.assertRegex(text, r"(?m)^\d+ +1 +op\d.*program\.py:13: a = x @ y$")
        self.assertRegex(text, r"(?m)^\d+ +0 +op\d.*program\.py:1[46]: ")
        self.assertNotRegex(text, r"aten\.|def call\(")
        self.assertRegex(text, r"written: 2 records and 2 waits; generated: \d+ records and \d+ waits")
        self.assertIn("records after", text)

    def test_graph_on_demand(self):
        text = self.explain(f"{self.path}:branch", "--graph")
        self.assertRegex(text, r"1\b.*mm: f32\[8, 8\] = aten\.mm\.default.*:13\b.*a = x @ y")
        self.assertRegex(text, r"cos: f32\[8, 8\] = aten\.cos\.default.*b = y\.cos\(\)")

    def test_json(self):
        found = json.loads(self.explain(f"{self.path}:branch", "--json"))
        self.assertEqual(
            (found["target"], found["simulated"], found["graph_breaks"]), (f"{self.path}:branch", True, [])
        )
        lines = {line.partition(": ")[2]: stream for stream, _, line in found["regions"][0]["operations"]}
        self.assertEqual(lines["a = x @ y"], 1)

    def test_calls_mode_and_backward(self):
        with open(self.path, "a") as file:
            file.write("\n\ndef trained_inputs():\n    return torch.ones(4, device='cuda', requires_grad=True)\n")
            file.write("\n\ndef trained(x):\n    return (x * x).sin()\n")
        options = ("--calls", "2", "--mode", "reduce-overhead", "--backward")
        text = self.explain(f"{self.path}:trained", *options)
        self.assertEqual(self.code, 0, self.errors)
        for words in (
            "backward graph: all on the current stream",
            "kernel launches of compiled code are in CUDA graphs",
        ):
            self.assertIn(words, text)
        self.explain(*options, self.path)
        self.assertEqual(self.code, 2)
        self.assertIn("--backward is about the function of FILE:FUNCTION", self.errors)

    def test_memory_is_accounted_for(self):
        report = self.explain(f"{self.path}:branch")
        self.assertRegex(report, r"Memory: [\d.]+ \w+ at the peak, [\d.\w ]+ (as|more than) .*on one stream")
        self.assertNotIn("Memory:", self.explain(f"{self.path}:alone"))

    def test_timeline(self):
        folder = os.path.dirname(self.path)
        svg, trace = os.path.join(folder, "x.svg"), os.path.join(folder, "x.json")
        text = self.explain("--out", svg, "--out", trace, f"{self.path}:branch")
        self.assertEqual(self.code, 0, self.errors)
        self.assertIn("kernels, 2 streams", text)
        self.assertRegex(" ".join(text.split()), "Simulated: nothing is computed.* are estimates")
        with open(svg) as picture, open(trace) as events:
            self.assertIn("a = x @ y", picture.read())
            self.assertTrue(json.load(events)["traceEvents"])

    def test_options_may_follow_a_function(self):
        svg = os.path.join(os.path.dirname(self.path), "x.svg")
        text = self.explain(f"{self.path}:alone", "--wrappers", "--out", svg)
        self.assertEqual(self.code, 0, self.errors)
        self.assertIn(f"wrote {svg}", self.errors)
        self.assertIn("def call(", text)
        self.explain(f"{self.path}:alone", "argument")
        self.assertEqual(self.code, 2)
        self.assertIn("no option or argument argument (", self.errors)

    def test_timeline_of_a_script_begins_at_its_first_compiled_call(self):
        text = self.explain("--out", os.path.join(os.path.dirname(self.path), "x.svg"), self.path)
        self.assertEqual(self.code, 0, self.errors)
        self.assertIn("1 kernel, 1 stream", text)  # without ones

    def test_script_that_exits_or_is_interrupted_keeps_its_report(self):
        for end, code, said in (
            ("sys.exit(3)", 2, "The program exited with status 3"),
            ("sys.exit()", 0, "compiled"),
            ("raise KeyboardInterrupt", 130, "The program was interrupted"),
        ):
            with open(self.path, "w") as file:
                file.write(textwrap.dedent(PROGRAM).partition('    if "fail"')[0] + f"    {end}\n")
            text = self.explain(self.path)
            self.assertIn(said, text)
            self.assertEqual(self.code, code)

    def test_offloaded_tensors_and_how_much_of_their_copies_is_hidden(self):
        with open(self.path, "w") as file:
            file.write(textwrap.dedent(OFFLOADS))
        svg = os.path.join(os.path.dirname(self.path), "x.svg")
        with config.patch(activation_offload={"budget_gb": 0.16}):
            text = self.explain("--out", svg, self.path)
        self.assertEqual(self.code, 0, self.errors)
        self.assertIn("Saved activations on the host", text)
        self.assertRegex(
            " ".join(text.split()), r"copy to the host relu\w*, .* \d+% hidden, program\.py:\d+: x = layer"
        )

    def test_regions_without_a_graph(self):
        self.assertNotIn("without a CUDA graph", self.explain(self.path))
        self.addCleanup(causes._refused.clear)
        with open(self.path, "a") as file:
            file.write(textwrap.dedent(REFUSES))
        for known in (False, True):  # what was refused before is not told again
            text = " ".join(self.explain(self.path).split())
            self.assertEqual(self.code, 0, self.errors)
            for words in ("Regions without a CUDA graph", "forward of 0/0", "node-kind", "a library", "model.py:3"):
                self.assertEqual(words in text, not known, text)

    def test_copies_that_block_the_host(self):
        """With the line and the reason; the others aren't listed."""
        with open(self.path, "a") as file:
            file.write(textwrap.dedent(COPIES))
        text = self.explain(f"{self.path}:copies")
        self.assertEqual(self.code, 0, self.errors)
        listed = text.partition("Copies that block the host")[2].partition("inference plan")[0]
        for line, why in (
            ('a = host.to("cuda")', "it is made without"),
            ("ring[:, 1:3].copy_(x[:, 1:3], non_blocking=True)", "the host copies elements"),
            ("own[0].copy_(x[0], non_blocking=True)", "the host memory isn't pinned"),
            ('c = more.to("cuda", non_blocking=True)', "the caller gets the host memory"),
            ("pinned[1].copy_(x[1], non_blocking=True)", "what was in the host memory"),
        ):
            self.assertRegex(listed, rf"program\.py:\d+.*{re.escape(line)}.*{re.escape(why)}")
        self.assertEqual(len(re.findall(r"program\.py:\d+", listed)), 5, listed)
        self.assertRegex(self.explain(f"{self.path}:copies_alone"), r"x\.copy_\(host, .*the function uses no stream")
        self.assertNotIn("block the host", self.explain(f"{self.path}:branch"))

    def test_graph_break(self):
        text = " ".join(self.explain(f"{self.path}:breaks").split())
        self.assertIn("torch._dynamo.graph_break()", text)
        self.assertIn("program.py:29", text)

    def test_script(self):
        text = self.explain(self.path, "one", "--two")
        self.assertEqual(self.code, 0, self.errors)
        self.assertIn("arguments: ['one', '--two']", text)
        self.assertIn("inference graph: all on the current stream", text)

    def test_script_that_fails_is_explained_up_to_there(self):
        text = self.explain(self.path, "fail")
        self.assertEqual(self.code, 2)
        self.assertIn("compiled  (", text)
        self.assertRegex(text, r"program\.py:\d+: ValueError: told to fail")

    def test_program_in_which_nothing_is_compiled(self):
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
            file.write("x = 1\n")
            file.flush()
            text = self.explain(file.name)
        self.assertEqual(self.code, 2)
        self.assertIn("Nothing was compiled: no torch.compile'd function was called.", text)

    def test_what_can_not_be_explained(self):
        for target, why in (
            ("/no/such/file.py", "no file /no/such/file.py"),
            (f"{self.path}:absent", "has no function absent"),
            (f"{self.path}:", f"{self.path}: names no function: the program is given as FILE[:FUNCTION]"),
            (f"{self.path}:needs", "should define needs_inputs() or example_inputs()"),
        ):
            self.explain(target)
            self.assertEqual(self.code, 2)
            self.assertIn(why, self.errors)

    def test_brackets_in_a_path_are_printed(self):
        with tempfile.NamedTemporaryFile(suffix="[red].py") as file:
            self.assertIn(f"{file.name} on ", self.explain(file.name))

    def test_plain_columns_without_rich(self):
        with without_rich():
            text = self.explain(f"{self.path}:branch")
        self.assertRegex(text, r"Summary\ngraph breaks +none\n")


@contextlib.contextmanager
def without_rich():
    from unittest import mock

    with mock.patch.dict(sys.modules, {"rich.console": None}):
        yield

"""Test cases that relaunch regions on the stand-in driver, or compile for graphs."""

import gc
import threading
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.test_case import TestCase
from torch._dynamo.utils import counters

import form  # noqa: F401
from stand_ins.relaunch_device import fake_device
from torch_overlay import config
from torch_overlay._inductor.relaunch import causes, runner, runners
from torch_overlay._inductor.relaunch.capture import make_graph
from torch_overlay._inductor.relaunch.causes import CodeFacts
from torch_overlay._inductor.relaunch.memory import arrange, outputs
from torch_overlay._inductor.relaunch.runner import Runner
from torch_overlay.testing import compile_only, simulated_gpu


def region(parameters, *lines):
    """A region as Inductor generates it. `new(4, 8)` in it is contiguous memory."""
    unpacked = f"{parameters} = args" if "," in parameters else f"{parameters}, = args"
    return "\n    ".join(["def region(args):", unpacked, "args.clear()", *lines]) + "\n"


# A region with an output, and with scratch memory.
ADD = region(
    "x, w",
    "buf0 = torch.mul(x, w, out=new(4, 4))",
    "buf1 = torch.add(buf0, x, out=new(4, 4))",
    "del buf0",
    "return (buf1,)",
)


# A backward whose saved tensors die in turn: each gradient is made from one.
SQUARES = """
def region(args):
    *saved, n = args
    args.clear()
    made = []
    while saved:
        x = saved.pop()
        out = empty_strided_cuda((n,), (1,), torch.float64)
        torch.mul(x, x, out=out)
        del x
        made.append(out)
    return tuple(made)
"""


def host(value, dtype=torch.float64):
    made = torch.tensor(value, dtype=dtype)
    made.on_host = True
    return made


def run_in_threads(*targets):
    """Run these functions side by side, to their ends."""
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def define(library, schema, function, fake=torch.empty_like, device="CPU"):
    """Define an operator that computes `function` on this device."""
    name = library.define(schema)
    library.impl(name, function, device)
    library.impl(name, fake, "Meta")


class RelaunchTestCase(TestCase):
    def setUp(self):
        super().setUp()
        counters.clear()
        causes._refused.clear()
        self.device = self.enterContext(fake_device())

    def tearDown(self):
        runners.forget_all()  # what an exception still holds is not the next test's
        self.assertEqual(self.device.open, 0, "a recording was left open")
        self.assertFalse(make_graph.capturing.locked())
        super().tearDown()

    def runner(
        self, source, *, static=(), mutated=(), saved=(), numbers=(), is_backward=False, verify=False, **namespace
    ):
        """A Runner of `def region(args)` in a module like generated code's."""
        scope = {"torch": torch, "empty_strided_cuda": self.device.empty, "aten": torch.ops.aten, **namespace}

        def new(*size, dtype=torch.float32):
            strides = [1]
            for n in size[:0:-1]:
                strides.insert(0, n * strides[0])
            return scope["empty_strided_cuda"](size, tuple(strides), dtype)

        scope["new"] = new
        exec(source, scope)
        code = CodeFacts(
            "a region", 0, tuple(static), tuple(mutated), frozenset(saved), is_backward, numbers=frozenset(numbers)
        )
        with config.patch(cudagraph_verify=verify):
            return Runner(scope["region"], code, self.device)

    def add(self, run, count=1, *, x=None, w=None):
        """Call a region of `ADD`, so many times, with other inputs each time but for those given. Return its output."""
        for _ in range(count):
            inputs = [torch.randn(4, 4) if given is None else given for given in (x, w)]
            (out,) = run(list(inputs))
            self.assertEqual(out, inputs[0] * inputs[1] + inputs[0])
        return out

    def warmed(self, **options):
        """A region of `ADD` that has been captured, and relaunched at its third call."""
        run = self.runner(ADD, **options)
        self.add(run, 3, w=torch.randn(4, 4))
        return run

    def cut_into_stages(self, least=1):
        """Let stages pay where one frees as few as `least` bytes."""
        limits = ((arrange, "GAIN", least), (arrange, "STEP", least), (arrange, "SMALL", 0))
        for module, name, value in (*limits, (runner, "LARGE", 1), (outputs, "LITTLE", 0)):
            self.enterContext(mock.patch.object(module, name, value))

    def counted(self, name):
        return counters["torch_overlay"]["cudagraph_" + name]


class CompilingTestCase(TestCase):
    """Compiles for a simulated GPU, and asks what was refused."""

    def setUp(self):
        super().setUp()
        self.forget_refusals()

    def forget_refusals(self):
        counters.clear()
        causes._refused.clear()

    def refused(self):
        """(reason, name of the code) of each; the counter agrees."""
        found = [(r.code, r.region.name.partition(" of compiled frame")[0]) for r in causes.refused()]
        self.assertEqual(counters["torch_overlay"]["cudagraph_refusals"], len(found), causes.refusals())
        return found

    def compiled(self, fn, *shapes, backward=False, mode="relaunch", device="cuda", **options):
        """The graphs that were made, in the words of `describe`, and "tree" for those of upstream."""
        with simulated_gpu(), config.patch(cudagraphs=mode), inductor_config.patch(options):
            inputs = [torch.randn(shape, device=device, requires_grad=backward) for shape in shapes or [(16, 64)]]
            self.seen = compile_only(fn, *inputs, mode="reduce-overhead", backward=backward)
        return [graph.get("relaunch") or "tree" for graph in self.seen.cudagraphs]


class GpuTestCase(TestCase):
    """Begins without graphs, counts and refusals, and leaves nothing behind."""

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        counters.clear()
        causes._refused.clear()

    def tearDown(self):
        torch._dynamo.reset()
        gc.collect()
        self.assertEqual(runners.counts(), dict.fromkeys(runners.counts(), 0))
        super().tearDown()

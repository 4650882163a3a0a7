"""Seeds of attention: where an operator looks for them depends on the capture, and there it finds them.

The operator here is one of the host's that raises where the real one would read an address of the wrong memory.
"""

import contextlib
import functools
from unittest import mock

import torch
from torch._dynamo.test_case import TestCase
from torch._dynamo.utils import counters

import form  # noqa: F401
from stand_ins import relaunch_case
from stand_ins.relaunch_case import region, RelaunchTestCase
from stand_ins.relaunch_device import is_region
from torch_overlay import config
from torch_overlay._inductor.relaunch import attention_seeds, causes
from torch_overlay.testing import compile_only, simulated_gpu


NAMES = ["x", "philox_seed", "philox_offset", "dropout_p", "out"]
REGION = region("x, seed, other, offset, n", "buf0 = new(4)", "attention(x, seed, offset, 0.5, buf0)", "return (buf0,)")


host = functools.partial(relaunch_case.host, dtype=torch.int64)


class TestSeedsOfARegion(RelaunchTestCase):
    def setUp(self):
        super().setUp()
        self.to_host = self.to_device = 0
        self.device.device = torch.device("cpu")
        patches = {"on_device": is_region, "is_capturing": self.is_capturing}
        for name, value in (patches | {"to_host": self.copy_to_host, "to_device": self.copy_to_device}).items():
            self.enterContext(mock.patch.object(attention_seeds, name, value))

    def is_capturing(self):
        return self.device.captured_by_user or getattr(self.device.thread, "recording", None) is not None

    def copy_to_host(self, tensor):
        self.to_host += 1
        return host(int(tensor))

    def copy_to_device(self, tensor, device):
        self.to_device += 1
        return tensor.clone()

    def attention(self, x, philox_seed, philox_offset, dropout_p, out):
        for seed in (philox_seed, philox_offset):
            if is_region(seed) != self.is_capturing():
                raise RuntimeError("a wild address")
        torch.add(x * philox_seed, philox_offset, out=out)

    def region(self, *places, **kwargs):
        """A region that was called with seeds at these places."""
        run = self.runner(REGION, attention=attention_seeds.with_seeds(self.attention, NAMES), **kwargs)
        self.call(run, *places)
        return run

    def call(self, run, *places, n=5, other=7):
        for place in places:
            x, seed, offset = torch.randn(4), torch.randint(1 << 20, ()), torch.randint(1 << 20, ())
            given = [place(int(seed)), place(int(offset))]
            (out,) = run([x, given[0], host(other), given[1], n])
            self.assertEqual(out, x * seed + offset)

    def test_forward_becomes_a_graph_before_its_backward_does(self):
        run = self.region(host, torch.tensor, torch.tensor, torch.tensor)
        self.assertEqual((self.counted("captures"), self.counted("relaunches")), (1, 3))
        self.assertEqual((self.to_host, self.to_device), (0, 0), "seeds that are where they belong are not copied")
        self.assertEqual(list(run.states), [(5, (torch.int64, 7))], "what is no seed is a part of the key")

    def test_forward_that_has_a_graph_sooner_or_later_than_its_backward(self):
        device = torch.tensor
        for hazard, places, to_host, to_device in (
            ("first backward after a forward that was launched", 4 * [device], 2, 0),
            ("forward that never gets a graph", 5 * [host], 0, 8),
            ("forward that runs as compiled now and then", [host, device, device, host, device, host], 0, 4),
        ):
            with self.subTest(hazard):
                counters.clear()
                self.to_host = self.to_device = 0
                self.region(*places)
                self.assertEqual((self.counted("captures"), self.counted("relaunches")), (1, len(places) - 1))
                self.assertEqual((self.to_host, self.to_device), (to_host, to_device))

    def test_seeds_that_are_found_late(self):
        """A launch that looks at no key is over, and the graph stays."""
        run = self.runner(REGION.replace("x, seed, other, offset, n", "x, seed, offset"), attention=self.add)
        for _ in range(3):
            run([torch.randn(4), torch.tensor(3), torch.tensor(4)])
        (state,) = run.states.values()
        run._learn_seeds((), state, {1, 2})
        self.assertIsNone(run.states.try_launch)
        x = torch.randn(4)
        self.assertEqual(run([x, host(3), host(4)])[0], x * 3 + 4)
        self.assertEqual((self.to_device, self.counted("captures"), self.counted("relaunches")), (2, 1, 3))

    def test_seeds_that_are_found_when_their_state_is_gone(self):
        """Many other keys came during the first run."""
        run = self.region()
        attention, self.gone = self.attention, False

        def late(*args):
            if not self.gone:
                self.gone = True
                run.states.clear()
            return attention(*args)

        run.region.model.__globals__["attention"] = attention_seeds.with_seeds(late, NAMES)
        self.call(run, host, torch.tensor, torch.tensor, host)
        self.assertEqual(len(run.states), 1)
        self.assertEqual(self.counted("captures"), 1)

    def add(self, x, seed, offset, dropout_p, out):
        torch.add(x * seed, offset, out=out)

    def test_refused_backward_runs_with_seeds_of_a_graph(self):
        run = self.region()
        self.device.kept = [512]
        self.call(run, host, torch.tensor, host, torch.tensor)
        self.assertEqual([r.code for r in causes.refused()], ["kept"])

    def test_other_keys_have_other_graphs(self):
        run = self.region()
        for n, other in ((5, 7), (5, 8), (6, 7), (5, 7), (5, 8), (6, 7), (5, 7)):
            self.call(run, torch.tensor, n=n, other=other)
        self.assertEqual(list(run.states), [(5, (torch.int64, 7)), (5, (torch.int64, 8)), (6, (torch.int64, 7))])
        self.assertEqual(self.counted("captures"), 3)

    def test_region_without_other_numbers_has_one_state(self):
        source = REGION.replace("x, seed, other, offset, n", "x, seed, offset")
        run = self.runner(source, attention=attention_seeds.with_seeds(self.attention, NAMES))
        for place in (host, torch.tensor, torch.tensor, host, host):
            x = torch.randn(4)
            self.assertEqual(run([x, place(3), place(4)])[0], x * 3 + 4)
        self.assertEqual(list(run.states), [()])
        self.assertEqual(self.counted("relaunches"), 4)
        self.assertEqual(self.to_device, 4, "a launch that looks at no key would leave them on the host")

    def test_capture_of_the_callers_copies_nothing(self):
        run = self.region(host, torch.tensor, torch.tensor)
        self.device.captured_by_user = True
        self.call(run, torch.tensor)
        with self.assertRaisesRegex(RuntimeError, "a wild address"):  # as without graphs of ours
            self.call(run, host)
        self.assertEqual((self.to_host, self.to_device), (0, 0))

    def test_after_a_reset(self):
        run = self.region(host, torch.tensor, torch.tensor)
        run.forget()
        self.call(run, host, torch.tensor, torch.tensor)
        self.assertEqual(self.counted("captures"), 2)

    def test_verified(self):
        self.region(host, torch.tensor, torch.tensor, host, verify=True)
        self.assertEqual(self.counted("relaunches"), 3)

    def test_forward_that_is_verified(self):
        def forward(x, out):
            torch.mul(x, 2, out=out)
            return torch.full((), 3) if self.is_capturing() else host(3)

        run = self.runner(
            region("x", "buf0 = new(4)", "seed = forward(x, buf0)", "return (buf0, seed)"), verify=True, forward=forward
        )
        for _ in range(4):
            x = torch.randn(4)
            out, seed = run([x])
            self.assertEqual((out, seed), (x * 2, torch.tensor(3)))
            del out, seed
        self.assertEqual(self.counted("relaunches"), 3)


class TestReturnedSeeds(TestCase):
    def test_caller_gets_them_in_host_memory(self):
        """As in eager, where their memory has no stream. A backward gets them wherever they are."""

        def attend(q, k, v):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                attention = torch.ops.aten._efficient_attention_forward
                out, _, seed, *_ = attention(q, k, v, None, None, None, None, None, 0.25, 0, True)
                y = out.sin()
            torch.cuda.current_stream().wait_stream(side)
            return y, seed

        def train(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.25)

        with simulated_gpu():
            side = torch.cuda.Stream()
            inputs = [torch.randn(2, 16, 4, 32, device="cuda", requires_grad=True) for _ in range(3)]
            returned = compile_only(attend, *[x.detach() for x in inputs], mode="reduce-overhead").wrappers[0]
            trained = compile_only(train, *inputs, mode="reduce-overhead", backward=True).wrappers
        before_calls, _, calls = returned.partition("def call(self")
        self.assertNotIn("_efficient_attention_forward.default(", before_calls)
        recorded = [line.strip() for line in calls.splitlines() if "record_stream" in line]
        of_host = [line for line in recorded if "buf3.is_cuda: buf3." in line]
        self.assertEqual((len(recorded), len(of_host)), (3, 2), recorded)
        for text in trained:
            self.assertNotIn("_efficient_attention", text.partition("def call(self")[2])


class TestOperator(TestCase):
    def call(self, *places, probability=0.5, capturing=False):
        """Where the operator found its seeds."""
        with contextlib.ExitStack() as stack:
            for name, value in {
                "on_device": is_region,
                "is_capturing": lambda: capturing,
                "to_host": lambda tensor: host(int(tensor)),
            }.items():
                stack.enter_context(mock.patch.object(attention_seeds, name, value))
            noted = stack.enter_context(attention_seeds.noted())
            operator = attention_seeds.with_seeds(lambda *args, **kwargs: [is_region(a) for a in args[1:3]], NAMES)
            given = [place(3) for place in places]
            found = operator(torch.ones(1), *given, probability, scale=None)
            self.assertEqual(noted, {seed.data_ptr() for seed in given})
            return found

    def test_seeds_come_to_the_host(self):
        for places in ((torch.tensor, torch.tensor), (host, torch.tensor), (host, host)):
            self.assertEqual(self.call(*places), [False, False])

    def test_seeds_of_a_capture_stay(self):
        self.assertEqual(self.call(torch.tensor, torch.tensor, capturing=True), [True, True])

    def test_seeds_that_nobody_reads_stay(self):
        self.assertEqual(self.call(torch.tensor, torch.tensor, probability=0.0), [True, True])

    def test_arguments_by_name(self):
        """The operator is replaced for eager code, too, which may name any of them."""
        to_host = mock.patch.object(attention_seeds, "to_host", lambda tensor: host(int(tensor)))
        are_mine = mock.patch.object(attention_seeds, "on_device", is_region)
        seen = {"philox_seed": torch.tensor(3), "philox_offset": torch.tensor(4), "dropout_p": 0.5, "out": None}
        operator = attention_seeds.with_seeds(lambda *args, **kwargs: (*args, *kwargs.values()), NAMES)
        with to_host, are_mine, mock.patch.object(attention_seeds, "is_capturing", bool):
            for by_place in range(5):
                values = list(seen.values())
                named = dict(list(seen.items())[by_place:])
                with attention_seeds.noted() as noted:
                    _, *found = operator(torch.ones(1), *values[:by_place], **named)
                self.assertEqual(found, values)
                self.assertEqual([is_region(seed) for seed in found[:2]], [False, False])
                self.assertEqual(noted, {seed.data_ptr() for seed in values[:2]})

    def test_what_is_traced_is_left_alone(self):
        class Traced(torch.Tensor):
            pass

        operator = attention_seeds.with_seeds(lambda *args: args, NAMES)
        given = (torch.ones(1), *[torch.tensor(1).as_subclass(Traced) for _ in range(2)], 0.5)
        with attention_seeds.noted() as noted:
            self.assertIs(operator(*given)[1], given[1])
        self.assertEqual(noted, set())

    def test_registration_wraps_both_operators_and_is_undone(self):
        overloads = [getattr(torch.ops.aten, name).default for name in attention_seeds.OPERATORS]
        before = [overload._op for overload in overloads]
        undo = attention_seeds.register()
        try:
            self.assertFalse(any(overload._op is op for overload, op in zip(overloads, before)))
        finally:
            undo()
        self.assertEqual([overload._op for overload in overloads], before)

    def test_attention_of_a_compiled_function_calls_what_is_registered(self):
        from torch_overlay.testing import compile_only, simulated_gpu

        def loss(q):
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sum()

        with simulated_gpu(), config.patch(cudagraphs="off"):
            made = compile_only(loss, torch.randn(1, 2, 16, 16, device="cuda", requires_grad=True), backward=True)
        self.assertIn(
            "= torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(", made.regions[1].wrapper
        )

"""Training with streams: where a backward runs, what it waits for and hands back, what is saved for it.

`TestPrograms` compiles the training programs of the corpus without a GPU, and runs forward and backward together on a
simulated device (`check_step`). The other classes show one rule or one hazard each; "(S1)" names a silent bug of
upstream's. `test_user_streams` compares each program on a GPU with ordered eager under injected delays.
"""

import contextlib
import copy
import functools
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import corpus
import torch
from torch._inductor.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.utils.checkpoint import checkpoint, CheckpointPolicy, create_selective_checkpoint_contexts

import form
from stream_programs import _program, by_name, gpu, PROGRAMS
from stream_programs._program import Kit
from stream_programs.random_training import source
from torch_overlay import config
from torch_overlay._dynamo import compiled_backward, external_objects, objects
from torch_overlay._functorch.streams.facts import note_fact
from torch_overlay._functorch.streams.tokens import CALLER
from torch_overlay._inductor.streams.plan import ENTRY
from torch_overlay._inductor.streams.region_spec import of_device, OperationKind
from torch_overlay.analysis import check, check_step, check_wrapper
from torch_overlay.analysis.race_check.wrapper_check import input_names
from torch_overlay.testing import Compiled, observe, simulated_gpu


WRITTEN = [p.name for p in PROGRAMS if p.group.startswith("training")]
DRAWN = [p.name for p in PROGRAMS if p.group == "random_training"]
PAIRS = corpus.cases(by_name(name) for name in WRITTEN)

# Other frames, or the caller, order what these leave unjoined: one wrapper can't show that.
SYMBOLIC = ("train_dynamic_shapes",)
TRACED = tuple(n for n in WRITTEN if n.startswith("train_compiled_autograd"))  # backwards without a region of their own
NO_STREAMS = ("train_stream_made_inside",)
LAUNCHES = (
    "train_user_kernels",
    "train_user_kernels_into_memory_of_another_stream",
)  # eager launches the user's kernels for real
# Nobody reads what their side streams compute; the second has no block at all.
DEAD_BRANCHES = ("train_random_00", "train_random_17", "train_random_54")
JOINED_OUTSIDE = (
    *("train_moving_average", "train_graph_break_in_block", "train_stream_across_graph_break"),
    *("train_update_of_an_earlier_result", "train_saved_value_read_by_unjoined_stream"),
)

PASSED_THROUGH = (  # by gradients, and nothing else: a backward's only operation there is a wait
    "train_gradient_through_addition",
    "train_gradient_through_view",
    "train_saved_value_as_gradient",
    "train_saved_value_as_unjoined_gradient",
)


@functools.cache
def compile_step(name: str, mode: str | None = None, **kwargs: bool) -> Compiled:
    """Compile the frames of a training step."""
    return corpus.compile_program(by_name(name), mode, **kwargs)[0]


def values(returned: Any) -> list[str]:
    """Gradients are counted by the leaves that have one: None is no value."""
    return [f"{v.dtype} {[*v.shape]} on {v.device}" for v in gpu._values(returned) if isinstance(v, torch.Tensor)]


@functools.cache
def returned_in_eager(name: str) -> list[str]:
    program = by_name(name)
    with simulated_gpu(program.devices):
        return values(program.instance().fn(*program.make_inputs("cuda", torch.Generator().manual_seed(1))))


def region(seen: Compiled, kind: str) -> Any:
    """A copy, which may be changed."""
    (found,) = [r for r in seen.regions if r.kind == kind]
    return copy.copy(found)


@instantiate_parametrized_tests
class TestPrograms(TestCase):
    def check(self, name: str, mode: str | None = None, **kwargs: bool) -> None:
        seen, returned = corpus.compile_program(by_name(name), mode, **kwargs)
        if name not in LAUNCHES:
            self.assertEqual(values(returned), returned_in_eager(name))
        if by_name(name).fullgraph:
            self.assertEqual([str(b) for b in seen.graph_breaks], [])
        for r in seen.regions:
            assert r.wrapper is not None
            compile(r.wrapper, "wrapper", "exec")
            self.assertNotRegex(r.wrapper, r"with stream|_get_stream_by_index|control_deps|torch\.ops\.streams")
            if r.kind == "backward":
                kept = "record_stream|range_" + ("|wait_stream" if name in PASSED_THROUGH else "")
                self.assertNotRegex(r.graph, rf"streams\.(?!{kept})")
        self.check_races(name, seen)

    def check_races(self, name: str, seen: Compiled) -> None:
        forwards, backwards = ([r for r in seen.regions if r.kind == k] for k in ("forward", "backward"))
        if name in JOINED_OUTSIDE or by_name(name).dynamic or by_name(name).devices > 1:  # the model knows one device
            return
        for forward in forwards:
            for backward in backwards:
                if forward.frame is backward.frame:
                    with simulated_gpu():
                        report = check_step(forward, backward)
                    self.assertTrue(report.ok, f"{report}\n{forward.wrapper}{backward.wrapper}")

    @parametrize("name,mode", form.sampled(PAIRS, 25))
    def test_compiles(self, name: str, mode: str) -> None:
        self.check(name, corpus.mode_of(mode))

    @parametrize("name,mode", form.sampled(PAIRS, 25))
    def test_keeps_what_eager_promises(self, name: str, mode: str) -> None:
        """The whole step, with the caller around it: also of frees by frames that know no streams."""
        report = corpus.check_program(by_name(name), corpus.mode_of(mode))
        self.assertEqual(corpus.findings(report), [], report)
        self.assertEqual(corpus.needless(by_name(name), report), [])

    @parametrize("name", form.sampled(WRITTEN, 25))
    def test_compiles_with_operators_between(self, name: str) -> None:
        self.check(name, sleeps=True)

    @parametrize("name", form.sampled(WRITTEN, 25))
    def test_compiles_with_small_branches_folded(self, name: str) -> None:
        self.check(name, fold=True)

    @parametrize("name", form.sampled(DRAWN, 61))
    def test_drawn(self, name: str) -> None:
        for fold in (False, True):
            try:
                self.check(name, fold=fold)
            except AssertionError as e:
                raise AssertionError(source(int(name[-2:]))) from e

    @form.slow
    @parametrize("name", ["train_two_branches", "train_experts", "train_saved_memory", "train_several_forwards"])
    def test_the_check_misses_no_wait(self, name: str) -> None:
        """Without any one of its waits a backward races: the plan is minimal, and the machine model sees it. (Waits of
        a side stream at the exit are for those who take its memory next, whom the model doesn't know.)
        """
        seen = compile_step(name)
        forward, backward = region(seen, "forward"), region(seen, "backward")
        text = backward.wrapper
        waits = [line for line in text.splitlines() if re.match(r" +ev\d+\.wait\(", line)]
        boundary = "".join(re.findall(r"\n    (?:entry|exit)=.*", text))
        waits += re.findall(rf"\({int(OperationKind.WAIT)}, \d+, \d+\),?", boundary)
        self.assertTrue(waits)
        for wait in waits:
            self.assertEqual(text.count(wait), 1)
            backward.wrapper = text.replace(wait, "")
            with simulated_gpu():
                self.assertFalse(check_step(forward, backward).ok, wait)


class TestOracle(TestCase):
    """What compiled code is compared with must not race itself."""

    @simulated_gpu(2)
    def test_oracle_runs_on_the_current_stream_alone(self) -> None:
        """In eager `train_views` frees a side stream's memory while the caller's stream still reads it, and in
        `train_autocast` one stream reads the cast of a weight that another one is still writing.
        """
        made: list[Kit] = []

        def keep(*args: Any, **kwargs: Any) -> Kit:
            made.append(Kit(*args, **kwargs))
            return made[-1]

        with mock.patch.object(_program, "Kit", keep):
            for name in (*WRITTEN, *DRAWN):
                by_name(name).instance()
        self.assertEqual(len(made), len(WRITTEN) + len(DRAWN))
        for kit in made:
            self.assertEqual(kit.stream(), torch.cuda.current_stream())
            self.assertEqual(kit.streams, [])


class TestPlacement(TestCase):
    """`# stream n` is a placement; what has none runs on the stream that autograd makes current."""

    maxDiff = None

    def backward(self, name: str) -> str:
        """The graph, without its constants."""
        lines = region(compile_step(name), "backward").graph.splitlines()
        return "\n".join(line for line in lines if "aten.full." not in line) + "\n"

    def placed(self, name: str) -> str:
        """The operations of a backward, those of side streams with the number of the stream."""
        found = re.findall(r"aten\.(\w+)\.\w+\(.*?(?:# stream (\d))?$", self.backward(name), re.MULTILINE)
        return " ".join(op + (f"@{stream}" if stream else "") for op, stream in found)

    def test_gradients_run_where_their_forward_ran(self) -> None:
        self.assertEqual(
            self.placed("train_two_branches"),
            "expand permute mm mm le where permute@1 mm@1 mm@1 le@1 where@1 mm mm add mm@1 mm@1 add add",
        )

    def test_sum_runs_where_its_consumer_runs(self) -> None:
        """The gradient of `weight * 2` is summed on the caller's stream, which is where `weight * 2` ran. Upstream
        takes the stream of the first summand that has one.
        """
        graph = self.backward("train_weight_of_three_streams")
        sums = re.findall(r"(add\w*): .*aten\.add\.Tensor\(.*\)(.*)", graph)
        self.assertEqual(len(sums), 2)
        self.assertEqual({where for _, where in sums}, {""}, graph)

    def test_sum_with_a_consumer_on_a_side_stream_runs_there(self) -> None:
        graph = self.backward("train_saved_memory")
        self.assertRegex(graph, r"add: .*aten\.add\.Tensor\(mul_\d, mul_\d\)  # stream 1")

    def test_recomputed_operations_run_with_their_consumers(self) -> None:
        """`b` was computed on the side stream, and is computed again for the gradients of `c` on the caller's."""
        self.assertEqual(
            self.placed("train_recomputed"),
            "expand mm mm mul sin@1 cos exp mul sin@1 neg@1 mul@1 cos@1 mul@1 mm@1 mm@1",
        )

    def test_body_of_a_custom_backward_is_ordered(self) -> None:
        """Upstream doesn't tag it as backward. Its last operation writes a gradient on the side stream."""
        seen = compile_step("train_autograd_function")
        (plan,) = region(seen, "backward").plans
        carriers = [op for op in plan.ops if op.stream == 1]
        self.assertTrue(carriers)
        self.assertIn(CALLER, carriers[-1].promised_to)
        self.assertTrue(any(at == len(plan.ops) for e in plan.events for at, _ in e.waits), plan.table())

    def test_waits_of_the_forward_stay_there(self) -> None:
        """The forward waits for the caller's event on the side stream; what the backward computes again doesn't."""
        seen = compile_step("train_event_of_the_caller")
        self.assertIn(".wait(stream", region(seen, "forward").wrapper)
        backward = region(seen, "backward")
        self.assertNotIn("objects=", backward.wrapper)
        for plan in backward.plans:
            self.assertEqual(plan.boundary_waits, ())

    def test_host_waits_for_what_an_update_left_alone_in_the_forward_only(self) -> None:
        """The host had waited for the row that is returned. The partitioner copies what has no operands into both."""
        with simulated_gpu(), observe() as seen:
            side, done = torch.cuda.Stream(), torch.cuda.Event()

            def fn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                value = x @ weight * 2
                done.record()
                with torch.cuda.stream(side):
                    done.synchronize()
                    value[4:20].copy_(x[8:24])
                return value[3:4]

            x, weight = torch.ones(32, 32, device="cuda"), torch.ones(32, 32, device="cuda", requires_grad=True)
            torch.compile(fn)(x, weight).sum().backward()
        waits = {
            kind: re.findall(r"\bstream\d\.synchronize\(\)", region(seen, kind).wrapper)
            for kind in ("forward", "backward")
        }
        self.assertEqual(list(map(len, waits.values())), [1, 0])

    def test_streams_of_the_forward_and_no_others(self) -> None:
        """Upstream registers one more "current stream" for each synchronisation, and a capture refreshes only index 0
        (S5).
        """
        backward = region(compile_step("train_weight_of_three_streams"), "backward")
        (streams,) = re.findall(r"streams=(\(.*?\)),", backward.wrapper)
        self.assertEqual(sorted(eval(streams)), [of_device(0), 1, 2])


class TestBoundary(TestCase):
    def test_gradients_are_joined(self) -> None:
        """Each gradient's last write is ordered before the caller's stream's next operation; upstream's isn't (S4)."""
        seen = compile_step("train_input_of_three_streams")
        (plan,) = region(seen, "backward").plans
        for stream in (1, 2):
            last = max(i for i, op in enumerate(plan.ops) if op.stream == stream)
            ordered = [e for e in plan.events if e.stream == stream and e.after >= last]
            self.assertTrue(any(s == 0 for e in ordered for _, s in e.waits), plan.table())

    def test_saved_tensors_that_share_memory_are_not_written_over(self) -> None:
        """The forward returns one buffer under two names; upstream donates both, and the backward writes to one before
        it reads the other (S3).
        """
        graph = torch.fx.Graph()
        with torch._subclasses.FakeTensorMode():
            a = torch.empty(4, 4)
            values = {"x": torch.empty(4, 4), "a": a, "b": a.view(16), "c": torch.empty(4)}
        nodes = {}
        for name in values:
            nodes[name] = graph.placeholder(name)
            nodes[name].meta["val"] = values[name]
        note_fact(nodes["c"], memory=1)
        graph.output((nodes["x"],))
        backward = torch.fx.GraphModule({}, graph)
        from torch_overlay._functorch.streams.hooks import collect_bw_donated_buffer_idxs

        donated = collect_bw_donated_buffer_idxs(lambda *args: [0, 1, 2, 3], backward, backward, None)
        self.assertEqual(donated, [0])

    def test_saved_update_of_an_input_is_the_callers_memory(self) -> None:
        """It is misaligned where the input is, and nothing is written over it."""

        def copies(x: torch.Tensor, y: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
            y.copy_(host, non_blocking=True)
            return x.clamp(-1, 1) * y

        def updates_a_part(x: torch.Tensor, y: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
            y[:, ::2].add_(host.to("cuda"))
            return x.clamp(-1, 1) * y

        def computes(x: torch.Tensor, y: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
            y.mul_(2)
            return x.clamp(-1, 1) * y

        for step, columns, is_callers in ((copies, 64, True), (updates_a_part, 32, True), (computes, 64, False)):
            text = self.backward_of(step, columns)
            self.assertEqual(bool(re.search(r"buf\d+ = (copy|slice_scatter\w*|mul); del", text)), not is_callers, text)
            hints = re.findall(r"'configs': \[\{(.*?)\}\]\}", text)
            self.assertEqual(all(f"({i},)" in hints[0] for i in range(4)), not is_callers, text)

    def backward_of(self, step: Any, columns: int) -> str:
        """The backward's code of a step with a stream: of two matrices, and of a pinned one of so many columns."""
        torch._dynamo.reset()
        with simulated_gpu(), observe() as seen:
            side = torch.cuda.Stream()

            def forward(*given: torch.Tensor) -> torch.Tensor:
                side.wait_stream(torch.cuda.current_stream())
                return step(*given)

            x, y = torch.empty(64, 64, device="cuda", requires_grad=True), torch.empty(64, 64, device="cuda")
            torch.compile(forward)(x, y, torch.empty(64, columns, pin_memory=True)).sum().backward()
        return seen.wrappers[-1]

    def test_value_that_a_checkpoint_computes_from_an_input_that_it_writes_to(self) -> None:
        """The policy asks to compute it again, from a value that is gone by then: it is saved."""

        def region(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            result = (x.sin() * (count[:2] * 2)).cos()
            count.add_(1)
            return result

        def checkpointed(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            policy = CheckpointPolicy.PREFER_RECOMPUTE
            contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)
            return checkpoint(region, x, count, use_reentrant=False, context_fn=contexts)

        found = []
        for run in (region, torch.compile(checkpointed, backend="aot_eager_decomp_partition")):
            x, count = torch.arange(2.0, requires_grad=True), torch.full((4,), 3.0)
            run(x, count).sum().backward()
            found.append((x.grad, count))
        self.assertEqual(found[1], found[0])

    def test_saved_tensor_is_kept_until_its_stream_is_behind_the_last_read(self) -> None:
        text = region(compile_step("train_saved_memory"), "backward").wrapper
        lines = [line.strip() for line in text.splitlines()]
        freed = lines.index("del mm")
        read = next(i for i, line in enumerate(lines) if line.startswith("triton") and ", mm, " in line)
        waits = [i for i, line in enumerate(lines) if re.fullmatch(r"ev\d\.wait\(stream1_raw\)", line)]
        self.assertTrue(any(read < i < freed for i in waits), text)

    def test_gradient_of_a_side_stream_s_memory_is_known_to_the_allocator(self) -> None:
        """The engine sees no change of streams, so it does not say so itself. Under reduce-overhead the first call runs
        as compiled, and so do all that get no graph.
        """
        for mode, condition in (None, ""), ("reduce-overhead", "if not torch.cuda.is_current_stream_capturing(): "):
            for name, value in ("train_gradient_memory", r"buf\d"), ("train_saved_value_as_gradient", "mul"):
                text = region(compile_step(name, mode), "backward").wrapper
                self.assertRegex(text, rf"\n *{re.escape(condition)}{value}\.record_stream\(stream0\)\n")

    def test_activations_of_a_branch_are_freed_as_the_branch_goes_on(self) -> None:
        """They are its stream's memory, which the forward's code knows. As memory that may be the caller's stream's
        they would stay to the exit, where that stream is ordered after the branch.
        """
        backward = region(compile_step("train_saved_chain"), "backward")
        (plan,) = backward.plans
        saved = [b for b in plan.buffers if not b.fresh and b.saved_on == 1]
        self.assertEqual([b.stream for b in saved], [1] * len(saved))
        self.assertGreater(len(saved), 2)
        self.assertEqual([b.name for b in saved if b.name in plan.release], [])

    def test_memory_of_a_folded_branch_is_the_callers_stream_s(self) -> None:
        """So its backward, which has no other streams, frees it as soon as it is read, and orders nothing."""
        for fold in (True, False):
            text = region(compile_step("train_saved_update", fold=fold), "backward").wrapper
            self.assertEqual("_region" not in text and "del add" in text, fold, text)

    def test_activations_of_a_forward_that_may_run_on_one_stream_may_be_the_callers_stream_s(self) -> None:
        """On an idle device (threshold set), and captured (mode)."""
        for mode, fold in ((None, True), ("reduce-overhead", False)):
            backward = region(compile_step("train_saved_chain", mode, fold=fold), "backward")
            saved = [b for plan in backward.plans for b in plan.buffers if not b.fresh and b.saved_on == 1]
            self.assertTrue(saved)
            self.assertEqual({b.stream for b in saved}, {0})

    def test_gradient_that_is_a_saved_value_is_joined(self) -> None:
        """The backward computes nothing, and the forward leaves the side stream unjoined."""
        backward = region(compile_step("train_saved_value_as_unjoined_gradient"), "backward")
        (plan,) = backward.plans
        self.assertEqual([(e.stream, e.waits) for e in plan.events], [(1, ((len(plan.ops), 0),))], plan.table())

    def test_the_check_sees_gradients_that_the_allocator_knows_nothing_of(self) -> None:
        for name in ("train_gradient_memory", "train_saved_value_as_gradient"):
            for mode in (None, "reduce-overhead"):
                seen = compile_step(name, mode)
                forward, backward = region(seen, "forward"), region(seen, "backward")
                backward.wrapper, count = re.subn(r"\n.*record_stream.*", "", backward.wrapper)
                self.assertEqual(count, 1)
                with simulated_gpu():
                    report = check_step(forward, backward)
                lost = {promise.text for promise in report.lost}
                self.assertRegex("; ".join(lost), r"default stream may drop the gradient of input \d that it reads")

    def test_forward_does_not_wait_for_its_saved_tensors(self) -> None:
        """What is saved is read by the backward on its own stream; the forward joins what the user joins, no more."""
        seen = compile_step("train_unjoined_outputs")
        (plan,) = region(seen, "forward").plans
        self.assertFalse([e for e in plan.events if any(at == len(plan.ops) for at, _ in e.waits)], plan.table())


LAUNCHES_NOTHING = {  # what is computed on a side stream, whose part of the backward launches nothing
    "zeros": lambda y: y.zero_(),
    "constant": lambda y: torch.fill(y, 3.0),
    "constant_in_a_view": lambda y: y.t().zero_(),
    "squeezed": lambda y: y.squeeze((0, 1)),
    "transposed": lambda y: y.t(),
    "two_views": lambda y: (y.t(), y[0]),
}


@instantiate_parametrized_tests
class TestEngineOrder(TestCase):
    def check(self, compute: Any, then: Any, streams: int, *shape: int) -> None:
        sides = [torch.cuda.Stream() for _ in range(streams)]

        def fn(x: torch.Tensor) -> Any:
            value, waited = x * 2, torch.cuda.current_stream()
            for side, step in zip(sides, (compute, then)):
                side.wait_stream(waited)
                with torch.cuda.stream(side):
                    value = step(value)
                waited = side
            torch.cuda.current_stream().wait_stream(waited)
            return value

        report = check(fn, torch.ones(shape, device="cuda", requires_grad=True), backward=True)
        self.assertTrue(report.ok and not report.redundant, str(report))

    @parametrize("kind", list(LAUNCHES_NOTHING))
    @simulated_gpu()
    def test_side_stream_that_computes_only_a_view_or_a_constant_is_joined(self, kind: str) -> None:
        self.check(LAUNCHES_NOTHING[kind], None, 1, *((1, 1, 16) if kind == "squeezed" else (8, 16)))

    @simulated_gpu()
    def test_streams_behind_an_operation_that_drops_the_gradient_are_joined(self) -> None:
        self.check(lambda y: y.zero_(), lambda y: y * 3, 2, 8, 16)


class TestOverlap(TestCase):
    """A backward's branches can run beside each other, as the forward's can."""

    def test_value_for_another_stream_is_launched_where_it_stands(self) -> None:
        """The gradient that both branches begin with is made before either. As a part of the side stream's first kernel
        it would be launched after all that the caller's stream does for the other branch.
        """
        (plan,) = region(compile_step("train_user_kernels"), "backward").plans
        callers_stream = [i for i, op in enumerate(plan.ops) if op.stream == 0]
        end = len(plan.ops)
        (fork,) = [e for e in plan.events if any(stream == 1 and at < end for at, stream in e.waits)]
        self.assertEqual((fork.stream, fork.after), (0, callers_stream[0]), plan.table())

    def test_memory_that_a_user_s_kernel_writes_is_its_stream_s(self) -> None:
        """`torch.empty` launches nothing, so its block belongs to the stream of the kernel that fills it."""
        for kind in ("forward", "backward"):
            (plan,) = region(compile_step("train_user_kernels"), kind).plans
            for op in plan.ops:
                if op.stream == 1:
                    self.assertEqual(
                        {plan.memory[name] for name in op.writes if name in plan.memory}, {1}, plan.table()
                    )


class TestReturnedMemory(TestCase):
    def test_side_stream_s_memory_is_read_by_nobody_when_a_backward_has_freed_it(self) -> None:
        """The caller may allocate on the side stream at once, and waits for nothing."""
        for sleeps in (False, True):
            (plan,) = region(compile_step("train_saved_chain", sleeps=sleeps), "backward").plans
            read = [
                b.name
                for b in plan.buffers
                if b.stream == 1 and any(plan.ops[i].stream == 0 for i in plan.uses[b.name])
            ]
            self.assertGreater(len(read), 0)
            (wait,) = [(e, at) for e in plan.events for at, stream in e.waits if stream == 1 and at == len(plan.ops)]
            self.assertEqual(wait[0].stream, 0, plan.table())


OTHER_DEVICE = ("train_on_second_device",)  # its current stream is a stream like others in a frame of the first device
LENT = ("train_saved_value_as_gradient", "train_saved_value_as_unjoined_gradient")  # nothing is left without streams
NO_BACKWARD = ("train_saved_update_without_backward",)
NOT_COMPARED = (*SYMBOLIC, *TRACED, *NO_STREAMS, *OTHER_DEVICE, *LENT, *NO_BACKWARD, PASSED_THROUGH[0])
COMPARED = [n for n in (*WRITTEN, *DRAWN) if n not in NOT_COMPARED]


@instantiate_parametrized_tests
class TestPartition(TestCase):
    """Streams don't change what is saved and what is computed again."""

    def saved_bytes(self, name: str, streams: bool) -> int:
        current = mock.patch.object(Kit, "stream", lambda *args, **kwargs: torch.cuda.current_stream())
        with contextlib.nullcontext() if streams else current:
            seen, _ = corpus.compile_program(by_name(name), fold=True)
        has_streams = bool(re.search("# stream [1-9]", "".join(seen.graphs)))
        self.assertEqual(has_streams, streams and name not in DEAD_BRANCHES)
        pairs = [
            (f, b)
            for f in seen.regions
            for b in seen.regions
            if (f.kind, b.kind) == ("forward", "backward") and f.frame is b.frame
        ]
        self.assertTrue(pairs)
        return sum(_saved_bytes(f, b) for f, b in pairs)

    @parametrize("name", form.sampled(COMPARED, 75))
    def test_saved_bytes_equal_those_without_streams(self, name: str) -> None:
        self.assertEqual(self.saved_bytes(name, True), self.saved_bytes(name, False))

    @simulated_gpu()
    def test_operation_of_two_streams_is_saved_once_and_stays_on_both(self) -> None:
        """Both branches take `exp(x)`; in the program without streams there is one."""
        sides = [torch.cuda.Stream() for _ in range(2)]
        weights = [torch.randn(64, 64, device="cuda", requires_grad=True) for _ in range(2)]

        def forward(x):
            results = []
            for side, weight in zip(sides, weights):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    results.append((x @ x).exp() @ weight)
                torch.cuda.current_stream().wait_stream(side)
            return (results[0] * results[1]).sum()

        with observe() as seen, config.patch(fold_branches_below_us=0.0):
            torch.compile(forward, fullgraph=True)(torch.randn(64, 64, device="cuda")).backward()
        forward_region, backward_region = region(seen, "forward"), region(seen, "backward")
        for op in ("exp", "mm"):
            streams = re.findall(rf"aten\.{op}\.default\((?!permute).*# stream (\d)", forward_region.graph)
            self.assertEqual(sorted(set(streams)), ["1", "2"], forward_region.graph)
        saved = saved_names(forward_region, backward_region)
        texts = [n.text for n in forward_region.nodes if n.text.partition(":")[0] in saved]
        self.assertEqual(sum("aten.exp" in t or "permute.default(exp" in t for t in texts), 1, texts)
        with simulated_gpu():
            check_step(forward_region, backward_region).raise_if_any()


def saved_names(forward: Any, backward: Any) -> list[str]:
    """The node names of the backward's inputs that the forward computed."""
    inputs = set(input_names(forward))
    return [name for name in input_names(backward) if "tangents" not in name and name not in inputs]


def _saved_bytes(forward: Any, backward: Any) -> int:
    """What the forward keeps for the backward, without its inputs and views of them."""
    texts = {n.text.partition(":")[0]: n.text for n in forward.nodes}
    total = 0
    for name in saved_names(forward, backward):
        source = re.fullmatch(r".*aten\.(?:permute|view|slice)\S*\((\w+).*", texts[name])
        if source is None or source[1] not in input_names(forward):
            total += _bytes(texts[name])
    return total


def _bytes(text: str) -> int:
    kind, sizes = re.search(r": (\w+)\[(.*?)\]", text).groups()  # type: ignore[union-attr]
    count = int(re.sub(r"\D", "", kind)) // 8
    for size in re.findall(r"\d+", sizes):
        count *= int(size)
    return count


def on_side(side: torch.Stream, weight: torch.Tensor | None = None) -> Any:
    def forward(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x @ (x if weight is None else weight)
        torch.cuda.current_stream().wait_stream(side)
        return (y * x).sum()

    return torch.compile(forward, fullgraph=True)


class TestTable(TestCase):
    """Which stream objects a backward runs with."""

    def setUp(self) -> None:
        super().setUp()
        self.enterContext(simulated_gpu())
        self.x = torch.randn(8, 8, device="cuda", requires_grad=True)

    def tables(self, run: Any) -> list[list[int]]:
        """The streams of each backward, as they are installed for its run."""
        found = []
        real = objects._run_with

        def keep(table: Any, compiled: Any, args: Any) -> Any:
            found.append([s.stream_id for s in table if isinstance(s, torch.Stream)])
            return real(table, compiled, args)

        with mock.patch.object(objects, "_run_with", keep):
            run()
        return found

    def test_each_backward_has_its_forward_s_streams(self) -> None:
        """Upstream gives all of them the streams of the first function that the process compiled (S1)."""
        sides = [torch.cuda.Stream() for _ in range(3)]
        losses = [on_side(side)(self.x) for side in sides]
        found = self.tables(lambda: [loss.backward() for loss in losses])
        self.assertEqual(found, [[torch.cuda.current_stream().stream_id, s.stream_id] for s in sides])

    def test_table_is_gone_after_the_backward(self) -> None:
        """It would live on in autograd's thread, and a forward that is computed again there could hand it on."""
        loss = on_side(torch.cuda.Stream())(self.x)
        loss.backward(retain_graph=True)
        self.assertIsNone(objects.current())
        failure = mock.patch.object(objects, "_run_with", side_effect=RuntimeError("a kernel fails"))
        with failure, self.assertRaisesRegex(RuntimeError, "a kernel fails"):
            loss.backward()
        self.assertIsNone(objects.current())
        self.assertIsNone(external_objects._thread.table)

    def test_outer_table_is_back_after_a_backward_inside_of_a_call(self) -> None:
        loss = on_side(torch.cuda.Stream())(self.x)
        leave = objects.enter(torch.cuda.current_stream())
        outer = objects.current()
        loss.backward()
        self.assertIs(objects.current(), outer)
        leave()

    def test_backward_of_another_thread(self) -> None:
        side = torch.cuda.Stream()
        fn = on_side(side)
        fn(self.x).backward()
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(self.tables, fn(self.x).backward).result()
        self.assertEqual([table[1] for table in found], [side.stream_id])

    def test_backward_compiled_after_other_frames_knows_its_own_objects(self) -> None:
        """A backward is compiled at its first call; the numbers of streams then are another frame's."""
        from torch_overlay import frame_facts

        one, two = torch.cuda.Stream(), torch.cuda.Stream()

        def forward(x):
            inner = torch.cuda.Stream()
            for side in (one, inner):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    x = x @ x
                torch.cuda.current_stream().wait_stream(side)
            return x.sum()

        loss = torch.compile(forward, fullgraph=True)(self.x)
        on_side(two)(self.x.detach())
        described = []
        current = frame_facts.current
        with mock.patch.object(frame_facts, "current", lambda: described.append(current()) or described[-1]):
            loss.backward()
        self.assertTrue(described)
        origins = [sorted(i.origin for i in facts.objects) for facts in described]
        self.assertEqual(origins, [["caller", "current", "frame"]] * len(origins))

    def test_engine_that_knows_no_stream_is_ordered_behind_the_forward(self) -> None:
        """The only output is on the host, so autograd runs the node under whatever stream is current."""
        forward, other = torch.cuda.Stream(), torch.cuda.Stream()
        calls: list[str] = []
        with torch.cuda.stream(forward):
            leave = objects.enter(objects.callers_stream())
            snapshot = objects.Snapshot(objects.current())
            leave()

        def wait(self: Any, stream: Any) -> None:
            calls.append(f"{self.stream_id} waits for {stream.stream_id}")

        with torch.cuda.stream(other), mock.patch.object(torch.cuda.Stream, "wait_stream", wait):
            snapshot.run(lambda: calls.append(f"backward on {objects.get(0).stream_id}"), ())
        ids = forward.stream_id, other.stream_id
        backward = f"backward on {ids[1]}"
        self.assertEqual(calls, [f"{ids[1]} waits for {ids[0]}", backward, f"{ids[0]} waits for {ids[1]}"])


@instantiate_parametrized_tests
class TestCompiledAutograd(TestCase):
    """Backwards that compiled autograd traces: Note [Placement under compiled autograd]."""

    def traced(self, name: str, mode: str | None = None) -> list[Any]:
        found = [r for r in compile_step(name, mode).regions if r.kind == "inference"]
        self.assertTrue(found)
        return found

    def enabled(self) -> Any:
        return torch._dynamo.compiled_autograd._enable(torch.compile(fullgraph=True), dynamic=False)

    def test_operations_keep_the_streams_of_the_backward_that_they_come_from(self) -> None:
        for r in self.traced("train_compiled_autograd_of_two_branches"):
            placed = re.findall(r"aten\.(?!full)(\w+)\S*\(.*# stream (\d)$", r.graph, re.MULTILINE)
            branch = ["permute", "mm", "mm", "le", "where", "mm"]
            self.assertEqual(placed, [(op, "1") for op in branch], r.graph)

    @parametrize("name", form.sampled(TRACED, 3))
    def test_no_race(self, name: str) -> None:
        for r in self.traced(name):
            with simulated_gpu():
                report = check_wrapper(r.wrapper)
            self.assertTrue(report.ok, f"{report}\n{r.wrapper}")

    def test_current_stream_waits_for_those_that_saved_values_are_in_the_memory_of(self) -> None:
        (r,) = self.traced("train_compiled_autograd_of_saved_memory")
        (entry,) = [e for e in r.plans[0].events if e.after == ENTRY and e.stream == 1]
        self.assertEqual([stream for _, stream in entry.waits], [0])
        (value,) = re.findall(r"streams\.record_stream\.default\((\w+), 0\)", r.graph)
        self.assertRegex(r.graph, rf"mul\.Tensor\(\w+, {value}\)\n")

    def test_gradient_is_known_to_the_allocator(self) -> None:
        for mode, condition in (None, ""), ("reduce-overhead", "if not torch.cuda.is_current_stream_capturing(): "):
            (r,) = self.traced("train_compiled_autograd_of_gradient_memory", mode)
            self.assertRegex(r.wrapper, rf"\n *{re.escape(condition)}buf\d\.record_stream\(stream0\)\n")

    @simulated_gpu()
    def test_each_call_has_the_streams_of_its_own_forwards(self) -> None:
        """One graph serves all calls; it must not keep the streams that it was traced with."""
        sides = [torch.cuda.Stream() for _ in range(3)]
        weight = torch.randn(8, 8, device="cuda", requires_grad=True)
        x = torch.randn(8, 8, device="cuda")
        found: list[list[int]] = []
        enter = objects.enter

        def keep(*table: Any) -> Any:
            found.append([s.stream_id for s in table if isinstance(s, torch.Stream)])
            return enter(*table)

        functions = [on_side(side, weight) for side in sides]
        for turn in ((0, 1), (1, 2), (2, 0)):
            loss = functions[turn[0]](x) + functions[turn[1]](x)
            found.clear()
            with mock.patch.object(objects, "enter", keep), self.enabled():
                loss.backward()
            # The backward's graph: the current stream, and one for each of its forwards, the last first.
            self.assertIn([0, sides[turn[1]].stream_id, sides[turn[0]].stream_id], found)

    @simulated_gpu()
    def test_call_under_another_stream_than_the_forward_s(self) -> None:
        forward, other = torch.cuda.Stream(), torch.cuda.Stream()
        weight = torch.randn(8, 8, device="cuda", requires_grad=True)
        with torch.cuda.stream(forward):
            loss = on_side(torch.cuda.Stream(), weight)(torch.randn(8, 8, device="cuda"))
        calls: list[tuple[int, int]] = []

        def wait(self: Any, stream: Any) -> None:
            calls.append((self.stream_id, stream.stream_id))

        with torch.cuda.stream(other), self.enabled(), mock.patch.object(torch.cuda.Stream, "wait_stream", wait):
            loss.backward(torch.ones_like(loss))
        self.assertEqual(calls, [(other.stream_id, forward.stream_id), (forward.stream_id, other.stream_id)])

    @simulated_gpu()
    def test_backward_that_fails_while_it_is_traced_leaves_the_next_one_its_streams(self) -> None:
        weight = torch.randn(8, 8, device="cuda", requires_grad=True)
        x = torch.randn(8, 8, device="cuda")
        one, two = torch.cuda.Stream(), torch.cuda.Stream()
        run_one, run_two = on_side(one, weight), on_side(two, weight)
        failure = mock.patch.object(compiled_backward, "mark_backward", side_effect=RuntimeError("the trace fails"))
        with failure, self.enabled(), self.assertRaisesRegex(RuntimeError, "the trace fails"):
            (run_one(x) + run_one(x)).backward()
        seen = []
        real = compiled_backward.run_backward

        def keep(call: Any, gm: Any, needed: Any) -> Any:
            tables = compiled_backward.thread.queue
            seen.extend(tables[-n.from_end].objects[n.index].stream_id for n in needed)
            return real(call, gm, needed)

        with mock.patch.object(compiled_backward, "run_backward", keep), self.enabled():
            run_two(x).backward()
        self.assertEqual(seen, [two.stream_id])
        self.assertEqual(compiled_backward.thread.queue, [])

    @simulated_gpu()
    def test_configuration_flag(self) -> None:
        """`torch._dynamo.config.compiled_autograd`, and a backward inside of the compiled function."""
        side = torch.cuda.Stream()
        weight = torch.randn(64, 64, device="cuda", requires_grad=True)

        def step(x):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                a = x @ weight
            torch.cuda.current_stream().wait_stream(side)
            (a * x).sum().backward()

        with torch._dynamo.config.patch(compiled_autograd=True), observe() as seen:
            torch.compile(step)(torch.randn(64, 64, device="cuda"))
        self.assertIn("# stream 1", seen.regions[-1].graph)
        self.assertEqual([r.kind for r in seen.regions], ["forward", "inference"])

    @simulated_gpu()
    def test_stream_operations_of_a_custom_backward(self) -> None:
        """They name objects by the forward's numbers, which are others in this graph."""
        first, side = torch.cuda.Stream(), torch.cuda.Stream()
        done = torch.cuda.Event()

        class Marked(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                gradient = gradient * 2
                done.record(side)
                return gradient

        weight = torch.randn(64, 64, device="cuda", requires_grad=True)

        def forward(x):
            for stream in (first, side):
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(first):
                y = x @ weight
            with torch.cuda.stream(side):
                z = Marked.apply(x @ weight)
            for stream in (first, side):
                torch.cuda.current_stream().wait_stream(stream)
            return (y + z).sum()

        loss = torch.compile(forward, fullgraph=True)(torch.randn(64, 64, device="cuda"))
        with observe() as seen, self.enabled():
            loss.backward()
        (frame,) = seen.frames
        names = {i.index: i.kind for i in frame.objects}
        (event, stream) = re.findall(r"streams\.record_event\.default\((\d+), (\d+)\)", seen.regions[0].graph)[0]
        self.assertEqual((names[int(event)], names[int(stream)]), ("event", "stream"))
        marked = re.search(r"aten\.mul\.Tensor\(.*, 2\)  # stream (\d)", seen.regions[0].graph)
        assert marked is not None
        self.assertEqual(marked[1], stream)

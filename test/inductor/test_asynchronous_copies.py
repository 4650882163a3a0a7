"""Copies between device and host that don't block the host: `stream_programs.asynchronous_copies`.

`TestCode` reads what is generated for them: a copy from and to the memory that the program names, and nothing else on
the host. `TestGpu` times the calls: each returns while its copy still waits for other work, and the copy runs beside
the kernels of another stream.
"""

import re
import time
from typing import Any

import corpus
import torch
from torch._inductor.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form
from stream_programs import by_name
from stream_programs.asynchronous_copies import COPIES
from torch_overlay import config
from torch_overlay._functorch.streams.facts import note_fact
from torch_overlay._functorch.streams.tokens import synchronization
from torch_overlay._inductor.streams.lowering import order_graph
from torch_overlay.testing import compile_only, simulated_gpu


ON_HOST = re.compile(r"cpp_fused\w*\(|empty_strided_cpu\(|\.synchronize\(\)|\.item\(\)")
COPY = re.compile(r"(\S.*)\.copy_\((.*), (True|False)\)")
COLUMNS = ("to_columns_of_input", "to_columns_of_host_input")  # eager gathers them on the host


def lines(wrapper: str) -> list[str]:
    """Of the function that is called, without comments."""
    body = wrapper[wrapper.index("def call(") : wrapper.index("def get_args")]
    return [line.strip() for line in body.splitlines() if not line.strip().startswith("#")]


@instantiate_parametrized_tests
class TestCode(TestCase):
    def copies(self, name: str, mode: str | None = None, fills: str = "") -> list[tuple[str, str]]:
        """Destination and source of each copy. The host does nothing, but for the kernel that fills pinned memory."""
        report = corpus.check_program(by_name(name), mode)
        self.assertEqual(corpus.findings(report), [], str(report))
        found = []
        for line in (line for wrapper in report.compiled.wrappers for line in lines(wrapper)):
            if not (fills and line.startswith(fills)):
                self.assertNotRegex(line, ON_HOST)
            if (match := COPY.search(line)) is not None:
                self.assertEqual(match[3], "True", line)
                found.append((match[1], match[2]))
        self.assertTrue(found)
        return found

    @parametrize("name", form.sampled(list(COPIES), 3))
    def test_copy_between_the_memory_that_is_named(self, name: str) -> None:
        """On a side stream and on the caller's."""
        for mode in (None, "reduce-overhead"):
            copies = self.copies(f"copy_{name}", mode, "cpp_fused_zeros" if name == "to_rows_of_pinned_buffer" else "")
            each = {"list": 2, "to_rows_of_own_buffer": 2, "to_rows_of_pinned_buffer": 2, "to_rows_of_host_input": 2}
            self.assertEqual(len(copies), 2 * next((n for key, n in each.items() if name.startswith(key)), 1), copies)

    @parametrize(
        "name",
        form.sampled(
            [
                "converting_copies",
                "copies_of_other_shapes",
                "read_before_and_after",
                "copied_memory_returned",
                "copy_into_computed",
                "offloaded_and_loaded",
                "source_updated_after_copy",
                "copies_of_dynamic_shape",
            ],
            3,
        ),
    )
    def test_copies_with_other_work_around_them(self, name: str) -> None:
        self.copies(name)

    def test_pinned_memory_that_the_graph_fills_is_copied_from(self) -> None:
        ((_, source),) = self.copies("staged_on_the_host", fills="cpp_fused")
        report = corpus.check_program(by_name("staged_on_the_host"))
        self.assertIn(f"{source} = empty_strided_cpu_pinned(", report.compiled.wrappers[0])

    def test_copy_of_what_a_users_kernel_fills_does_not_block(self) -> None:
        """Memory that is made from nothing is no constant when a kernel has filled it, whatever the kernel reads."""
        from user_kernels import scaled_into

        with simulated_gpu():
            side = torch.cuda.Stream()

            def fn(x):  # type: ignore[no-untyped-def]
                made = [torch.empty(8, 8, device="cuda"), torch.empty(8, 8, device="cuda")]
                host = [torch.empty(8, 8, pin_memory=True), torch.empty(8, 8, pin_memory=True)]
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for given, target, out in zip((x, torch.ones(8, 8, device="cuda")), made, host):
                        scaled_into(target, given, 2)
                        out.copy_(target, non_blocking=True)
                return host

            text = compile_only(fn, torch.randn(8, 8, device="cuda")).wrappers[0]
        copies = re.findall(r"copy_\(buf\d+, (True|False)\)", text)
        self.assertEqual(copies, ["True", "True"], text)

    def test_host_waits_where_the_user_waits(self) -> None:
        """For the row's own event, and not for copies into other rows."""
        for name, waits in (("ring_of_two_streams", 3), ("host_writes_beside_copy", 1)):
            report = corpus.check_program(by_name(name))
            self.assertEqual(corpus.findings(report), [], str(report))
            text = "\n".join(lines(report.compiled.wrappers[0]))
            self.assertEqual(text.count(".synchronize()"), waits, text)

    def test_copies_into_two_rows_dont_wait_for_each_other(self) -> None:
        report = corpus.check_program(by_name("ring_of_two_streams"))
        text = "\n".join(lines(report.compiled.wrappers[0]))
        self.assertEqual(re.findall(r"ev\d+\.wait\(stream\d_raw\)", text), ["ev0.wait(stream3_raw)"], text)

    def test_rows_that_meet_are_ordered(self) -> None:
        with simulated_gpu():
            one, two = torch.cuda.Stream(), torch.cuda.Stream()

            def fn(x, ring):  # type: ignore[no-untyped-def]
                for side, rows in ((one, slice(0, 3)), (two, slice(2, 5))):
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        ring[rows].copy_(x[rows], non_blocking=True)

            plan = compile_only(fn, torch.randn(8, 8, device="cuda"), torch.randn(8, 8).pin_memory()).plans[0]
        first, second = (i for i, op in enumerate(plan.ops) if op.stream)
        self.assertTrue(any(e.after == first and (second, plan.ops[second].stream) in e.waits for e in plan.events))

    def test_what_reads_an_update_stays_after_it(self) -> None:
        """The update reads host memory, so it goes after the synchronisation, which goes after what it waits for."""
        graph = torch.fx.Graph()
        values = {"buffer": torch.empty(8, 8, device="meta"), "host": torch.empty(8, 8), "x": torch.empty(8)}
        buffer, host, x = (graph.placeholder(name) for name in values)
        for node in graph.nodes:
            node.meta["val"] = values[node.name]
        aten = torch.ops.aten
        wait = graph.call_function(torch.ops.streams.synchronize_stream.default, (1,))
        before = graph.call_function(aten.neg.default, (buffer,))
        update = graph.call_function(aten.copy_.default, (buffer, host, True))
        after = graph.call_function(aten.clamp_min.default, (buffer, -1))
        awaited = graph.call_function(aten.neg.default, (x,))
        graph.output((before, after, awaited))
        note_fact(wait, requires=synchronization(0), order=0)
        note_fact(awaited, promised_to=(synchronization(0),))
        order_graph(graph)
        order = [node for node in graph.nodes if node in (before, awaited, wait, update, after)]
        self.assertEqual(order, [before, awaited, wait, update, after])

    def test_memory_without_a_new_value_is_left_alone(self) -> None:
        """An update of a clone whose copy is left out."""
        with simulated_gpu():
            side = torch.cuda.Stream()

            def fn(device, host):  # type: ignore[no-untyped-def]
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    other = device.clone()
                    other[1].copy_(host[1], non_blocking=True)
                torch.cuda.current_stream().wait_stream(side)
                return other

            seen = compile_only(fn, torch.randn(8, 8, device="cuda"), torch.randn(8, 8).pin_memory())
        text = "\n".join(lines(seen.wrappers[0]))
        self.assertNotRegex(text, r"arg0_1.*copy_\(")
        self.assertRegex(text, r"buf\d+\.copy_\(.*, True\)")

    def test_copy_in_a_program_without_streams_is_stocks(self) -> None:
        def fn(device, host):  # type: ignore[no-untyped-def]
            device.copy_(host, non_blocking=True)

        texts = []
        for streams in (True, False):
            torch._dynamo.reset()
            with simulated_gpu(), config.patch(streams=streams):
                seen = compile_only(fn, torch.randn(8, 8, device="cuda"), torch.randn(8, 8).pin_memory())
            texts.append(seen.calls())
            self.assertEqual(len(seen.regions[0].blocking), 1)
        self.assertEqual(*texts)

    def test_training_step_loads_the_next_batch(self) -> None:
        """In a forward that has a backward, too."""
        with simulated_gpu():
            side = torch.cuda.Stream()

            def fn(x, w, ahead, host):  # type: ignore[no-untyped-def]
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    ahead[2:6].copy_(host[2:6], non_blocking=True)
                y = (x @ w).relu()
                torch.cuda.current_stream().wait_stream(side)
                return y.sum()

            weight = torch.randn(8, 8, device="cuda", requires_grad=True)
            inputs = torch.randn(8, 8, device="cuda"), weight, torch.zeros(8, 8, device="cuda")
            seen = compile_only(fn, *inputs, torch.randn(8, 8).pin_memory(), backward=True)
        copies = [line for w in seen.wrappers for line in lines(w) if COPY.search(line)]
        self.assertEqual(len(copies), 1, copies)
        self.assertRegex(copies[0], r"reinterpret_tensor\(primals_\d, .*, True\)")


SHAPE = (16, 1 << 20)  # 64 MiB
SLEEP = 200_000_000  # clock cycles: a tenth of a second, and more than any of these copies needs


@form.needs_gpu
@instantiate_parametrized_tests
class TestGpu(TestCase):
    def build(self, name: str, on_side: bool) -> tuple[Any, Any]:
        side = torch.cuda.Stream()
        body = COPIES[name]

        def fn(x, device, host, m):  # type: ignore[no-untyped-def]
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            if on_side:
                with torch.cuda.stream(side):
                    made = body(device, host, x)
                for _ in range(4):
                    m = m @ m
            else:
                with torch.cuda.stream(side):
                    for _ in range(4):
                        m = m @ m
                made = body(device, host, x)
            current.wait_stream(side)
            return made, m

        torch._dynamo.reset()
        return fn, torch.compile(fn, fullgraph=True)

    def inputs(self, seed: int = 0) -> list[torch.Tensor]:
        made = torch.Generator("cuda").manual_seed(seed)
        x, device, host = (torch.randn(SHAPE, device="cuda", generator=made) for _ in range(3))
        square = torch.randn(4096, 4096, device="cuda", generator=made) / 64
        pinned = torch.empty(SHAPE, pin_memory=True).copy_(host)
        return [x, device, pinned, square]

    def call(self, fn: Any, inputs: list[torch.Tensor]) -> tuple[Any, float, bool]:
        """Its results, the host's milliseconds, and whether its streams were still at work when it had returned."""
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP)
        begin = time.perf_counter()
        out = fn(*inputs)
        done = torch.cuda.current_stream().record_event()
        busy, elapsed = not done.query(), 1e3 * (time.perf_counter() - begin)
        torch.cuda.synchronize()
        return out, elapsed, busy

    @staticmethod
    def sleep_ms() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(SLEEP)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    @parametrize("name", list(COPIES))
    @parametrize("on_side", [True, False])
    def test_call_returns_before_the_copy_begins(self, name: str, on_side: bool) -> None:
        """As eager's does; and the results are eager's."""
        eager, compiled = self.build(name, on_side)
        for seed in range(3):  # compiled, and with all memory in the allocators' caches
            self.in_turns(compiled, eager, seed)
        (inputs, out, elapsed, busy), (expected, wanted, eager_elapsed, _) = self.in_turns(compiled, eager, 7)
        early = self.sleep_ms() / 2
        if eager_elapsed < early:
            self.assertTrue(busy, f"the call took {elapsed:.1f} ms, eager's {eager_elapsed:.1f} ms")
            self.assertLess(elapsed, early)
        else:
            self.assertIn(name, COLUMNS)
        for index, (a, b) in enumerate(zip([out[0], *inputs[:3]], [wanted[0], *expected[:3]])):
            if b is not None:
                self.assertTrue(torch.equal(a, b), f"{name}: value {index}")

    def in_turns(self, compiled: Any, eager: Any, seed: int) -> list[Any]:
        given = [self.inputs(seed), self.inputs(seed)]
        return [(inputs, *self.call(fn, inputs)) for fn, inputs in zip((compiled, eager), given)]

    @parametrize("name", [name for name in COPIES if name not in COLUMNS])
    @parametrize("on_side", [True, False])
    def test_copy_runs_beside_kernels(self, name: str, on_side: bool) -> None:
        from torch.autograd import DeviceType
        from torch.profiler import profile, ProfilerActivity

        _, compiled = self.build(name, on_side)
        for seed in range(3):
            self.call(compiled, self.inputs(seed))
        inputs = self.inputs(7)
        with profile(activities=[ProfilerActivity.CUDA]) as measured:
            self.call(compiled, inputs)
        work = [e for e in measured.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        is_copy = re.compile(r"Memcpy (HtoD|DtoH)")
        kinds = {match[1] for e in work if (match := is_copy.search(e.name))}
        self.assertEqual(kinds, {by_direction(name)})
        copies = [e for e in work if is_copy.search(e.name)]
        kernels = [e for e in work if re.search("gemm|cutlass|nvjet|triton|mm", e.name, re.IGNORECASE)]
        streams = {e.device_resource_id for e in copies}
        self.assertEqual(len(streams), 1)
        others = [e.time_range for e in kernels if e.device_resource_id not in streams]
        total = sum(e.time_range.end - e.time_range.start for e in copies)
        shared = sum(
            max(0, min(e.time_range.end, k.end) - max(e.time_range.start, k.start)) for e in copies for k in others
        )
        self.assertGreater(shared, 0.5 * total, f"{shared:.0f} of {total:.0f} us beside kernels")
        self.assertFalse(any("Pageable" in e.name for e in copies), [e.name for e in copies])


def by_direction(name: str) -> str:
    to_host = ("host", "ring", "pinned")
    return "DtoH" if any(word in name for word in to_host) else "HtoD"

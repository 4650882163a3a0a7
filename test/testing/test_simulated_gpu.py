"""The simulated GPU: what it offers, that it leaves nothing after, and that torch.compile runs on it to the end."""

import copy
import ctypes
import os
import random
import re
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
import torch.nn as nn
from torch._dynamo.test_case import TestCase
from torch.utils._python_dispatch import _disable_current_modes

import form
from torch_overlay._dynamo import objects
from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice
from torch_overlay.analysis.timelines.lines import own_line
from torch_overlay.testing import _mocks, _native, active, compile_only, observe, simulated_gpu
from torch_overlay.testing._simulate import Simulation


def cuda(*size, **kwargs):
    return torch.randn(*size, device="cuda", **kwargs)


def mocks():
    simulation = Simulation(1)
    return [
        *_mocks.device_mocks(simulation.devices),
        *_mocks.tensor_mocks(simulation.fake_mode),
        *_mocks.compiler_mocks(lambda *a, **k: None),
    ]


class Simulated(TestCase):
    def setUp(self):
        super().setUp()
        self.gpu = self.enterContext(simulated_gpu(devices=2))


class Undone(TestCase):
    """Nothing of the simulation outlives it."""

    C_TYPES = (torch.Stream, torch._C._CudaStreamBase, torch.Event, torch._C._CudaEventBase, torch.Generator)

    def snapshot(self):
        """Every place that the simulation writes to, by value."""
        table = mocks()
        missing = object()
        state = {}
        for m in table:
            try:
                state[m.target] = m.patch().get_original()[0]
            except AttributeError:
                state[m.target] = missing if m.create else self.fail(f"{m.target} does not exist")
        state = {k: (None if v is missing else v) for k, v in state.items()}
        for cls in self.C_TYPES:
            slots = ctypes.string_at(id(cls), 408)  # the whole PyTypeObject
            state[cls.__qualname__] = {k: v for k, v in vars(cls).items()}
            state[cls.__qualname__, "flags"] = cls.__flags__ & ~(1 << 19)  # a cache tag of CPython
            state[cls.__qualname__, "new"] = slots[_native._TP_NEW : _native._TP_NEW + 8]
        hooks = ctypes.CDLL("libtorch_cpu.so")._ZN2at6detail12getCUDAHooksEv
        hooks.restype = ctypes.c_void_p
        state["guard"] = _native._guard_registry_slot().value
        state["hooks"] = ctypes.c_void_p.from_address(hooks()).value
        state["environment"] = dict(os.environ)
        state["inductor config"] = torch._inductor.config.get_config_copy()
        state["stream objects"] = objects.current()
        state["modes"] = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        state["kernels"] = [
            torch._C._dispatch_dump(f"aten::{name}")
            for name in ("empty.memory_format", "empty_strided", "scaled_dot_product_attention")
        ]
        state["available"] = torch.cuda.is_available(), torch.cuda.is_initialized(), torch.cuda.device_count()
        return state

    def work(self):
        x = cuda(8, 8, requires_grad=True)
        s = torch.cuda.Stream()
        torch.cuda.set_stream(s)
        torch.Event().record(torch.Stream())
        compile_only(lambda x: x.sin() @ x, x, backward=True)

    def test_everything_is_back_after_the_block(self):
        before = self.snapshot()
        with simulated_gpu(devices=2):
            self.work()
        self.assertEqual(before, self.snapshot())
        with simulated_gpu():
            self.work()
        self.assertEqual(before, self.snapshot())

    def test_everything_is_back_after_an_error(self):
        before = self.snapshot()
        with self.assertRaisesRegex(ZeroDivisionError, "by zero"), simulated_gpu():
            self.work()
            raise ZeroDivisionError("by zero")
        self.assertEqual(before, self.snapshot())

    def test_everything_is_back_when_entering_fails(self):
        before = self.snapshot()
        broken = _mocks.Mock("torch.cuda.no_such_function", None, "last in the table, all others are in place")
        broken_table = mock.patch.object(_mocks, "compiler_mocks", lambda record: [broken])
        with broken_table, self.assertRaisesRegex(AttributeError, "no_such_function"):
            simulated_gpu().__enter__()
        self.assertEqual(before, self.snapshot())
        self.assertIsNone(active())

    def test_device_caches_are_forgotten(self):
        from torch._inductor.utils import get_max_num_sms
        from torch.utils._triton import has_triton

        here = has_triton()
        with simulated_gpu():
            self.assertTrue(has_triton())
            self.assertEqual(get_max_num_sms(), 132)
        self.assertEqual(has_triton(), here)
        self.assertEqual(get_max_num_sms.cache_info().currsize, 0)

    def test_compiled_code_is_dropped(self):
        def f(x):
            return x + 1

        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list
        with simulated_gpu():
            torch.compile(f)(cuda(4))
            self.assertEqual(len(entries(f.__code__)), 1)
        self.assertEqual(len(entries(f.__code__)), 0)

    def test_user_cache_directory_stays_empty(self):
        with tempfile.TemporaryDirectory() as folder:
            with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}), simulated_gpu():
                compile_only(lambda x: (x @ x).relu(), cuda(512, 512), mode="max-autotune-no-cudagraphs")
                compile_only(lambda x: x + 1, torch.randn(8))
            self.assertEqual(os.listdir(folder), [])

    def test_fake_guard_state_of_the_thread_is_reset(self):
        with simulated_gpu(devices=2):
            torch.cuda.set_stream(torch.cuda.Stream(device=1))
            self.assertEqual(torch.cuda.current_device(), 1)
        with simulated_gpu(devices=2):
            self.assertEqual(torch.cuda.current_device(), 0)
            self.assertEqual(torch.cuda.current_stream(1), torch.cuda.default_stream(1))


class Entering(TestCase):
    def test_reentrant(self):
        with simulated_gpu(devices=2) as outer:
            with simulated_gpu() as inner:
                self.assertIs(outer, inner)
            self.assertEqual(cuda(2).device, torch.device("cuda", 0))
            self.assertIs(active(), outer)
        self.assertIsNone(active())

    def test_more_devices_inside_is_refused(self):
        with simulated_gpu(), self.assertRaisesRegex(RuntimeError, "ask for the devices in the outer one"):
            simulated_gpu(devices=2).__enter__()

    def test_decorator(self):
        @simulated_gpu(devices=2)
        def f(n):
            return torch.cuda.device_count() * n

        self.assertEqual([f(3), f(4)], [6, 8])
        self.assertEqual(f.__name__, "f")
        self.assertIsNone(active())

    def test_number_of_devices(self):
        for n in (0, 9):
            with self.assertRaisesRegex(ValueError, f"1 to 8, got {n}"):
                simulated_gpu(devices=n)

    def test_compile_only_enters_by_itself(self):
        r = compile_only(lambda: torch.ones(4, device="cuda") * 2)
        self.assertEqual(len(r.wrappers), 1)
        self.assertIsNone(active())

    def run_python(self, code):
        return form.run_python(f"import form\n{code}", env={"CUDA_VISIBLE_DEVICES": "", "LD_PRELOAD": ""})

    @form.slow
    def test_fresh_process_without_driver(self):
        out = self.run_python(
            "from torch_overlay.testing import compile_only; import torch\n"
            "print(compile_only(lambda: torch.ones(4, 4, device='cuda').sum(1)).output.shape)"
        )
        self.assertEqual(out.stdout.strip(), "torch.Size([4])", out.stderr)

    @form.slow
    def test_process_may_end_inside(self):
        out = self.run_python(
            "from torch_overlay.testing import simulated_gpu; import torch\n"
            "gpu = simulated_gpu(); gpu.__enter__(); torch.ones(4, device='cuda', requires_grad=True).sum().backward()"
        )
        self.assertEqual((out.returncode, out.stderr), (0, ""))

    @form.slow
    def test_process_may_end_inside_with_copies_and_threads_that_never_left(self):
        out = self.run_python(
            "from torch_overlay.testing import simulated_gpu; import copy, threading, torch\n"
            "simulated_gpu().__enter__(); x = torch.ones(4, device='cuda'); p = torch.ones(4).pin_memory()\n"
            "y = copy.deepcopy([x, p])\n"
            "thread = threading.Thread(target=lambda: simulated_gpu().__enter__()); thread.start(); thread.join()"
        )
        self.assertEqual((out.returncode, out.stderr), (0, ""))

    @form.slow
    def test_forked_child(self):
        out = self.run_python(
            "from torch_overlay.testing import compile_only, simulated_gpu; import os, torch\n"
            "with simulated_gpu():\n"
            "    x = torch.ones(4, device='cuda')\n"
            "    if (child := os.fork()) == 0:\n"
            "        print(compile_only(lambda x: x.sin(), x).output.shape)\n"
            "    else:\n"
            "        print(os.waitpid(child, 0)[1])"
        )
        self.assertEqual(out.stdout.split("\n")[:2], ["torch.Size([4])", "0"], out.stderr)

    def test_build_without_cuda_is_refused(self):
        with (
            mock.patch("torch.backends.cuda.is_built", lambda: False),
            self.assertRaisesRegex(_native.UnsupportedBuild, "needs a CUDA build of PyTorch; this is"),
        ):
            simulated_gpu().__enter__()

    def test_the_table_gives_a_reason_for_every_mock(self):
        table = mocks()
        self.assertEqual([m.target for m in table if not m.why], [])
        self.assertEqual(len({m.target for m in table}), len(table))

    def test_no_mocked_function_is_held_under_another_name(self):
        """Names that other modules took by value at import would still reach the driver."""
        simulation = Simulation(1)
        table = _mocks.device_mocks(simulation.devices)
        originals = {
            id(m.patch().get_original()[0]): m.target for m in table if ".C." in m.target or "_C._" in m.target
        }
        mocked = {m.target for m in table}
        missed = []
        for name, module in list(sys.modules.items()):
            if not name.startswith("torch.") or name == "torch._C" or name.startswith("torch._overlay"):
                continue
            for key, value in list(vars(module).items()):
                holders = [(f"{name}.{key}", value)]
                if isinstance(value, type) and value.__module__ == name:
                    holders += [(f"{name}.{key}.{k}", getattr(v, "__func__", v)) for k, v in list(vars(value).items())]
                missed += [h for h, v in holders if id(v) in originals and h not in mocked]
        self.assertEqual(missed, ["torch._dynamo.device_interface.get_cuda_stream"])  # only read while importing


class Eager(Simulated):
    """What a program can do between compiled regions."""

    def test_availability(self):
        self.assertTrue(torch.cuda.is_available() and torch.accelerator.is_available())
        self.assertEqual((torch.cuda.device_count(), torch.accelerator.device_count()), (2, 2))
        self.assertEqual(torch.cuda.get_device_capability(), (9, 0))
        self.assertEqual(torch.cuda.get_device_name(1), "NVIDIA H200")
        self.assertTrue(torch.cuda.is_bf16_supported())
        self.assertEqual(torch.cuda.memory_allocated(), 0)

    def test_tensors(self):
        self.assertEqual(cuda(4).device, torch.device("cuda:0"))
        self.assertEqual(torch.randn(4, device="cuda:1").device, torch.device("cuda:1"))
        with torch.cuda.device(1):
            self.assertEqual(cuda(4).device, torch.device("cuda:1"))
        with torch.device("cuda"):
            self.assertEqual(torch.tensor([1.0, 2.0]).device, torch.device("cuda:0"))
        self.assertEqual(torch.randn(3).cuda().cpu().device, torch.device("cpu"))

    def test_modules_move(self):
        m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
        self.assertEqual({t.device.type for t in m.state_dict().values()}, {"cuda"})
        m(cuda(2, 4)).sum().backward()
        m.half().to("cuda:1").cpu()
        self.assertEqual(m[0].weight.device.type, "cpu")

    def test_backward_runs_in_the_calling_thread_after_the_engine_has_started(self):
        with torch.utils._python_dispatch._disable_current_modes():
            torch.ones(2, requires_grad=True).sum().backward()  # the engine now has its threads
        threads = []
        x = cuda(4, requires_grad=True)
        y = x.sin()
        y.register_hook(lambda g: threads.append(threading.current_thread()))
        y.sum().backward()
        self.assertEqual(x.grad.shape, (4,))
        self.assertEqual(threads, [threading.current_thread()])

    def test_backward_runs_on_the_stream_of_the_forward(self):
        seen = []

        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, g):
                seen.append(torch.cuda.current_stream())
                return g

        s = torch.cuda.Stream()
        x = cuda(4, requires_grad=True)
        with torch.cuda.stream(s):
            y = Op.apply(x)
        y.sum().backward()
        self.assertEqual(seen, [s])

    def test_pinned_memory(self):
        made = torch.randn(4).pin_memory(), torch.empty(4, pin_memory=True), torch.randn(4, pin_memory=True)
        self.assertEqual([t.is_pinned() for t in made], [True] * 3)
        self.assertFalse(torch.randn(4).is_pinned())
        self.assertFalse(made[0].clone().is_pinned())
        self.assertEqual(made[0].to("cuda", non_blocking=True).device.type, "cuda")
        with self.assertRaisesRegex(RuntimeError, "only dense CPU tensors can be pinned"):
            cuda(4).pin_memory()

    def test_generators(self):
        g = torch.Generator(device="cuda").manual_seed(3)
        self.assertEqual((g.device.type, g.initial_seed()), ("cuda", 3))
        self.assertEqual(torch.Generator().device.type, "cpu")
        self.assertEqual(cuda(4, generator=g).shape, (4,))
        torch.cuda.manual_seed_all(7)
        state = torch.cuda.get_rng_state(1)
        torch.cuda.manual_seed_all(8)
        torch.cuda.set_rng_state(state, 1)
        self.assertEqual([torch.cuda.default_generators[i].initial_seed() for i in (0, 1)], [8, 7])

    def test_item_between_regions_is_made_up(self):
        self.assertEqual(cuda(4).sum().item(), 1.0)
        self.assertIs(cuda(4).argmax().item(), 1)
        self.assertIs((cuda(4) > 0).any().item(), True)
        self.assertEqual(torch.tensor(7).item(), 7)  # a constant is known

    def test_loops_on_what_is_read_end(self):
        def ask(flag, times):
            return [bool(flag) for _ in range(times)]

        with SimulatedDevice(active()):  # whoever listens is not the program
            flag = (cuda(4) > 0).any()
            self.assertEqual(ask(flag, 4), [True, True, False, True])
            for _ in range(5):  # another place is asked in between
                first = bool(flag)
                second = bool(flag)
                self.assertEqual((first, second), (True, True))
            self.assertEqual([cuda(4).sum().item() for _ in range(101)].index(0.0), 99)

    def test_constants_that_go_to_the_host_and_back(self):
        def program(x):
            ones = x.zero_() + 1
            on_host = ones.cpu()
            return ones, on_host, on_host.cuda() + ones

        sides = [t.device.type for t in torch.compile(program)(cuda(4))]
        self.assertEqual(sides, ["cuda", "cpu", "cuda"])

    def test_thread_of_its_own(self):
        seen = []

        def run():
            with simulated_gpu() as gpu:
                seen.extend([gpu is self.gpu, torch.cuda.current_stream().stream_id])
                x = cuda(4, requires_grad=True)
                compile_only(lambda x: x.sin(), x, backward=True)
                seen.append(x.grad.device.type)

        with torch.cuda.stream(torch.cuda.Stream()), ThreadPoolExecutor(1) as pool:
            pool.submit(run).result()
        self.assertEqual(seen, [True, 0, "cuda"])

    def test_pool_of_threads_with_streams_of_their_own(self):
        streams = [torch.cuda.Stream() for _ in range(4)]
        x = cuda(16, 16)
        compiled = torch.compile(lambda x: (x @ x).relu())

        def work(stream):
            seen = []
            for _ in range(20):
                with torch.cuda.stream(stream):
                    y = (x @ x).relu() + torch.ones(16, 16, device="cuda")
                    z = compiled(x)
                    seen.append((y.device.type, z.shape, torch.cuda.current_stream() == stream))
            return set(seen)

        with ThreadPoolExecutor(4) as pool:
            found = set().union(*pool.map(work, streams))
        self.assertEqual(found, {("cuda", (16, 16), True)})

    def test_copies_of_tensors(self):
        x = cuda(4, 4, requires_grad=True)
        with _disable_current_modes():
            real = torch.ones(4)
        x.grad, x.tag = cuda(4, 4), [1]
        copied, transposed, again = copy.deepcopy([x, x.detach().t(), real])
        self.assertIs(copied.fake_mode, self.gpu.fake_mode)
        self.assertEqual((copied.device.type, copied.requires_grad, copied.tag), ("cuda", True, [1]))
        self.assertIsNot(copied.grad, x.grad)
        self.assertEqual(transposed.untyped_storage()._cdata, copied.untyped_storage()._cdata)
        self.assertNotEqual(copied.untyped_storage()._cdata, x.untyped_storage()._cdata)
        self.assertEqual(again.tolist(), real.tolist())
        self.assertIs(copy.deepcopy(self.gpu.fake_mode), self.gpu.fake_mode)

    def test_operator_without_a_fake_kernel_is_refused(self):
        text = r"simulated_gpu: aten\._to_sparse\.default can't be simulated\. It has no fake kernel"
        with self.assertRaisesRegex(RuntimeError, text):
            cuda(4, 4).to_sparse()

    def test_operator_without_results_needs_no_fake_kernel(self):
        """As the step of a fused SGD in eager."""
        weight = cuda(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
        weight.sum().backward()
        optimizer.step()  # is not refused

    def test_cuda_graph_points_to_check_graph(self):
        with self.assertRaisesRegex(
            RuntimeError, r"no GPU to capture on .* torch(_overlay|\._overlay)\.analysis\.check_graph reads"
        ):
            torch.cuda.CUDAGraph()


class StreamsAndEvents(Simulated):
    def log(self):
        lines = "\n".join(self.gpu.device_log)
        self.gpu.device_log.clear()
        return lines

    def test_ids_are_a_real_devices_ids(self):
        self.assertEqual([torch.cuda.Stream().stream_id for _ in range(3)], [3, 35, 67])
        self.assertEqual([torch.cuda.Stream(priority=-1).stream_id for _ in range(2)], [5, 37])
        self.assertEqual(torch.cuda.Stream(device=1).stream_id, 3)
        self.assertEqual([torch.cuda.Stream(priority=p).priority for p in (1, 0, -2, -9)], [0, 0, -2, -3])

    def test_the_pool_has_32_streams(self):
        streams = [torch.cuda.Stream() for _ in range(33)]
        self.assertEqual(len(set(streams)), 32)
        self.assertEqual(streams[32], streams[0])

    def test_identity(self):
        s, other = torch.cuda.Stream(), torch.cuda.Stream()
        same = torch.cuda.Stream(stream_id=s.stream_id, device_index=0, device_type=1)
        self.assertEqual(s, same)
        self.assertEqual(hash(s), hash(same))
        self.assertNotEqual(s, other)
        self.assertNotEqual(s.cuda_stream, other.cuda_stream)
        self.assertNotEqual(s, torch.cuda.Stream(device=1))
        self.assertEqual(torch.cuda.default_stream().cuda_stream, 0)
        self.assertIsInstance(torch.cuda.Stream(), torch.Stream)

    def test_kinds_of_streams(self):
        base = torch.Stream(device="cuda:1", priority=-1)
        self.assertIs(type(base), torch.Stream)
        self.assertEqual((base.device, base.stream_id), (torch.device("cuda:1"), 5))
        external = torch.cuda.ExternalStream(0x7F00, device="cuda:1")
        self.assertEqual((external.cuda_stream, external.device_index), (0x7F00, 1))

    def test_contexts(self):
        s, t = torch.cuda.Stream(), torch.cuda.Stream(device=1)
        seen = []
        with torch.cuda.stream(s):
            seen += [torch.cuda.current_stream() == s]
            with t:
                seen += [torch.cuda.current_device() == 1, torch.cuda.current_stream() == t]
                seen += [torch.cuda.current_stream(0) == s, torch.accelerator.current_stream().stream_id == t.stream_id]
            seen += [torch.cuda.current_device() == 0]
            with torch.cuda.stream(None):
                seen += [torch.cuda.current_stream() == s]
        seen += [torch.cuda.current_stream() == torch.cuda.default_stream()]
        torch.cuda.set_stream(t)
        seen += [torch.cuda.current_device() == 1, torch.cuda.current_stream() == t]
        torch.accelerator.set_stream(s)
        seen += [torch.cuda.current_stream() == s]
        self.assertEqual(seen, [True] * 11)

    def test_log_of_streams(self):
        s, t = torch.cuda.Stream(), torch.Stream()
        s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            torch.cuda.Event().record()
        t.wait_stream(s)
        t.wait_event(s.record_event())
        s.query(), t.query(), s.synchronize(), t.synchronize()
        torch.cuda.synchronize(), torch.accelerator.synchronize(), torch.cuda.synchronize(1)
        cuda(4).record_stream(s)
        with t:
            pass
        self.assertExpectedInline(
            self.log(),
            """\
new stream 3
new stream 35
record event 1 on stream 0
stream 3 waits for event 1
set stream 3
record event 2 on stream 3
set stream 0
record event 3 on stream 3
stream 35 waits for event 3
record event 4 on stream 3
stream 35 waits for event 4
query stream 3
query stream 35
synchronize stream 3
synchronize stream 35
synchronize cuda:0
synchronize cuda:0
set device 1
synchronize cuda:1
set device 0
record_stream on stream 3
enter stream 35
exit stream 35""",
        )

    def test_log_of_events(self):
        e, end = torch.cuda.Event(True), torch.Event(enable_timing=True)
        e.record()
        end.record(torch.Stream(device="cuda:1"))
        e.wait()
        end.wait(torch.cuda.Stream())
        e.query(), end.query(), e.synchronize(), end.synchronize()
        self.assertEqual(e.device, torch.device("cuda:0"))
        log = self.log().splitlines()
        self.assertEqual(log[1:3], ["new stream 3 of cuda:1", "record event 2 on stream 3 of cuda:1"])
        self.assertEqual(log[3:6:2], ["stream 0 waits for event 1", "stream 3 waits for event 2"])
        self.assertEqual(log[6:], [f"{what} event {n}" for what in ("query", "synchronize") for n in (1, 2)])

    def test_elapsed_time(self):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        for e in events:
            e.record()
        self.assertEqual(events[0].elapsed_time(events[2]), 2.0)
        with self.assertRaisesRegex(ValueError, "enable_timing=True"):
            torch.cuda.Event().elapsed_time(events[0])

    def test_stream_names_what_the_compiler_touches(self):
        e = torch.cuda.Event()

        @torch._dynamo.assume_constant_result
        def touches():
            e.record()
            return 2

        r = compile_only(lambda x: x * touches(), cuda(4))
        self.assertEqual(r.compile_log, ["record event 1 on stream 0"])
        self.assertEqual(compile_only(lambda x: x * 2, cuda(4)).compile_log, [])

    def test_absent_device(self):
        with self.assertRaisesRegex(RuntimeError, r"2 device\(s\), asked for cuda:5"):
            torch.cuda.set_device(5)


class CompileOnly(Simulated):
    def test_forward(self):
        r = compile_only(lambda x: x.sin() @ x, cuda(64, 64))
        self.assertExpectedInline(
            r.graphs[0],
            """\
arg0_1: f32[64, 64]
sin: f32[64, 64] = aten.sin.default(arg0_1)
mm: f32[64, 64] = aten.mm.default(sin, arg0_1)
return (mm,)""",
        )
        steps = (
            r"copy_if_misaligned[\s\S]*triton_poi_fused_sin_0\.run\([\s\S]*extern_kernels\.mm\([\s\S]*return \(buf1, \)"
        )
        self.assertRegex(r.calls(), r"def call\(self, args\):[\s\S]*" + steps)
        self.assertEqual((r.output.shape, r.output.device.type), ((64, 64), "cuda"))
        self.assertIn("@triton_heuristics.pointwise", r.wrappers[0])

    def test_backward(self):
        x, w = cuda(8, 4, requires_grad=True), cuda(4, 2, requires_grad=True)
        r = compile_only(lambda x, w: (x @ w).relu(), x, w, backward=True)
        self.assertEqual((len(r.graphs), len(r.wrappers)), (2, 2))
        self.assertEqual((x.grad.shape, w.grad.shape), (x.shape, w.shape))
        self.assertIn("tangents_1", r.graphs[1])

    def test_backward_without_gradient_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "no output requires a gradient"):
            compile_only(lambda x: x + 1, cuda(4), backward=True)

    def test_placement_is_shown(self):
        s = torch.cuda.Stream()

        def f(x):
            with torch.cuda.stream(s):
                y = x.sin()
            return y.cos()

        r = compile_only(f, cuda(4))
        self.assertExpectedInline(
            r.graphs[0],
            """\
arg0_1: f32[4]
sin: f32[4] = aten.sin.default(arg0_1)  # stream 1
cos: f32[4] = aten.cos.default(sin)
return (cos,)""",
        )

    def test_dynamic_shapes_give_outputs_of_the_calls_size(self):
        r = compile_only(lambda x: (torch.cat([x, x]).t(), x.shape[0] * 3), cuda(6, 5), dynamic=True)
        self.assertEqual((r.output[0].shape, r.output[1]), ((5, 12), 18))
        self.assertIn("s77", r.graphs[0])
        f = torch.compile(lambda x: x.repeat(2, 1))
        shapes = [f(cuda(n, 3)).shape for n in (4, 5, 9)]
        self.assertEqual(shapes, [(8, 3), (10, 3), (18, 3)])

    def test_reduce_overhead_keeps_what_cudagraphify_received(self):
        x = cuda(8, 8, requires_grad=True)
        r = compile_only(lambda x: (x @ x).sin(), x, mode="reduce-overhead", backward=True)
        self.assertEqual([g["is_backward"] for g in r.cudagraphs], [False, True])
        self.assertEqual(r.cudagraphs[0]["device_index"], 0)

    def test_mode_and_options_together(self):
        r = compile_only(lambda x: x.sin(), cuda(8), mode="reduce-overhead", options={"max_fusion_size": 1})
        self.assertEqual(len(r.cudagraphs), 1)

    def test_max_autotune_picks_the_first_triton_template(self):
        x = cuda(512, 512)
        texts = [compile_only(lambda x: x @ x, x, mode="max-autotune-no-cudagraphs").calls() for _ in range(2)]
        self.assertIn("triton_tem_fused_mm_0.run", texts[0])
        self.assertEqual(*texts)

    def test_host_tensors_and_copies(self):
        def f(x, h):
            return (x + h.to("cuda", non_blocking=True)).to("cpu", non_blocking=True), h * 2

        r = compile_only(f, cuda(8), torch.randn(8).pin_memory())
        self.assertEqual([o.device.type for o in r.output], ["cpu", "cpu"])
        self.assertIn("cpp_fused", r.calls())

    def test_input_mutation_and_views(self):
        def f(x):
            x.add_(1)
            return x.view(-1), x.sum(), None

        x = cuda(4, 4)
        view, total, nothing = compile_only(f, x).output
        self.assertEqual((view.shape, total.shape, nothing), ((16,), (), None))

    def test_constants_fold(self):
        r = compile_only(lambda x: x * torch.ones(4, device="cuda") + torch.zeros(4, device="cuda"), cuda(4))
        self.assertNotRegex(r.graphs[0], r"aten\.(mul|add)")
        self.assertIn("aten.clone.default(arg0_1)", r.graphs[0])  # `upstream_fixes.aliases`

    def test_attention_takes_the_kernels_of_the_device(self):
        def used(*args, dtype=torch.bfloat16, head=64, **kwargs):
            q, k, v = (cuda(2, 4, 16, head, dtype=dtype, requires_grad=True) for _ in range(3))
            r = compile_only(
                lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, *args, **kwargs), q, k, v
            )
            return sorted(set(re.findall(r"aten\._scaled_dot_product_(\w+)\.", r.graphs[0])))

        self.assertEqual(used(is_causal=True), ["cudnn_attention"])
        self.assertEqual(used(head=60), ["flash_attention"])
        self.assertEqual(used(head=320), ["efficient_attention"])
        self.assertEqual(used(dtype=torch.float32), ["efficient_attention"])
        mask = torch.ones(16, 16, dtype=torch.bool, device="cuda")
        self.assertEqual(used(mask), ["cudnn_attention"])
        self.assertEqual(used(mask, head=60), ["efficient_attention"])
        self.assertEqual(used(dtype=torch.float64), [])
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            self.assertEqual(used(), [])

    def test_attention_of_host_tensors_is_left_alone(self):
        q = torch.randn(2, 4, 16, 64)
        r = compile_only(nn.functional.scaled_dot_product_attention, q, q, q)
        self.assertIn("_scaled_dot_product_flash_attention_for_cpu", r.graphs[0])

    def test_dropout(self):
        r = compile_only(lambda x: nn.functional.dropout(x, 0.5), cuda(8, requires_grad=True), backward=True)
        self.assertIn("inductor_seeds", r.graphs[0])

    def test_graph_break(self):
        def f(x):
            y = x @ x
            torch._dynamo.graph_break()  # here
            return y.sin()

        x = cuda(8, 8, requires_grad=True)
        r = compile_only(f, x, fullgraph=False, backward=True)
        (b,) = r.graph_breaks
        self.assertEqual(len(r.graphs), 4)
        self.assertEqual(b.code, "torch._dynamo.graph_break()  # here")
        self.assertEqual(b.reason, "Call to `torch._dynamo.graph_break()`")
        self.assertIn("Remove", b.hints[0])
        self.assertEqual(os.path.realpath(b.file), os.path.realpath(__file__))
        self.assertEqual(x.grad.shape, (8, 8))

    def test_error_is_raised_or_kept(self):
        def f(x):
            torch._dynamo.graph_break()
            return x + 1

        with self.assertRaises(torch._dynamo.exc.Unsupported):
            compile_only(f, cuda(4))
        r = compile_only(f, cuda(4), allow_error=True)
        self.assertIsInstance(r.error, torch._dynamo.exc.Unsupported)
        self.assertIsNone(r.output)

    def test_scalars_that_only_the_run_knows(self):
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            r = compile_only(lambda x: (x.sum().item(), x.argmax().item() * 2, x.any().item()), cuda(4))
        self.assertEqual(list(map(type, r.output)), [float, int, bool])

    def test_observe_sees_plain_torch_compile(self):
        with observe() as seen:
            torch.compile(lambda x: x.sin())(cuda(4))
            torch.compile(lambda x: x.cos())(cuda(4))
        self.assertEqual(len(seen.wrappers), 2)
        self.assertIn("sin", seen.calls(0))
        self.assertIn("cos", seen.calls(1))

    def test_lines_are_the_users_and_the_text_is_as_unobserved(self):
        """Kernels of the host are called when a later node has begun."""

        def f(x, h):
            y = x.sin()
            k = h * 2
            return y.to("cpu", non_blocking=True), k

        texts, x, h = [], cuda(8), torch.randn(8)
        for mode in (None, "reduce-overhead"):
            torch._dynamo.reset()
            with mock.patch.object(torch._inductor.graph.GraphLowering, "save_output_code", staticmethod(texts.append)):
                torch.compile(f, mode=mode)(x, h)
            with observe() as around:
                (region,) = compile_only(f, x, h, mode=mode).regions
            self.assertEqual((around.regions[0].wrapper, around.regions[0].lines), (region.wrapper, region.lines))
            plain, seen = (re.sub(r"\['\d+_", "['N_", text) for text in (texts.pop(0), region.wrapper))
            self.assertEqual(seen, plain)
            rows = [*zip(region.wrapper.split("\n"), region.lines, strict=True)]
            for statement, code in (
                ("cpp_fused", "k = h * 2"),
                (".copy_(", 'return y.to("cpu", non_blocking=True), k'),
                (".run(", "y = x.sin()"),
            ):
                (line,) = (line for row, line in rows if statement in row and line)
                self.assertEqual(own_line(line).partition(": ")[2], code)
            self.assertEqual({line for row, line in rows if "return " in row}, {""})

    def test_plans_and_regions(self):
        s = torch.cuda.Stream()

        def two_streams(x):
            s.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(s):
                y = x.sin()
            z = x.cos()
            torch.cuda.current_stream().wait_stream(s)
            return y @ z

        r = compile_only(two_streams, cuda(8, 8, requires_grad=True), backward=True)
        self.assertEqual(
            [(region.kind, region.frame.name) for region in r.regions],
            [("forward", "two_streams"), ("backward", "two_streams")],
        )
        self.assertEqual(r.plans, [p for region in r.regions for p in region.plans])
        self.assertEqual(len(r.plans), 2)
        self.assertEqual([o.kind for o in r.frames[0].objects], ["stream", "stream"])
        self.assertEqual((r.frames[0].records, r.frames[0].waits), (2, 2))
        self.assertEqual(r.compile_log, [])

    def test_random_seed_of_the_caller_is_not_disturbed(self):
        random.seed(1), torch.manual_seed(1)
        expected = random.random()
        random.seed(1)
        compile_only(lambda x: x + 1, cuda(4))
        self.assertEqual(random.random(), expected)

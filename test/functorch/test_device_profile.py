"""Measurements of a device: made once, kept on disk by device, driver and version of torch, by one process at a time;
and what is measured: the library kernels of a graph, on tensors like theirs.
"""

import contextlib
import errno
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._inductor.test_case import TestCase
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import form  # noqa: F401
from torch_overlay._functorch.offload import device_rates, kernel_times, profile_cache
from torch_overlay._functorch.offload.cost_model import Link
from torch_overlay._functorch.offload.reader import StepReader


H200 = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, uuid="GPU-1234")


@contextlib.contextmanager
def device(properties: Any = H200, driver: str = "580.159.04", **versions: str) -> Iterator[None]:
    """A device by its description alone; what the process knows of others is forgotten."""
    profile_cache.forget()
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda *args: properties),
        mock.patch.object(profile_cache, "_driver_version", lambda: driver),
        contextlib.ExitStack() as stack,
    ):
        for name, version in versions.items():
            stack.enter_context(mock.patch.object(torch, name, version))
        yield
    profile_cache.forget()


class Counted:
    """Measures by counting."""

    def __init__(self, **found: float) -> None:
        self.found, self.asked = found, []

    def __call__(self, names: list[str]) -> dict[str, float]:
        self.asked.append(names)
        return {n: self.found[n] for n in names if n in self.found}


class TestProfile(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.enterContext(mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=self.folder))

    def files(self) -> list[Path]:
        return sorted((Path(self.folder) / profile_cache.FOLDER).glob("*.json"))

    def ask(self, measure: Counted, *names: str, **about: Any) -> dict[str, float]:
        with device(**about):
            return profile_cache.profile(0).get(list(names), measure)

    def test_each_number_is_measured_once_by_all_processes(self) -> None:
        measure = Counted(a=1.5, b=2.5, c=3.5)
        self.assertEqual(self.ask(measure, "a", "b"), {"a": 1.5, "b": 2.5})
        self.assertEqual(self.ask(measure, "b", "c"), {"b": 2.5, "c": 3.5})
        self.assertEqual(self.ask(measure, "a", "b", "c"), {"a": 1.5, "b": 2.5, "c": 3.5})
        self.assertEqual(measure.asked, [["a", "b"], ["c"]])
        (file,) = self.files()
        self.assertEqual(json.loads(file.read_text())["about"]["driver"], "580.159.04")

    def test_another_device_driver_or_torch_is_measured_anew(self) -> None:
        measure = Counted(a=1.5)
        other = SimpleNamespace(name="NVIDIA H100", multi_processor_count=132, uuid="GPU-1234")
        for about in ({}, {"properties": other}, {"driver": "590.1"}, {"__version__": "2.15.1"}):
            self.ask(measure, "a", **about)
        self.assertEqual(len(measure.asked), 4)
        self.assertEqual(len(self.files()), 4)

    def test_what_was_not_measured_is_asked_for_again(self) -> None:
        measure = Counted(a=1.5)
        for _ in range(2):
            self.assertEqual(self.ask(measure, "a", "too large"), {"a": 1.5})
        self.assertEqual(measure.asked, [["a", "too large"], ["too large"]])

    def test_broken_files_and_numbers_that_are_no_times_are_as_good_as_none(self) -> None:
        measure = Counted(a=1.5)
        self.ask(measure, "a")
        (file,) = self.files()
        good = json.loads(file.read_text())
        deep = "[" * 100_000 + "]" * 100_000
        for text in (
            *("", "[]", "{}", deep, json.dumps(good).replace("1.5", deep), "\xff", "[" + "9" * 5000 + "]"),
            *(json.dumps({**good, "measured": {"a": a}}) for a in (-1, 0, 10**400, float("inf"), True, "1.5", None)),
            *(json.dumps({**good, "about": {}}), json.dumps({**good, "measured": [1.5]})),
        ):
            file.write_text(text, encoding="latin-1")
            measure.asked.clear()
            self.assertEqual(self.ask(measure, "a"), {"a": 1.5})
            self.assertEqual(measure.asked, [["a"]])
        self.assertEqual(self.ask(Counted(z=float("nan"), y=10**400), "z", "y"), {})

    def test_folder_that_can_not_be_written_costs_the_memory_of_others_alone(self) -> None:
        (Path(self.folder) / profile_cache.FOLDER).write_text("in the way")
        measure = Counted(a=1.5)
        with device():
            for _ in range(2):
                self.assertEqual(profile_cache.profile(0).get(["a"], measure), {"a": 1.5})
        self.assertEqual(measure.asked, [["a"]])

    def test_disabled_caches(self) -> None:
        with torch._inductor.config.patch(force_disable_caches=True):
            self.assertEqual(self.ask(Counted(a=1.5), "a"), {"a": 1.5})
        self.assertEqual(self.files(), [])

    def test_device_that_is_being_measured_is_waited_for_and_then_left_alone(self) -> None:
        """A lock belongs to a file that was opened, so another process is no different."""
        measure = Counted(a=1.5)
        with device():
            with profile_cache.locked(0), profile_cache.locked(0, patience=0.1) as alone:
                self.assertFalse(alone)
                with mock.patch.object(profile_cache, "PATIENCE", 0.1):
                    self.assertEqual(profile_cache.profile(0).get(["a"], measure), {})
            self.assertEqual(profile_cache.profile(0).get(["a"], measure), {"a": 1.5})
        self.assertEqual(measure.asked, [["a"]])

    def test_file_system_without_locks_is_measured_on_at_once(self) -> None:
        measure = Counted(a=1.5)
        start = time.monotonic()
        unlocked = mock.patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "No locks available"))
        with device(), unlocked, mock.patch.object(profile_cache, "PATIENCE", 10.0):
            self.assertEqual(profile_cache.profile(0).get(["a"], measure), {"a": 1.5})
        self.assertLess(time.monotonic() - start, 5.0)

    def test_what_another_process_measured_meanwhile_is_read(self) -> None:
        with device():
            here = profile_cache.profile(0)
        self.ask(Counted(a=1.5), "a")
        measure = Counted(a=9.0)
        with device():
            self.assertEqual(here.get(["a"], measure), {"a": 1.5})
        self.assertEqual(measure.asked, [])


def graph_of(fn: Any, *args: torch.Tensor) -> torch.fx.Graph:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return make_fx(fn, tracing_mode="fake")(*args).graph


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q = (x @ w).view(1, -1, 2, 16).transpose(1, 2)
    heads = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return torch.relu(heads.transpose(1, 2).reshape(x.shape) @ w)


class TestKernelTimes(TestCase):
    def nodes(self) -> list[torch.fx.Node]:
        graph = graph_of(block, torch.randn(64, 32), torch.randn(32, 32))
        return [n for n in graph.nodes if n.op == "call_function"]

    def test_matmuls_and_attention_are_measured_and_nothing_else(self) -> None:
        names = {str(n.target): kernel_times.name_of(n) for n in self.nodes()}
        known = {target for target, name in names.items() if name is not None}
        self.assertIn("aten.mm.default", known)
        self.assertTrue(any("attention" in target for target in known), known)
        self.assertTrue(all("mm" in target or "attention" in target for target in known), known)
        self.assertIn("float32[64, 32][32, 1]", str(names["aten.mm.default"]))

    def test_kernels_run_on_tensors_like_those_of_the_graph(self) -> None:
        """Here on the CPU: whatever the node's operator accepts."""
        ran = []

        def once(work: Any) -> float:
            ran.append(work())
            return 7.0

        with (
            mock.patch.object(kernel_times, "shortest_us", once),
            mock.patch.object(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 30)),
            mock.patch.multiple(torch.cuda, memory_reserved=lambda: 0, memory_allocated=lambda: 0),
        ):
            measurable = [n for n in self.nodes() if kernel_times.is_measurable(n)]
            for node in measurable:
                self.assertEqual(kernel_times._us(node), 7.0)
                found, expected = (torch.utils._pytree.tree_leaves(v)[0] for v in (ran[-1], node.meta["val"]))
                self.assertEqual((found.shape, found.dtype), (expected.shape, expected.dtype))
            self.assertGreaterEqual(len(measurable), 3)
            with mock.patch.object(torch.cuda, "mem_get_info", lambda: (1000, 1 << 30)):
                self.assertRaises(torch.OutOfMemoryError, kernel_times._us, measurable[0])

    def test_tensors_whose_elements_share_memory_are_made(self) -> None:
        like = torch.empty(1, 8).expand(4, 8)
        made = kernel_times._made(like)
        self.assertEqual((made.shape, made.stride()), (like.shape, like.stride()))
        self.assertEqual(kernel_times._made(torch.empty(3, dtype=torch.int64)), torch.zeros(3, dtype=torch.int64))

    def test_sizes_that_are_not_known_are_not_measured(self) -> None:
        graph = make_fx(lambda x: x @ x, tracing_mode="symbolic")(torch.randn(4, 4)).graph
        (node,) = [n for n in graph.nodes if n.op == "call_function" and kernel_times.is_measurable(n)]
        self.assertIsNone(kernel_times.name_of(node))

    def test_plan_takes_what_was_measured_and_estimates_the_rest(self) -> None:
        nodes = self.nodes()
        rates = device_rates.Rates(Link(1.0, 1.0), 1e3, 1e30, True)
        name = kernel_times.name_of(next(n for n in nodes if n.target is torch.ops.aten.mm.default))
        assert name is not None
        with mock.patch.object(device_rates.Rates, "flops_of", lambda *args: 1e30):
            steps = StepReader(nodes[0].graph, set(nodes), rates, torch.device("cpu"), {name: 1234.0}).steps
        times = {s.name: s.us for s in steps}
        self.assertEqual([t for n, t in times.items() if n.startswith("mm")], [1234.0, 1234.0])
        self.assertLess(max(t for n, t in times.items() if not n.startswith("mm")), 1234.0)

    def test_device_that_does_not_answer_leaves_estimates(self) -> None:
        with mock.patch.object(profile_cache, "profile", side_effect=RuntimeError("no device")):
            self.assertEqual(kernel_times.measure(self.nodes(), 0), {})
            self.assertIsNone(kernel_times.known_us(self.nodes()[0], 0))

    def test_what_can_not_run_is_left_out(self) -> None:
        def us(node: torch.fx.Node) -> float:
            if node.target is torch.ops.aten.mm.default:
                return 5.0
            raise torch.OutOfMemoryError("too large")

        profile = mock.Mock(get=lambda names, measure: measure(names))
        with (
            mock.patch.object(profile_cache, "profile", lambda index: profile),
            mock.patch.object(kernel_times, "measuring", lambda index: contextlib.nullcontext()),
            mock.patch.object(kernel_times, "_us", us),
        ):
            found = kernel_times.measure(self.nodes(), 0)
        self.assertEqual(set(found.values()), {5.0})

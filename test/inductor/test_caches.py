"""Compile once, run elsewhere: what a process compiled is found by the next one, on this rank or on another, and runs
the same there; what is compiled for something else is not found.

The processes are fresh: `cached_programs`, on the simulated GPU, which executes the text that comes out of a cache, and
`relaunched_from_cache`, which computes on the host.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import cached_programs
import corpus
import torch
from cached_simulation import caches, lookups
from torch._dynamo.test_case import TestCase
from torch._dynamo.utils import counters
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form
from stream_programs import by_name
from torch_overlay._functorch.streams import ids
from torch_overlay._inductor.streams.region_spec import of_device
from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice
from torch_overlay.testing import compile_only, simulated_gpu


STOCK = ("training", "memory_of_its_own", "partitions", "numbers_as_parameters")  # what upstream's caches take, too
OURS = (
    "training_on_two_streams",
    "stream_and_event_of_the_frame",
    "update_of_an_input_on_a_side_stream",
    "table_in_host_memory",
    "offload",
)
# Of each option a value with which other code may come out, but for the last three.
OPTIONS = (
    {"streams": False},
    {"fold_branches_below_us": 1000.0},
    {"nvtx": True},
    {"activation_offload": {"budget_gb": 40.0}},
    {"cudagraphs": "trees"},
    {"cudagraphs": "off"},
    {"cudagraph_concurrency": False},
    {"cudagraph_rewrites": False},
    {"cudagraph_verify": True},
    {"cudagraph_templates": 3},
)


class CachesTestCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def process(self, name: str, programs: Any, off: bool = False, **request: Any) -> dict[str, Any]:
        return self.ask("cached_programs", name, programs=programs, off=off, **request)

    def ask(self, module: str, name: str, off: bool = False, **request: Any) -> dict[str, Any]:
        """The answer of a fresh process, with a cache folder of its own unless the request has one."""
        out = self.folder / f"{name}.json"
        for file in ("load", "save"):
            if file in request:
                request[file] = str(self.folder / request[file])
        request = {"folder": str(self.folder / name), "out": str(out), "off": off, **request}
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom {module} import main\n"
        # The programs of the simulated GPU find what a process with other hashes of strings has left.
        forks = "load" in request or module == "relaunched_from_cache"
        start = form.fork_python if forks else form.run_python
        done = start(f"{code}main({request!r})", env={"TORCH_OVERLAY_DISABLE": "1" if off else ""})
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        return json.loads(out.read_text())

    def check_warm(self, cold: dict[str, Any], warm: dict[str, Any]) -> None:
        for name, found in warm.items():
            with self.subTest(name):
                self.assertEqual([*found["lookups"]], ["fxgraph_cache_hit", "autograd_cache_hit"])
                changed = {"lookups": None, "own keys": None}
                self.assertEqual({**found, **changed}, {**cold[name], **changed})

    def check_cold(self, found: dict[str, int]) -> None:
        self.assertFalse([answer for answer in found if answer.endswith("hit")])


@instantiate_parametrized_tests
class TestNextProcess(CachesTestCase):
    def check_computes_the_same(self, **where: str) -> dict[str, Any]:
        cold = self.ask("relaunched_from_cache", "cold", save="artifacts", **where)
        warm = self.ask("relaunched_from_cache", "warm", load="artifacts", **where)
        for name, found in warm.items():
            with self.subTest(name):
                self.check_cold(cold[name]["lookups"])
                self.assertEqual([*found["lookups"]], ["fxgraph_cache_hit", "autograd_cache_hit"])
                self.assertEqual([*cold[name]["equal"], *found["equal"]], [True] * 8)
                self.assertEqual(found["graphs"], cold[name]["graphs"])
        return warm

    @form.needs_gpu
    def test_captures_and_computes_the_same_on_a_gpu(self) -> None:
        warm = self.check_computes_the_same(device="cuda")
        for name in ("training", "two streams"):
            self.assertEqual(warm[name]["graphs"], [[0, 0], [2, 2], [2, 4], [2, 6]])
        self.assertEqual(warm["two streams without graphs"]["graphs"][-1], [0, 0])

    def test_captures_at_its_second_call_and_computes_the_same(self) -> None:
        warm = self.check_computes_the_same()
        self.assertEqual(warm["training"]["graphs"], [[0, 0], [2, 2], [2, 4], [2, 6]])  # a forward and a backward
        self.assertEqual(warm["partitions"]["graphs"], [[0, 0], [2, 2], [2, 4], [2, 6]])
        self.assertEqual(warm["number"]["graphs"][-1], [1, 1])  # each value has a graph: a library takes it

    @parametrize("names", form.sampled([(*STOCK[::2], *OURS[::2]), (*STOCK, *OURS)], 2))
    def test_compiles_nothing_and_runs_the_same(self, names: tuple[str, ...]) -> None:
        cold = self.process("cold", names, save="artifacts")
        for name in names:
            self.check_cold(cold[name]["lookups"])
            self.assertTrue(cold[name]["ran"])
        warm = self.process("warm", names, load="artifacts")
        self.check_warm(cold, warm)

    def test_a_forward_from_a_cache_finds_its_backward(self) -> None:
        """The forward says whose memory it saves, and the backward's key depends on that."""
        without = mock.patch("torch._functorch.aot_autograd.should_use_local_autograd_cache", lambda: False)
        found = []
        with simulated_gpu(2) as gpu, caches(str(self.folder)) as texts, without, SimulatedDevice(gpu) as device:
            for _ in range(2):
                answer = cached_programs.run("training_on_two_streams", gpu, device, texts)
                found.append((answer["lookups"], answer["texts"]))
        (cold, compiled), (warm, cached) = found
        self.assertEqual((cold, warm), ({"fxgraph_cache_miss": 2}, {"fxgraph_cache_hit": 2}))
        self.assertEqual(cached, compiled)

    @form.slow
    def test_finds_in_the_folder_what_it_finds_in_artifacts(self) -> None:
        cold = self.process("shared", (*STOCK, *OURS))
        self.check_warm(cold, self.process("warm", (*STOCK, *OURS), folder=str(self.folder / "shared")))

    @form.slow
    def test_with_other_options_is_not_served(self) -> None:
        # In this order: from its first stream on, a process may compile code that blocks the host in another way.
        programs = ("stream_and_event_of_the_frame", "training")
        self.process("cold", programs, save="artifacts")
        warm = self.process("warm", programs, load="artifacts", options=OPTIONS)
        for options in OPTIONS[:4]:
            for found in warm[json.dumps(options)]:
                self.check_cold(found)
        for options in OPTIONS[4:8]:
            streams, graphs = warm[json.dumps(options)]
            self.check_cold(graphs)
            self.assertEqual([*streams], ["fxgraph_cache_hit", "autograd_cache_hit"])
        for options in OPTIONS[8:]:
            for found in warm[json.dumps(options)]:
                self.assertEqual([*found], ["fxgraph_cache_hit", "autograd_cache_hit"])

    @form.slow
    @form.overlay_only
    def test_without_the_overlay_shares_nothing_with_one_that_has_it(self) -> None:
        with_it = self.process("with", STOCK, save="of overlay")
        without = self.process("without", STOCK, off=True, save="of stock")
        for off, file, alone in ((False, "of stock", with_it), (True, "of overlay", without)):
            loaded = self.process(f"loaded {file}", STOCK, off=off, load=file)
            for name in STOCK:
                self.check_cold(loaded[name]["lookups"])
                self.assertEqual(loaded[name], alone[name])
        for kind, keys in with_it["keys"].items():
            self.assertTrue(keys)
            self.assertFalse({*keys} & {*without["keys"][kind]})


@form.slow
@instantiate_parametrized_tests
class TestStreamPrograms(TestCase):
    @parametrize("name,mode", corpus.cases()[::12])
    def test_runs_from_a_cache_as_it_was_compiled(self, name: str, mode: str) -> None:
        """Compiled autograd and the like bypass the AOTAutograd cache, and never the FX graph cache."""
        found = []
        with tempfile.TemporaryDirectory() as folder, simulated_gpu(2):
            for _ in range(2):
                torch._dynamo.reset()
                counters.clear()
                with caches(folder) as texts:
                    report = corpus.check_program(by_name(name), None if mode == "default" else mode)
                found.append((lookups(), sorted(texts), corpus.findings(report)))
        (cold, *compiled), (warm, *cached) = found
        self.assertEqual(warm.get("fxgraph_cache_hit"), cold.get("fxgraph_cache_miss"))
        self.assertNotIn("fxgraph_cache_miss", warm)
        self.assertEqual(cached, compiled)
        self.assertEqual(cached[1], [])


def of_no_device(text: str) -> str:
    """The text with one name for the device of the rank."""
    text = re.sub(r"\bcuda:[01]\b", "cuda:N", text)
    text = re.sub(r"(_DeviceGuard\(|set_device\(|get_raw_stream\(|raw_stream|index=|device=)[01]\b", r"\1N", text)
    # Streams to and from the host have numbers by device; a slab is made for one.
    text = re.sub(r"\b90000([0-3])\b", lambda found: f"90000{int(found[1]) % 2}", text)
    text = re.sub(r"stream_(in|out)1", r"stream_\1", text)
    text = re.sub(r"(\(\(\d+, )[01](, \()", r"\1N\2", text)  # an input that is kept on the device
    return re.sub(r"take_slab\((\d+), [01]", r"take_slab(\1, N", text)


class TestOtherRank(CachesTestCase):
    def compare(self, ranks: list[dict[str, Any]], programs: Any, text: Any) -> None:
        for name in programs:
            with self.subTest(name):
                one, other = ([*map(text, rank[name]["texts"])] for rank in ranks)
                self.assertEqual(sorted(one), sorted(other))

    @form.slow
    def test_compiles_the_same_but_for_its_device(self) -> None:
        """Upstream names the device in keys and in code; so do we, and nothing else differs."""
        ranks = [self.process(f"rank {rank}", (*STOCK, *OURS), rank=rank, save=f"{rank}") for rank in (0, 1)]
        self.compare(ranks, (*STOCK, *OURS), of_no_device)
        for name in (*STOCK, *OURS):
            one, other = ([*map(of_no_device, rank[name]["own keys"])] for rank in ranks)
            self.assertTrue(one)
            self.assertEqual(one, other)
        for kind, keys in ranks[0]["keys"].items():
            self.assertFalse({*keys} & {*ranks[1]["keys"][kind]}, kind)

    def test_names_no_device_where_one_rank_compiles_for_all(self) -> None:
        side = []

        def f(x: torch.Tensor) -> torch.Tensor:
            side[0].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side[0]):
                y = x @ x
            torch.cuda.current_stream().wait_stream(side[0])
            return y

        with simulated_gpu(2), torch.compiler.config.patch(compile_on_one_rank=True):
            side.append(torch.cuda.Stream())
            (text,) = compile_only(f, torch.randn(64, 64, device="cuda")).wrappers
            self.assertRegex(text, rf"device=-1,\n +streams=\({of_device(ids.CURRENT_DEVICE)}, ")
            self.assertNotIn("cuda:0", text)
            torch.cuda.set_device(1)
            for make in (ids.copy_out_stream, ids.copy_in_stream):
                number = make(ids.written_index(1))
                self.assertTrue(ids.is_copy_stream(number))
                device, is_in = ids.copy_device(number)
                self.assertEqual((ids.index_now(device), is_in), (1, make is ids.copy_in_stream))
                self.assertEqual(ids.copy_device(make(3)), (3, is_in))

    @form.slow
    def test_runs_on_its_device_what_was_compiled_on_one_rank(self) -> None:
        """With compile_on_one_rank no text has a device, and a rank runs on its device what another one compiled."""
        programs = ("training", "training_on_two_streams", "table_in_host_memory", "offload")
        how = {"one_rank": True, "blind": True}
        first = self.process("rank 0", programs, save="artifacts", **how)
        other = self.process("rank 1", programs, rank=1, load="artifacts", **how)
        self.compare([first, other], programs, str)
        for name, found in other.items():
            with self.subTest(name):
                self.assertNotIn("fxgraph_cache_miss", found["lookups"])
                self.assertEqual(found["devices"], [], "another device than the rank's was made current")
                self.assertEqual(
                    found["graphs"], [code.replace("device=0", "device=1") for code in first[name]["graphs"]]
                )
                self.assertEqual([line.replace(" of cuda:1", "") for line in found["ran"]], first[name]["ran"])
                self.assertEqual({line.count(" of cuda:1") > 0 for line in found["ran"] if "stream" in line}, {True})

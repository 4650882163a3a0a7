"""C++ wrappers and AOTInductor of programs with streams: the plan of the Python wrapper, written as C++.

`TestChecked` compiles the generated C++ against stand-ins and checks what it does, as `check` does with Python's text.
`TestText` compiles the same text with PyTorch's own headers, and `TestAotInductor` reads the text of a package.
"""

import functools
import os
import re
import subprocess
import sysconfig
import traceback
import types
from pathlib import Path
from typing import Any

import corpus
import other_wrappers
import torch
import torch._inductor.config as inductor_config
from torch._inductor.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form
from stream_programs import by_name, PROGRAMS
from torch_overlay import config
from torch_overlay.analysis.race_check.checking import check
from torch_overlay.testing import _stub_module, compile_only, simulated_gpu


CPP = {"cpp_wrapper": True}


# Programs that torch.export may take; not one without inputs, one that updates a buffer that no module registers, and
# one where the bytes that the host writes aren't known.
OTHERS = {"constant_after_wait", "batch_norm_on_side_stream", "host_writes_beside_copy"}
EXPORTED = [p for p in PROGRAMS if p.devices == 1 and p.name not in OTHERS and p.name[:6] != "train_"]

# Programs without the order that autograd's engine makes between two devices: docs/limits.md.
LEFT = {"train_on_second_device"}


def is_refused(name: str) -> bool:
    """True for a program that may be refused: on several devices, or with nested regions."""
    return by_name(name).devices > 1 or "device" in name or "region" in name


@instantiate_parametrized_tests
class TestChecked(TestCase):
    @parametrize("name", form.sampled([p.name for p in PROGRAMS], 12))
    def test_programs_are_ordered_as_in_eager(self, name: str) -> None:
        try:
            with inductor_config.patch(CPP):
                report = corpus.check_program(by_name(name))
        except Exception as error:
            if is_refused(name) and re.search(r"cpp_wrapper can't compile .*, at /.*:\d+: ", str(error)):
                return
            if "simulated" in str(error):  # a call that the stand-ins lack
                self.skipTest(str(error))
            raise
        found = corpus.findings(report)
        if name in LEFT:
            self.assertTrue(found and all("the caller's work" in each for each in found), found)
        else:
            self.assertEqual(found, [])

    def checked(self, *args: Any, **kwargs: Any) -> Any:
        with simulated_gpu():
            side = torch.cuda.Stream()
            x = torch.empty(64, 64, device="cuda", requires_grad=kwargs.get("backward", False))
            return check(corpus.forked(side), x, x, options=CPP, fullgraph=True, **kwargs)

    def test_a_backward(self) -> None:
        self.assertTrue(self.checked(backward=True).ok)

    def test_a_wait_that_is_missing_is_found(self) -> None:
        report = self.checked(rewrite=lambda text: re.sub(r"frame0\.wait\(1, stream0_raw\);", "", text))
        self.assertIn("must wait", str(report))

    def test_a_launch_on_a_wrong_stream_is_found(self) -> None:
        report = self.checked(
            rewrite=lambda text: re.sub(r"(call_triton\w+\(.*), stream1_raw\);", r"\1, stream0_raw);", text)
        )
        self.assertIn("RAW", str(report))


class TestText(TestCase):
    @functools.cached_property
    def text(self) -> str:
        with simulated_gpu():
            x = torch.empty(64, 64, device="cuda")
            (text,) = compile_only(corpus.forked(torch.cuda.Stream()), x, x, options=CPP).wrappers
        return text

    def body(self) -> list[str]:
        body = self.text.partition("void inductor_entry_impl(")[2].partition("} // inductor_entry_impl")[0]
        return [line.strip() for line in body.splitlines() if re.search("frame0|guard0|region0|align|call_|_out", line)]

    def test_the_plan_is_written_between_the_calls(self) -> None:
        self.assertExpectedInline(
            "\n".join(self.body()),
            """\
torch_overlay::Frame frame0(events0, device0, 2, streams0[0]);
const bool is_aliased0 = region0.enter(streams0, 2, device0);
std::optional<torch_overlay::AOTICudaStreamGuard> guard0;
frame0.record(0, stream0_raw);
frame0.wait(0, stream1_raw);
torch_overlay::align(arg0_1, arg0_1_orig, stream1_raw, device0);
guard0.emplace(stream1_raw, device0);
AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(buf0, arg0_1, arg0_1));
torch_overlay::align(arg0_1, arg0_1_orig, stream0_raw, device0);
guard0.reset();
AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(buf1, arg0_1, arg0_1));
call_triton_poi_fused_relu_0(buf2, 4096L, 0, stream1_raw);
frame0.record(1, stream1_raw);
call_triton_poi_fused_sin_1(buf3, 4096L, 0, stream0_raw);
frame0.wait(1, stream0_raw);
AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(buf4, buf2, buf3));
guard0.reset();
region0.leave(is_aliased0);""",
        )

    @form.slow
    def test_it_compiles_with_the_headers_of_torch(self) -> None:
        self.compile(self.text.partition('cpp_wrapper_src = (\nr"""')[2].partition('"""\n)')[0])

    @form.slow
    def test_a_package_compiles_with_the_headers_of_torch(self) -> None:
        text = other_wrappers.aot_inductor(Waits)
        self.compile(re.sub(r"\bcall_triton\w+\(.*\);", "", text), "-DAOT_INDUCTOR")  # kernels aren't compiled

    def compile(self, source: str, *flags: str) -> None:
        torch_folder, cuda = Path(torch.__file__).parent, Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
        if not (cuda / "include/cuda.h").exists():
            self.skipTest("no headers of CUDA")
        folders = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include", cuda / "include"]
        includes = [f"-I{folder}" for folder in (*folders, sysconfig.get_path("include"))]
        command = ["g++", "-std=c++20", "-fsyntax-only", "-DUSE_CUDA", *flags, *includes, "-x", "c++", "-"]
        made = subprocess.run(command, input=source, capture_output=True, text=True)
        self.assertEqual(made.returncode, 0, made.stderr[:3000])


class OnStreams(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.side, self.other, self.event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()


class Waits(OnStreams):
    """A branch that is forked and joined by `wait_stream`, which upstream's AOTInductor refuses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return corpus.forked(self.side)(x, x)


class NeverJoined(OnStreams):
    """A side stream that waits for nothing, and that nothing waits for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self.side):
            y = (x * 2).sum(0)
        return y


class WaitsForTheCaller(OnStreams):
    """It waits for an event that somebody else records."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.event.wait(self.side)
        with torch.cuda.stream(self.side):
            y = (x * 2).sum(0)
        torch.cuda.current_stream().wait_stream(self.side)
        return y


class Written(OnStreams):
    """An input and a buffer that a side stream writes, and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(64, 64, device="cuda"), requires_grad=False)
        self.register_buffer("state", torch.empty(64, 64, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x @ self.weight
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            x.add_(before @ self.weight)
            self.state.copy_(x @ x)
        y = (before @ before).relu()
        torch.cuda.current_stream().wait_stream(self.side)
        return y @ x


class Folded(OnStreams):
    """Weights from which a side stream computes a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(64, 64, device="cuda"), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            y = (self.weight @ self.weight).relu() @ x
        z = x @ x
        torch.cuda.current_stream().wait_stream(self.side)
        return y + z


class Blocks(OnStreams):
    """Two side streams that wait for each other, block after block, and values that only one of them reads."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        y = z = x
        for i in range(4):
            with torch.cuda.stream(self.side):
                y = y @ x + i
            self.other.wait_stream(self.side)
            with torch.cuda.stream(self.other):
                z = (z @ y).relu()
            if i % 2:
                self.side.wait_stream(self.other)
                with torch.cuda.stream(self.side):
                    y = y @ z
        w = x @ x
        current.wait_stream(self.side)
        current.wait_stream(self.other)
        return y @ w, z


class Synchronizes(OnStreams):
    """The host waits for an event that the program records."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            y = (x @ x).relu()
            self.event.record()
        self.event.synchronize()
        return y @ x


@instantiate_parametrized_tests
class TestAotInductor(TestCase):
    def test_folded_constants_have_a_region_of_their_own(self) -> None:
        with inductor_config.patch({"aot_inductor.use_runtime_constant_folding": True}):
            text = other_wrappers.aot_inductor(Folded)
        found = re.findall(r"class PackageRegion|static torch_overlay::PackageRegion region\d|region\d\.enter", text)
        self.assertEqual(
            found,
            [
                "class PackageRegion",
                *(f"static torch_overlay::PackageRegion region{i}" for i in range(2)),
                *(f"region{i}.enter" for i in range(2)),
            ],
        )

    def checked(self, model: type[torch.nn.Module], rewrite: Any = None) -> Any:
        """Check a package, of which the caller knows the current stream alone."""
        with simulated_gpu():
            return self.check(model(), torch.empty(64, 64, device="cuda"), rewrite=rewrite)

    def check(self, model: torch.nn.Module, *inputs: torch.Tensor, rewrite: Any = None) -> Any:
        with config.patch(fold_branches_below_us=0.0):
            text = other_wrappers.package(model, *inputs)
        shapes = re.findall(r"constants_info_\[\d+\]\.shape = \{(.*?)\}", text)
        weights = [torch.empty(tuple(map(int, re.findall(r"\d+", shape))), device="cuda") for shape in shapes]
        loaded: list[Any] = []

        def run(*given: torch.Tensor) -> Any:
            if not loaded:
                loaded.append(_stub_module._execute[-1](text, types.SimpleNamespace(__file__="")))
            return loaded[0].call([*given, *weights])

        return check(run, *inputs, compile=False, eager=False, rewrite=rewrite)

    @parametrize("model", [Waits, Written, Blocks, Synchronizes, other_wrappers.Branch])
    def test_packages_are_ordered(self, model: type[torch.nn.Module]) -> None:
        report = self.checked(model)
        self.assertTrue(report.ok, str(report))

    @parametrize("name", form.sampled([p.name for p in EXPORTED], 8))
    def test_programs_of_the_corpus_are_ordered(self, name: str) -> None:
        with simulated_gpu():
            fn = by_name(name).instance(None, False).fn
            inputs = by_name(name).make_inputs("cuda", torch.Generator().manual_seed(1))
            model: Any = fn
            if not isinstance(fn, torch.nn.Module):
                model = type("Program", (torch.nn.Module,), {"forward": lambda self, *given: fn(*given)})()
            try:
                report = self.check(model, *inputs)
            except Exception as error:
                in_export = any(
                    "/torch/export/" in frame.filename for frame in traceback.extract_tb(error.__traceback__)
                )
                if in_export or re.search("(?i)simulated|not supported in AOTI", str(error)):
                    self.skipTest(str(error))
                raise
        # Nothing promises the host that it may overwrite an input after the call.
        races = [r for r in report.races if (r.second.launch.name, r.second.launch.stream) != ("the caller", "host")]
        self.assertEqual((races, report.lost), ([], []))

    def test_a_wait_that_is_missing_is_found(self) -> None:
        report = self.checked(Waits, lambda text: re.sub(r"frame0\.wait\(1, stream0_raw\);", "", text))
        self.assertFalse(report.ok)

    def test_a_launch_on_a_wrong_stream_is_found(self) -> None:
        report = self.checked(Waits, lambda text: text.replace("{ auto stream = stream1_raw;", "{"))
        self.assertIn("RAW", str(report))

    def statements(self, model: type[torch.nn.Module]) -> list[str]:
        text = other_wrappers.aot_inductor(model)
        body = text.partition("::run_impl(\n")[2].partition("} // AOTInductorModel::run_impl")[0]
        found = re.findall(r"frame0\.(\w+)\(\d+, (\w+)\);|\{ auto stream = (\w+);\n +call_triton", body)
        return [f"{method} {stream}" if method else f"launch {launch}" for method, stream, launch in found]

    def test_streams_are_forked_and_joined_by_wait_stream(self) -> None:
        self.assertEqual(
            self.statements(Waits),
            [
                "record stream0_raw",
                "wait stream1_raw",
                "launch stream1_raw",
                "record stream1_raw",
                "launch stream0_raw",
                "wait stream0_raw",
            ],
        )

    def test_an_event_under_two_names_is_one(self) -> None:
        self.assertEqual(
            self.statements(other_wrappers.Branch),
            [
                "record stream0_raw",
                "wait stream2_raw",
                "launch stream2_raw",
                "record stream2_raw",
                "launch stream0_raw",
                "wait stream0_raw",
                "launch stream0_raw",
            ],
        )

    def test_streams_that_nobody_knows_are_joined(self) -> None:
        self.assertEqual(
            self.statements(NeverJoined),
            ["record stream0_raw", "wait stream1_raw", "launch stream1_raw", "record stream1_raw", "wait stream0_raw"],
        )

    def test_an_event_of_the_caller_is_refused_with_its_line(self) -> None:
        with self.assertRaisesRegex(Exception, r"AOTInductor can't compile an event of the caller, at .*test_cpp_wr"):
            self.statements(WaitsForTheCaller)

"""What is read off a generated kernel's source is all that its indices reach; for sums of variables, nothing else."""

import itertools
import re

import torch
from torch._inductor.test_case import TestCase

import form  # noqa: F401
from torch_overlay.analysis import check
from torch_overlay.analysis.race_check.kernel_ranges import Elements, HostKernelRanges, KernelRanges
from torch_overlay.testing import simulated_gpu


_POINTWISE = """
@triton_heuristics.pointwise(
    size_hints={{'x': 512}},
    inductor_meta={{'mutated_arg_names': ['out_ptr0']}},
)
@triton.jit
def triton_poi_0(in_ptr0, out_ptr0, {numbers}XBLOCK : tl.constexpr):
    {numel}
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
{variables}
    tmp0 = tl.load(in_ptr0 + ({load}), xmask)
    tl.store(out_ptr0 + ({store}), tmp0, xmask)
"""


_ON_HOST = """
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
{
    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(2L); x0+=static_cast<int64_t>(1L))
    {
        for(int64_t x1=static_cast<int64_t>(0L); x1<static_cast<int64_t>(64L); x1+=static_cast<int64_t>(8L))
        {
            auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(64L + x1 + 128L*x0), 8);
            auto tmp1 = in_ptr0[static_cast<int64_t>(320L + x0)];
            tmp0.store(out_ptr0 + static_cast<int64_t>(x1 + 64L*x0));
        }
    }
}
"""


def pointwise(load: str, store: str, *variables: str, numel: int | None = 512) -> str:
    return _POINTWISE.format(
        load=load,
        store=store,
        variables="\n".join(f"    {v}" for v in variables),
        numel="pass" if numel is None else f"xnumel = {numel}",
        numbers="xnumel, ks0, " if numel is None else "xnumel, ",
    )


def reached(found: list[Elements] | None) -> set[int]:
    assert found is not None
    return {
        e.offset + sum(map(int.__mul__, at, e.strides)) for e in found for at in itertools.product(*map(range, e.sizes))
    }


def indices(source: str, kind: str) -> set[int]:
    """What the source's own arithmetic gives, one program at a time."""
    numel = int(re.search(r"xnumel = (\d+)", source)[1])  # type: ignore[index]
    (index,) = re.findall(rf"tl\.{kind}\(\w+ \+ \((.*)\), (?:tmp0, )?xmask\)", source)
    variables = re.findall(r"^    ([xr]\d+) = (.*)$", source, re.MULTILINE)
    found = set()
    for xindex in range(numel):
        scope: dict[str, int] = {"xindex": xindex}
        for name, text in variables:
            scope[name] = eval(text, {}, scope)
        found.add(eval(index, {}, scope))
    return found


class TestKernelRanges(TestCase):
    def test_what_a_condition_reaches_may_be_anything(self) -> None:
        source = pointwise("128 + x0", "x0", "x0 = xindex")
        self.assertIsNotNone(KernelRanges(source).of("in_ptr0", "load", {}))
        conditional = source.replace("(128 + x0), xmask)", "(128 + x0), tmp1 & xmask, other=0.0)")
        self.assertIsNone(KernelRanges(conditional).of("in_ptr0", "load", {}))
        self.assertIsNotNone(KernelRanges(conditional).of("out_ptr0", "store", {}))
        conditional = source.replace("tmp0, xmask)", "tmp0, tmp1 & xmask)")
        self.assertIsNone(KernelRanges(conditional).of("out_ptr0", "store", {}))

    def test_sums_of_variables_are_exact(self) -> None:
        for source in (
            pointwise("256 + x0", "128 + x0", "x0 = xindex"),
            pointwise("x0 + 64*x1", "1 + 2*x0 + 32*x1", "x0 = (xindex % 16)", "x1 = xindex // 16"),
            pointwise(
                "x2", "7 + x0 + 100*x1 + 9*x2", "x0 = (xindex % 4)", "x1 = ((xindex // 4) % 8)", "x2 = xindex // 32"
            ),
            pointwise("2*(x0 // 2)", "(x0 % 8)", "x0 = xindex"),
            pointwise("3 + (x0 // 5)", "x0 + x0", "x0 = xindex", numel=513),
        ):
            ranges = KernelRanges(source)
            for parameter, kind in (("in_ptr0", "load"), ("out_ptr0", "store")):
                found, expected = reached(ranges.of(parameter, kind, {})), indices(source, kind)
                self.assertLessEqual(expected, found)
                if "x0 + x0" not in source or kind == "load":  # one variable twice is taken for two
                    self.assertEqual(found, expected)

    def test_single_element(self) -> None:
        index = "tl.full([XBLOCK], 3, tl.int32).broadcast_to(XBLOCK)"
        ranges = KernelRanges(pointwise("x0", index, "x0 = xindex"))
        self.assertEqual(reached(ranges.of("out_ptr0", "store", {})), {3})
        ranges = KernelRanges(pointwise("x0", index.replace("3", "tmp0"), "x0 = xindex"))
        self.assertIsNone(ranges.of("out_ptr0", "store", {}))

    def test_numbers_of_the_call(self) -> None:
        ranges = KernelRanges(pointwise("x0", "ks0*x1", "x0 = (xindex % 4)", "x1 = xindex // 4", numel=None))
        numbers = {"xnumel": 12, "ks0": 5}
        self.assertEqual(reached(ranges.of("out_ptr0", "store", numbers)), {0, 5, 10})
        self.assertIsNone(ranges.of("out_ptr0", "store", {"xnumel": 12}))

    def test_reduction(self) -> None:
        ranges = KernelRanges(
            """
@triton_heuristics.reduction(size_hints={})
@triton.jit
def triton_red_0(in_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
    xnumel = 3
    r0_numel = 5
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    r0_base = tl.arange(0, R0_BLOCK)[None, :]
    x0 = xindex
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_1 = r0_index
        tmp0 = tl.load(in_ptr0 + (r0_1 + 10*x0), r0_mask & xmask, eviction_policy='evict_first', other=0.0)
    tmp2 = tl.sum(_tmp2, 1)[:, None]
    tl.store(out_ptr0 + (x0), tmp2, xmask)
"""
        )
        self.assertEqual(reached(ranges.of("in_ptr0", "load", {})), {r + 10 * x for r in range(5) for x in range(3)})
        self.assertEqual(reached(ranges.of("out_ptr0", "store", {})), {0, 1, 2})

    def test_anything_else_may_be_everywhere(self) -> None:
        known = pointwise("x0", "x0", "x0 = xindex")
        self.assertIsNotNone(KernelRanges(known).of("out_ptr0", "store", {}))
        for source, why in (
            (known.replace("pointwise", "template"), "a template"),
            (known.replace("pointwise", "user_autotune"), "a kernel of the user's"),
            (known.replace("tl.store(out_ptr0 + (x0)", "tl.store(out_ptr0 + (tmp0)"), "an index from memory"),
            (known.replace("tl.store(out_ptr0 + (x0)", "tl.store(out_ptr0 + (x0 - 8)"), "behind a mask"),
            (known.replace("tl.store", "tl.atomic_add"), "an atomic operation"),
            (known + "    tl.store(tl.make_block_ptr(out_ptr0, [8], [1]), tmp0)\n", "a use besides"),
            (known.replace("x0 = xindex", "x0 = xindex\n    x0 = xindex // 2"), "two definitions"),
            (known.replace("x0 = xindex", "x1 = xindex"), "no definition"),
        ):
            self.assertIsNone(KernelRanges(source).of("out_ptr0", "store", {}), why)
        self.assertEqual(KernelRanges(known).of("in_ptr0", "store", {}), [])

    def test_kernels_of_the_host(self) -> None:
        ranges = HostKernelRanges(_ON_HOST)
        rows = {64 + 128 * x0 + x1 for x0 in range(2) for x1 in range(64)}
        self.assertEqual(reached(ranges.elements("in_ptr0")), rows | {320, 321})
        self.assertEqual(reached(ranges.elements("out_ptr0")), set(range(128)))

    def test_kernels_of_the_host_that_may_reach_everything(self) -> None:
        for old, new, why in (
            ("64L + x1", "tmp0 + x1", "an index from memory"),
            ("64L + x1", "64L + c10::div_floor_integer(x1, 2L)", "an index that isn't a sum"),
            ("64L + x1", "x1 - 64L", "behind a condition"),
            ("auto tmp1 =", "auto tmp2 = in_ptr0; auto tmp1 =", "a use besides"),
            ("for(int64_t x1=static_cast<int64_t>(0L);", "for(int64_t x1=first;", "a loop of another kind"),
        ):
            source = _ON_HOST.replace(old, new)
            self.assertNotEqual(source, _ON_HOST)
            self.assertIsNone(HostKernelRanges(source).elements("in_ptr0"), why)

    @simulated_gpu()
    def test_rows_that_are_left_alone_may_be_read(self) -> None:
        """The caller's stream updates rows of an argument; another one, that waited before, reads others."""
        side = torch.cuda.Stream()

        def fn(x: torch.Tensor, y: torch.Tensor, row: int) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            x[4:20].copy_(y[8:24])
            return x[row : row + 1]

        for row, may in ((3, True), (4, False)):
            torch._dynamo.reset()
            report = check(fn, *(torch.randn(32, 32, device="cuda") for _ in "xy"), row, fullgraph=True)
            self.assertTrue(report.ok, str(report))
            self.assertEqual("after call 1, stream 1 may read output 0" in map(str, report.boundary), may)

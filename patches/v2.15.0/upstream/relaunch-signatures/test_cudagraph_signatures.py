# Owner(s): ["module: inductor"]

from types import SimpleNamespace
from unittest import skipUnless

from torch._inductor.cudagraph_relaunch.signatures import parameters_of, signatures_of
from torch._inductor.runtime.triton_compat import Config
from torch._inductor.runtime.triton_heuristics import StaticTritonCompileResult
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._triton import has_triton_package


SIGNATURE = {
    "in_ptr0": "*fp32",
    "out_ptr0": "*fp32",
    "xnumel": "i32",
    "XBLOCK": "constexpr",
}


class StaticKernel:
    """As much of StaticallyLaunchedTritonKernel as is there without a device."""

    arg_names, declared_constexprs, full_constexprs = list(SIGNATURE), (3,), {3}
    cubin_path, hash, n_regs, n_spills, shared = "there", "0" * 64, 0, 0, 0
    has_global_scratch = has_profile_scratch = False

    def __init__(self, arg_tys="OOi", function=0x10, functions=(), **changes):
        self.arg_tys, self.function, self.functions = arg_tys, function, functions
        vars(self).update(changes)

    def load_kernel(self, device):
        pass

    def run(self, *args):
        pass

    def launcher(self):
        meta = {"device": 0, "device_type": "cuda", "signature": SIGNATURE}
        meta["constants"] = {"XBLOCK": 128}
        config, grid = Config({"XBLOCK": 128}), {"grid_type": "Grid1D"}
        return StaticTritonCompileResult(self, config, meta, grid).make_launcher()


def autotuner(*launchers, kind="POINTWISE", signature=SIGNATURE, mutated=()):
    return SimpleNamespace(
        heuristic_type=SimpleNamespace(name=kind),
        triton_meta={"signature": signature, "constants": {}},
        mutated_arg_names=list(mutated),
        launchers=list(launchers),
    )


def compiled(signature, function=0x10, constants=()):
    """A launcher of Triton's own."""
    source = SimpleNamespace(signature=signature, constants=dict.fromkeys(constants))
    return SimpleNamespace(bin=SimpleNamespace(src=source, function=function))


class TestSignatures(TestCase):
    def found(self, *launchers):
        return signatures_of({"kernel": autotuner(*launchers), "torch": object()})

    def test_static_launcher(self):
        self.assertEqual(self.found(StaticKernel().launcher()), {0x10: "pps"})

    def test_static_launcher_of_several_devices(self):
        kernel = StaticKernel(function=None, functions={0: 0x20, 1: 0x30})
        self.assertEqual(self.found(kernel.launcher()), {0x20: "pps", 0x30: "pps"})

    def test_scratch_of_the_static_launcher(self):
        kernel = StaticKernel(has_global_scratch=True, has_profile_scratch=True)
        self.assertEqual(self.found(kernel.launcher()), {0x10: "ppspp"})

    def test_descriptor_of_the_static_launcher(self):
        self.assertEqual(self.found(StaticKernel("OMi").launcher()), {0x10: "p?s"})

    def test_launcher_of_triton(self):
        self.assertEqual(self.found(compiled(SIGNATURE)), {0x10: "ppspp"})
        made = compiled({"x": "*fp32", "one": "i32", "n": "i32"}, constants=[(1,)])
        self.assertEqual(self.found(made), {0x10: "pspp"})

    def test_what_is_left_out(self):
        descriptor = compiled({"x": "tensordesc<fp16[64, 64]>", "n": "i32"})
        self.assertEqual(self.found(descriptor), {})
        self.assertEqual(self.found(compiled(SIGNATURE, function=None)), {})

    @skipUnless(has_triton_package(), "needs Triton")
    def test_kernel_that_triton_compiled(self):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        types = {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}
        source = ASTSource(copy_kernel(), types, {"BLOCK": 128})
        binary = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        self.assertEqual(self.found(SimpleNamespace(bin=binary)), {}, "not loaded yet")
        binary.function = 0x40
        self.assertEqual(self.found(SimpleNamespace(bin=binary)), {0x40: "pspp"})


class TestParameters(TestCase):
    def found(self, kernel=None, **options):
        launcher = (kernel or StaticKernel()).launcher()
        return parameters_of({"kernel": autotuner(launcher, **options)})

    def test_names_and_mutations(self):
        self.assertEqual(self.found(), {0x10: "rws"})
        self.assertEqual(self.found(mutated=["in_ptr0"]), {0x10: "wws"})
        in_place = {"in_out_ptr0": "*fp32", "ws_ptr": "*u8", "xnumel": "i32"}
        self.assertEqual(self.found(signature=in_place), {0x10: "wws"})

    def test_scratch_is_hidden_memory(self):
        kernel = StaticKernel(has_global_scratch=True)
        self.assertEqual(self.found(kernel), {0x10: "rwsh"})

    def test_kernels_that_inductor_did_not_write(self):
        for kind in ("USER_AUTOTUNE", "TEMPLATE", "SPLIT_SCAN", "FIXED"):
            self.assertEqual(self.found(kind=kind), {})

    def test_declarations_that_differ(self):
        self.assertEqual(self.found(StaticKernel("OiO")), {})


def copy_kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def copy(x, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(x + n + at, tl.load(x + at, mask=at < n), mask=at < n)

    return copy


if __name__ == "__main__":
    run_tests()

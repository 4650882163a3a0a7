"""Hooks that no other test of the patched form's few reaches (`patched_form.py`)."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch._dynamo import graph_bytecode_inputs as upstream
from torch._dynamo.test_case import TestCase
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch.testing._internal.inductor_utils import patch_inductor_backend

import form  # noqa: F401
from torch_overlay.testing import compile_only, simulated_gpu


class Thing:
    pass


@pytest.mark.each_hook
class TestHooks(TestCase):
    def test_upstreams_table_of_objects_keeps_nothing_alive(self) -> None:
        """For bytecode that upstream's prologue is in, and objects that a graph makes."""
        one, other = Thing(), Thing()
        upstream.store_user_object_weakrefs(one)
        self.addCleanup(upstream.reset_user_object_tracking)
        upstream.set_external_object_by_index(1, other)
        found = [upstream.get_external_object_by_index(i) for i in range(2)]
        self.assertEqual(list(map(id, found)), [id(one), id(other)])
        self.assertIs(upstream.stash_graph_created_object(one), one)
        gone = weakref.ref(one)
        upstream.reset_user_object_tracking()
        del one, found
        gc.collect()
        self.assertIsNone(gone())

    def test_download_of_what_another_stream_made_is_waited_for_where_it_is_read(self) -> None:
        with simulated_gpu():
            side = torch.cuda.Stream()

            def fn(x: torch.Tensor) -> torch.Tensor:
                current = torch.cuda.current_stream()
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    y = (x * 2).to("cpu", non_blocking=True)
                side.synchronize()
                return y + 1

            text = compile_only(fn, torch.randn(8, 8, device="cuda")).wrappers[0]
        self.assertEqual(text.count(".synchronize()"), 1, text)

    def test_wrapper_that_a_library_registers_is_planned_too(self) -> None:
        """By `register_backend_for_device`, Inductor's door for code generators."""
        freed: list[object] = []

        class Wrapper(PythonWrapperCodegen):
            @staticmethod
            def create(is_subgraph: bool, *args: Any) -> PythonWrapperCodegen:
                return PythonWrapperCodegen.create(is_subgraph, *args) if is_subgraph else Wrapper()

            def codegen_free(self, buffer: Any) -> None:
                freed.append(buffer)
                super().codegen_free(buffer)

        def text() -> str:
            side = torch.cuda.Stream()

            def fn(x: torch.Tensor) -> torch.Tensor:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    y = x @ x
                torch.cuda.current_stream().wait_stream(side)
                return (x @ y) @ x

            text = compile_only(fn, torch.randn(8, 8, device="cuda")).wrappers[0]
            return text.partition("\n")[2]  # without its number

        with simulated_gpu():
            expected = text()
            torch._dynamo.reset()
            with patch_inductor_backend("cuda", python_wrapper_codegen=Wrapper):
                self.assertEqual(text(), expected)
        self.assertIn("region(", expected)
        self.assertTrue(freed)

    def test_upstreams_own_offloading_compiles(self) -> None:
        options = {"enable_activation_offloading": True, "activation_offload_separate_stream": True}
        with simulated_gpu(), torch._functorch.config.patch(**options):
            weight = torch.randn(64, 64, device="cuda", requires_grad=True)
            seen = compile_only(lambda x: (x @ weight).sin().sum(), torch.randn(64, 64, device="cuda"), backward=True)
        self.assertEqual(len(seen.wrappers), 2)

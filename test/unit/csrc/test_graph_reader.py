"""`csrc/graph_reader.c`: reads a graph, and says why it can't."""

import ctypes
import sys
from unittest import mock

from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from stand_ins import c_module
from torch_overlay._inductor.relaunch.graph import driver as cu
from torch_overlay._inductor.relaunch.graph.driver import Driver
from torch_overlay._inductor.relaunch.graph.read import read
from torch_overlay._inductor.relaunch.proof.nodes import EmptyNode, KernelNode, Unprovable


# Graph 1 has two kernel nodes, between them an empty one; graph 2 has none. Function 7
# has parameters of 8 and 4 bytes, function 8, that of kernel 9, one of 8. A clone has
# the handles of its graph + 1000.
DRIVER = """
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef void *Handle;
typedef struct {
  Handle func;
  unsigned grid[3], block[3], shared_bytes;
  void **arguments, **extra;
  Handle kern, context;
} Kernel;

static char failing[64];
static int hiding, names_asked, destroyed[8], destroyed_count;
static uint64_t pointer = 0xaaaa, packed = 0xbbbb;
static uint32_t number = 5;
static void *arguments[2];
size_t packed_size;
int option;

void reset(void) {
  *failing = hiding = names_asked = destroyed_count = 0;
  packed_size = 8;
  option = 2;
  arguments[0] = &pointer;
  arguments[1] = &number;
}
void hide_parameters(void) { hiding = 1; }
void fail(const char *name) { strcpy(failing, name); }
int asked(void) { return names_asked; }
int is_destroyed(int node) {
  for (int i = 0; i < destroyed_count; i++)
    if (destroyed[i] == node) return 1;
  return 0;
}
static int fails(const char *name) { return strcmp(failing, name) ? 0 : 999; }
static long id(Handle handle) { return (long)handle; }
static Handle handle(long id) { return (Handle)id; }

int cuGetErrorString(int code, const char **text) { *text = "refused"; return 0; }
int cuGraphGetNodes(Handle graph, Handle *node, size_t *count) {
  if (id(graph) > 2 || fails("cuGraphGetNodes")) return 999;
  for (long i = 0; node && i < 3; i++) node[i] = handle(11 + i);
  *count = id(graph) == 1 ? 3 : 0;
  return 0;
}
int cuGraphGetEdges_v2(
    Handle graph, Handle *from, Handle *to, unsigned char *data, size_t *count) {
  static const long edges[3][3] = {{11, 12, 0}, {12, 13, 0}, {11, 13, 1}};
  for (int i = 0; from && i < 3; i++) {
    from[i] = handle(edges[i][0]);
    to[i] = handle(edges[i][1]);
    data[8 * i + 2] = (unsigned char)edges[i][2];
  }
  *count = id(graph) == 1 ? 3 : 0;
  return fails("cuGraphGetEdges");
}
int cuGraphNodeGetType(Handle node, int *kind) {
  *kind = id(node) == 12 ? 5 : 0;
  return fails("cuGraphNodeGetType");
}
int cuGraphKernelNodeGetParams_v2(Handle node, Kernel *out) {
  static void *extra[5];
  *out = (Kernel){handle(7), {2, 3, 4}, {32, 2, 1}, 48, arguments, NULL, NULL, NULL};
  if (id(node) == 13) {
    void *const wanted[5] = {handle(option), &packed_size, handle(1), &packed, NULL};
    memcpy(extra, wanted, sizeof extra);
    *out = (Kernel){NULL, {1, 1, 1}, {8, 1, 1}, 0, NULL, extra, handle(9), handle(3)};
  }
  if (id(node) == 14) out->func = handle(99);
  if (id(node) == 15) arguments[1] = NULL;
  return id(node) > 15 ? 1 : 0;
}
int cuKernelGetFunction(Handle *func, Handle kernel) {
  *func = handle(8);
  return id(kernel) == 9 ? 0 : 1;
}
int cuFuncGetName(const char **name, Handle func) {
  names_asked++;
  *name = id(func) == 7 ? "add" : "packed";
  return id(func) == 99 ? 1 : 0;
}
int cuFuncGetParamInfo(Handle func, size_t index, size_t *offset, size_t *size) {
  if (fails("cuFuncGetParamInfo")) return 999;
  *offset = 8 * index;
  *size = 8 - 4 * index;
  return !hiding && index < (id(func) == 7 ? 2 : 1) ? 0 : 1;
}
int cuGraphNodeFindInClone(Handle *found, Handle node, Handle clone) {
  *found = handle(id(node) + id(clone));
  return fails("cuGraphNodeFindInClone");
}
int cuGraphDestroyNode(Handle node) {
  destroyed[destroyed_count++] = (int)id(node);
  return fails("cuGraphDestroyNode");
}
"""
NO_VALUES = "it has no values as the driver's {} parameters"
ADD = (7, 0, 0, (2, 3, 4), (32, 2, 1), 48, "add", ((0, b"\xaa\xaa" + bytes(6)), (8, b"\5\0\0\0")))
PACKED = (0, 9, 3, (1, 1, 1), (8, 1, 1), 0, "packed", ((0, b"\xbb\xbb" + bytes(6)),))


@c_module.needs_compiler
class TestNativeRead(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        module, cls.library = c_module.build_module(DRIVER)
        cls.fast = module.graph

    def setUp(self):
        super().setUp()
        self.library.reset()
        self.driver = Driver(mock.Mock(), self.fast)

    def set(self, name, value, kind=ctypes.c_int):
        kind.in_dll(self.library, name).value = value

    def refused(self, node):
        (found,) = self.driver.kernels([node])
        return found

    def test_structure(self):
        edges = [(11, 12, True), (12, 13, True), (11, 13, False)]
        wanted = cu.Structure([11, 12, 13], [cu.KERNEL, cu.EMPTY, cu.KERNEL], edges)
        self.assertEqual(self.driver.structure(1), wanted)
        self.assertEqual(self.driver.structure(2), cu.Structure([], [], []))
        self.assertEqual([self.driver.nodes(graph) for graph in (1, 2)], [[11, 12, 13], []])

    def test_kernels(self):
        self.assertEqual(self.driver.kernels([11, 13]), [ADD, PACKED])
        self.assertEqual(self.driver.kernels([]), [])

    def test_kernels_without_parameters(self):
        self.set("packed_size", 0, ctypes.c_size_t)
        self.library.hide_parameters()
        self.assertEqual([kernel[7] for kernel in self.driver.kernels([11, 13])], [(), ()])
        self.set("packed_size", 8, ctypes.c_size_t)
        self.assertEqual(self.refused(13), ("packed", NO_VALUES.format(0)))

    def test_many_calls_keep_nothing(self):
        def calls(count):
            for _ in range(count):
                self.driver.kernels([11, 13, 14])
                self.fast.structure(1)
            return sys.getallocatedblocks()

        calls(20)
        before = calls(20)
        self.assertLess(calls(500) - before, 200)

    def test_function_is_described_once_a_call(self):
        self.assertEqual(self.driver.kernels([11, 13] * 5), [ADD, PACKED] * 5)
        self.assertEqual(self.library.asked(), 2)

    def test_kernels_that_it_cannot_describe(self):
        text = "the driver doesn't describe the kernel: CUDA driver error in {}: refused ({})"
        self.assertEqual(self.driver.kernels([14, 11]), [(None, text.format("cuFuncGetName", 1)), ADD])
        self.assertEqual(self.refused(15), ("add", NO_VALUES.format(2)))
        self.library.fail(b"cuFuncGetParamInfo")
        self.assertEqual(self.refused(13), (None, text.format("cuFuncGetParamInfo", 999)))
        with self.assertRaisesRegex(RuntimeError, "cuGraphKernelNodeGetParams"):
            self.driver.kernels([16])

    def test_packed_block_that_is_too_small(self):
        self.set("packed_size", 7, ctypes.c_size_t)
        self.assertEqual(self.refused(13), ("packed", NO_VALUES.format(1)))

    def test_launch_option_that_is_not_known(self):
        self.set("option", 3)
        self.assertEqual(self.refused(13), ("packed", NO_VALUES.format(1)))

    def test_refusal_names_the_node(self):
        for node, text in ((14, "node 2: the driver doesn't"), (15, r"node 2 \(add\): it has no values")):
            with mock.patch.object(
                self.driver, "kernels", lambda nodes, last=node: self.fast.kernels([nodes[0], last])
            ):
                with self.assertRaisesRegex(Unprovable, text) as context:
                    read(1, (), 0, 1 << 20, driver=self.driver)
                self.assertEqual(context.exception.reason, "layout")

    def test_read(self):
        graph = read(1, (), 0, 1 << 20, driver=self.driver)
        func, kern, ctx, grid, block, shared_bytes, name, parameters = ADD
        add = KernelNode(0, 11, name, func, kern, ctx, grid, block, shared_bytes, parameters)
        self.assertEqual(graph.nodes[:2], (add, EmptyNode(1, 12)))
        self.assertEqual(graph.nodes[2].parameters, PACKED[7])
        self.assertEqual(graph.edges, ((0, 1), (0, 2), (1, 2)))

    def test_part(self):
        with mock.patch.object(self.driver, "clone", return_value=1000):
            self.assertEqual(self.driver.part(1, {11, 13}), (1000, {11: 1011, 13: 1013}))
        destroyed = [n for n in range(1011, 1014) if self.library.is_destroyed(n)]
        self.assertEqual(destroyed, [1012])

    def test_part_that_fails(self):
        for name in ("cuGraphNodeFindInClone", "cuGraphDestroyNode"):
            self.library.fail(name.encode())
            with (
                mock.patch.multiple(
                    self.driver, clone=mock.Mock(return_value=1000), destroy_graph=mock.DEFAULT
                ) as made,
                self.assertRaisesRegex(RuntimeError, rf"{name}: refused \(999\)"),
            ):
                self.driver.part(1, {11, 13})
            made["destroy_graph"].assert_called_once_with(1000)

    def test_structure_that_fails(self):
        for name in ("cuGraphGetNodes", "cuGraphGetEdges", "cuGraphNodeGetType"):
            self.library.fail(name.encode())
            with self.assertRaisesRegex(RuntimeError, rf"{name}: refused \(999\)"):
                self.driver.structure(1)
        with self.assertRaisesRegex(RuntimeError, "cuGraphGetNodes"):
            self.driver.nodes(3)

    def test_arguments_that_make_no_sense(self):
        for call in (
            lambda: self.fast.structure("1"),
            lambda: self.fast.nodes(None),
            lambda: self.fast.kernels(5),
            lambda: self.fast.kernels(["node"]),
            lambda: self.fast.cut(1, 1000, [11]),
        ):
            with self.assertRaises(TypeError):
                call()

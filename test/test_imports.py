"""Modules of the package import each other in one direction only, at their top and inside of functions."""

import ast
from collections.abc import Iterator, Mapping, Set as AbstractSet
from pathlib import Path

import torch.testing._internal.common_utils as common

import form


PACKAGE = "torch_overlay"

# From the bottom to the top: a module may import what stands in its own layer or below. A name stands for a module, or
# for all of a folder that no longer name stands for.
LAYERS = (
    ("errors", "version", "csrc", "notes", "orders", "table", "thread_value"),
    ("config", "_options", "_stream_handling", "_logging", "seams", "hooks", "_functorch.offload.settings"),
    ("plugin", "doors"),
    # The words of FX graphs, and the facts about a node and about a frame.
    ("frame_facts", *(f"_functorch.streams.{name}" for name in ("ids", "tokens", "fx", "facts"))),
    # The objects behind the numbers of streams, and the operators on them. Dynamo's side hands all else that it knows
    # of a frame down as `FrameFacts`.
    ("_dynamo.objects", "_dynamo.ops"),
    ("_functorch.device_peaks", "_functorch.offload"),
    ("_functorch.streams", "upstream_fixes.recorded_views"),
    ("_dynamo",),
    ("upstream_fixes",),
    (
        "_inductor.scheduler_nodes",
        "_inductor.notes",
        "_inductor.graph_results",
        "_inductor.profiler_ranges",
        "_inductor.user_lines",
        "_inductor.kernel_places",
        "_inductor.double_backward",
    ),
    ("_inductor.offload",),
    ("_inductor.streams",),
    ("_inductor.relaunch.causes", "_inductor.relaunch.keys"),
    ("_inductor.relaunch.proof",),
    ("_inductor.relaunch.graph",),
    ("_inductor.relaunch.numbers",),
    ("_inductor.relaunch.memory",),
    ("_inductor.relaunch.launch",),
    ("_inductor.relaunch.capture",),
    ("_inductor.relaunch",),
    ("_inductor",),
    ("testing", "analysis"),
    ("_engine", "seam_table", "_skip_files"),
    ("_cli", "", "__main__", "cudagraphs"),
)


def modules() -> dict[str, Path]:
    """Name of each module below the package -> its file; the package itself is ''."""
    root = form.ROOT / PACKAGE
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, str, bool]]:
    """(module, name or '', inside of a function) of each import that runs; those for type checkers don't."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            yield from ((child.module, alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from ((alias.name, "", inside) for alias in child.names)
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from imports(child, inside or is_function)


def graph(known: Mapping[str, Path], inside: bool) -> dict[str, set[str]]:
    """Module -> the modules that it imports; with `inside`, also those that its functions import."""
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        found[module] = set()
        for source, name, is_inside in imports(ast.parse(path.read_text())):
            if source.partition(".")[0] != PACKAGE or (is_inside and not inside):
                continue
            source = source.removeprefix(PACKAGE).removeprefix(".")
            target = f"{source}.{name}".strip(".") if name else source
            found[module].add(target if target in known else source)
        found[module].discard(module)
    return found


def circles(edges: Mapping[str, AbstractSet[str]]) -> list[set[str]]:
    """Sets of modules each of which imports all others, directly or not."""
    reached: dict[str, set[str]] = {}
    for module in edges:
        seen, todo = set(), [module]
        while todo:
            new = edges.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        reached[module] = seen
    found = []
    for module in sorted(edges):
        circle = {other for other in reached[module] if module in reached.get(other, ())}
        if circle and circle not in found:
            found.append(circle)
    return found


def layer_of(module: str) -> int:
    """Raises KeyError for a module that no layer names."""
    layers = {name: number for number, names in enumerate(LAYERS) for name in names}
    while module and module not in layers:
        module = module.rpartition(".")[0]
        if not module:
            raise KeyError
    return layers[module]


@form.overlay_only
class TestImports(common.TestCase):
    def test_no_circle(self) -> None:
        """When modules are loaded, nor with what functions import."""
        for inside in (False, True):
            self.assertEqual(circles(graph(modules(), inside)), [])

    def test_no_import_from_a_layer_above(self) -> None:
        edges = graph(modules(), inside=True)
        upward = [(a, b) for a, bs in edges.items() for b in bs if b in edges and layer_of(a) < layer_of(b)]
        self.assertEqual(upward, [])
        self.assertLess(layer_of("_functorch.streams.placement"), layer_of("_dynamo.registry"))

    def test_each_module_has_a_layer(self) -> None:
        self.assertEqual([layer_of(module) for module in ("_dynamo.ops", "_dynamo.registry", "")], [4, 7, 23])
        with self.assertRaises(KeyError):
            layer_of("new_folder.module")

    def test_a_circle_is_found(self) -> None:
        self.assertEqual(circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}), [{"a", "b", "c"}])
        self.assertEqual(circles({"a": {"b"}, "b": {"c"}, "c": set()}), [])

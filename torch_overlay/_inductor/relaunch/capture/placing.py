"""Gives each allocation of generated code addresses of its own in a capture, and notes its life."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.capture.allocations import Lives, Observer, storages
from torch_overlay._inductor.relaunch.graph.concurrency import is_product, Product
from torch_overlay._inductor.relaunch.memory.outputs import View
from torch_overlay._inductor.relaunch.numbers.shapes import plain
from torch_overlay._inductor.relaunch.numbers.traced import Escaped


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from torch_overlay._inductor.relaunch.capture.allocations import Plan
    from torch_overlay._inductor.relaunch.numbers.shapes import Shapes


class Placing(Observer):
    """An observer of a capture, in whose `recording` it places allocations: outputs, which the plan names, in `placed`,
    and all others in `scratch`, addresses with their bytes. `with_uses`: note which memory matrix products read and
    write. `shapes` notes sizes that depend on the region's."""

    def __init__(
        self, plan: Plan, recording: Any, placed: dict[int, int], with_uses: bool, shapes: Shapes | None
    ) -> None:
        super().__init__()
        self.plan_, self.recording, self.placed, self.shapes = plan, recording, placed, shapes
        self.lives = Lives()
        self.scratch: dict[int, int] = {}
        self.products: list[Product] | None = [] if with_uses else None
        self.results: list[tuple[int, int]] = []

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.products is None or not is_product(func):
            return func(*args, **kwargs)
        first = self.recording.count()
        result = func(*args, **kwargs)
        writes = storages(result)
        reads = {a: size for a, size in storages((args, kwargs)).items() if a not in writes}
        self.products.append(Product(first, self.recording.count(), tuple(reads.items()), tuple(writes.items())))
        return result

    def note_results(self, number: int, made: Mapping[int, int]) -> None:
        super().note_results(number, made)
        self.results += made.items()

    def allocate(self, original: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        self.lives.tick()
        asked = args
        if self.shapes is not None:
            args = plain(args)
        if len(args) != 3 or 0 in args[0]:
            if self.shapes is not None:
                raise Escaped(frozenset(), "memory of no bytes is allocated")
            return super().allocate(original, *args)
        view = View(tuple(args[0]), tuple(args[1]), args[2])
        made = self.recording.place(view)
        if self.shapes is not None:
            self.shapes.allocated(made, asked[0], asked[1])
        address = made.data_ptr()
        if self.count in self.plan_.allocations:
            self.placed[address] = view.extent
            self.lives.track_output(address)
        else:
            self.scratch[address] = view.extent
            self.lives.begin(made)
        self.note(address)
        return made

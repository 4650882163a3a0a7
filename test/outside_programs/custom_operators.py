"""Custom operators that do what a capture doesn't allow. All compute `sin`."""

from collections.abc import Callable
from typing import Any

import torch

from outside_programs._program import program


KEPT: list[torch.Tensor] = []


def operator(body: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Registers `outside::NAME`, and returns it."""
    made = torch.library.custom_op(f"outside::{body.__name__}", body, mutates_args=())
    made.register_fake(torch.empty_like)
    return made


@operator
def waits(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    return x.sin()


@operator
def waits_for_its_stream(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch.cuda.current_stream().synchronize()
    return y


@operator
def reads(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if x[0, 0].item() < 100 else x


@operator
def downloads(x: torch.Tensor) -> torch.Tensor:
    x.cpu()
    return x.sin()


@operator
def uploads_a_list(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * torch.tensor([1.0] * 128, device=x.device)


@operator
def prints(x: torch.Tensor) -> torch.Tensor:
    str(x)
    return x.sin()


@operator
def selects_by_mask(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 0 * x[x > 0].sum()


@operator
def launches_on_the_default_stream(x: torch.Tensor) -> torch.Tensor:
    with torch.cuda.stream(torch.cuda.default_stream()):
        return x.sin()


@operator
def forks_and_joins(x: torch.Tensor) -> torch.Tensor:
    """What is right: its own stream, in order."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x.sin()
    torch.cuda.current_stream().wait_stream(side)
    y.record_stream(torch.cuda.current_stream())
    return y


@operator
def asks_an_event(x: torch.Tensor) -> torch.Tensor:
    event = torch.cuda.Event()
    event.record()
    event.query()
    return x.sin()


@operator
def waits_for_an_event(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    return y


@operator
def asks_its_stream(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.current_stream().query()
    return x.sin()


@operator
def pins_memory(x: torch.Tensor) -> torch.Tensor:
    torch.empty(1 << 20, pin_memory=True)
    return x.sin()


@operator
def empties_the_cache(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.empty_cache()
    return x.sin()


@operator
def keeps_its_result(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    KEPT[:] = [y * 2]
    return y


@operator
def plain(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def fixed(x: Any, w: Any) -> Any:
    y = torch.ops.outside.plain(x @ w)
    return (y @ w).cos()


def between_products(made: Any, **fields: Any) -> None:
    """A program that calls the operator between two products."""

    def body(x: Any, w: Any) -> Any:
        y = made(x @ w)  # outside: split-failed *
        return (y @ w).cos()

    body.__name__ = made._name
    program(fixed=fixed, operator=f"outside::{made._name}.default", compiled_at_once=False, **fields)(body)


FAILING = (
    waits,
    waits_for_its_stream,
    reads,
    downloads,
    uploads_a_list,
    prints,
    selects_by_mask,
    launches_on_the_default_stream,
    asks_an_event,
    waits_for_an_event,
    asks_its_stream,
)
for each in FAILING:
    between_products(each)


@program(compiled_at_once=False)
def what_a_capture_allows(x, w):
    y = forks_and_joins(x @ w)
    y = pins_memory(y) + empties_the_cache(y)
    return (y @ w).cos()


@program(region="kept", fixed=fixed, compiled_at_once=False)
def keeps_memory(x, w):
    y = keeps_its_result(x @ w)
    return (y @ w).cos()


def neither(x: Any, w: Any) -> Any:
    y = torch.ops.outside.plain(x @ w)
    z = torch.ops.outside.plain(y @ w)
    return (z @ w).cos()


@program(fixed=neither, compiled_at_once=False)
def two_that_fail(x, w):
    y = waits(x @ w)  # outside: split-failed outside::waits.default
    z = downloads(y @ w)  # outside: split-failed outside::downloads.default
    return (z @ w).cos()

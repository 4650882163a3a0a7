"""Custom operators that the programs call: a kernel that takes long, and operators as libraries write them."""

import torch


SLEEP_CYCLES = 1_000_000  # about half a millisecond
stretch = 1.0  # of what is slept from now on; a captured graph keeps what it was captured with


@torch.library.custom_op("overlay_test::sleep", mutates_args=())
def sleep(x: torch.Tensor, cycles: int) -> torch.Tensor:
    """Keep the current stream busy, then copy."""
    if x.is_cuda:
        torch.cuda._sleep(int(cycles * stretch))
    return x.clone()


@sleep.register_fake
def _(x: torch.Tensor, cycles: int) -> torch.Tensor:
    return torch.empty_like(x)


sleep.register_autograd(
    lambda ctx, gradient: (torch.ops.overlay_test.sleep(gradient, ctx.cycles), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "cycles", inputs[1]),
)


def asleep(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.overlay_test.sleep(x, SLEEP_CYCLES)


def awake(x: torch.Tensor) -> torch.Tensor:
    return x


@torch.library.custom_op("overlay_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("overlay_test::both", mutates_args=())
def both(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [x + x, y + y]


@both.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x), torch.empty_like(y)]


@torch.library.custom_op("overlay_test::add_to", mutates_args={"target"})
def add_to(target: torch.Tensor, x: torch.Tensor) -> None:
    target.add_(x)


@torch.library.custom_op("overlay_test::double_on", mutates_args=())
def double_on(x: torch.Tensor, handle: int) -> torch.Tensor:
    """What a kernel library does that is handed a raw stream: launch there, whatever stream is current."""
    if not x.is_cuda:
        return x + x
    with torch.cuda.stream(torch.cuda.ExternalStream(handle, device=x.device)):
        return x + x


@double_on.register_fake
def _(x: torch.Tensor, handle: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("overlay_test::copy_to_host", mutates_args={"host"})
def copy_to_host(x: torch.Tensor, host: torch.Tensor) -> None:
    """An asynchronous copy to memory of the caller."""
    host.copy_(x, non_blocking=True)

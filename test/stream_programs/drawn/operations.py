"""What a drawn program computes: operators as text, and what the writer has to know of each.

Values are whole numbers, and stay small, so that results are exact in any order of summation. `bound` limits what an
operator makes of operands with given bounds, `gain` by how much a gradient grows on its way back. `saves` says what
autograd keeps for the backward: o the operands, r the result; what it keeps must not be written in place.

A value is of a kind: r is real, c complex, l a list of real tensors, i the bits of a real tensor. `takes` has the kinds
of the operands, `gives` that of the result. The shape of a list is the tuple of its tensors' shapes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


SIZE = 32
FULL = (SIZE, SIZE)
LOADED = ("x", "y", "state", "z")  # arguments that the caller may fill on a side stream


def same(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of operands that are broadcast."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    sizes = [max(sizes) for sizes in zip(*padded)]
    if any(s not in (1, size) for shape in padded for s, size in zip(shape, sizes)):
        return None
    return tuple(sizes)


def full(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    return FULL if all(s == FULL for s in shapes) else None


def always(shape: tuple[int, ...]) -> Callable[..., tuple[int, ...] | None]:
    return lambda *shapes: shape if all(s == FULL for s in shapes) else None


@dataclass(frozen=True)
class Operation:
    text: str
    arity: int = 1
    shape: Callable[..., tuple[Any, ...] | None] = same
    bound: Callable[..., float] = lambda *bounds: sum(bounds)
    gain: float = 1.0
    saves: str = ""
    gradient: bool = True  # does the result carry one?
    weight: bool = False
    random: bool = False
    rows: bool = True  # laid out by rows, if its operands are
    is_complex: bool = False  # a view of complex memory
    takes: str = "rr"
    gives: str = "r"


def largest(*bounds: float) -> float:
    return max(bounds)


def fixed(bound: float) -> Callable[..., float]:
    return lambda *bounds: bound


def listed(*shapes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The shape of a list of the operands."""
    return shapes


def alike(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    return shapes[0] if len(set(shapes)) == 1 else None


def stacked(shape: tuple[tuple[int, ...], ...]) -> tuple[int, ...] | None:
    """The shape of each tensor of a list, if it is one."""
    return alike(*shape)


OPERATIONS = (
    Operation("{a} + {b}", 2),
    Operation("{a} + 1", bound=lambda a: a + 1),
    Operation("{a} * 2", bound=lambda a: 2 * a, gain=2),
    Operation("sleep({a}) + {b}", 2),
    Operation("sleep({a}) * 3", bound=lambda a: 3 * a, gain=3),
    Operation("{a} @ {w}", 1, full, lambda a: 2 * a, 2, "o", weight=True),
    Operation("sleep({a}) @ {w}", 1, full, lambda a: 2 * a, 2, "o", weight=True),
    Operation("{a}.relu()", bound=largest, saves="r"),
    Operation("{a}.clamp(-1, 1) * {b}", 2, bound=lambda a, b: b, gain=32, saves="o"),
    Operation("{a} - {b}", 2),
    Operation("{a}.sum(0, keepdim=True)", 1, always((1, SIZE)), lambda a: SIZE * a),
    Operation("{a}.sum(1, keepdim=True)", 1, always((SIZE, 1)), lambda a: SIZE * a),
    Operation("{a}.sum()", 1, always(()), lambda a: SIZE * SIZE * a),
    Operation("{a}.detach().amax(1, keepdim=True)", 1, always((SIZE, 1)), largest, gradient=False),
    Operation("torch.cat([{a}, {b}])[16:48]", 2, full, largest),
    Operation("torch.where({a} > 0, {a}, {b})", 2, bound=largest, saves="o"),
    Operation("({a} > 0).float()", bound=fixed(1), gradient=False),
    Operation("{a}.clamp(-1, 1) @ {b}.sign()", 2, full, fixed(SIZE), SIZE, "o"),
    # `contiguous` of what is transposed twice is no copy.
    Operation("{a}.t().clone(memory_format=torch.contiguous_format)", 1, full, largest),
    Operation("F.dropout({a}, 0.5)", bound=lambda a: 2 * a, gain=2, saves="r", random=True),
    Operation('torch.ones(32, 32, device="cuda")', 0, lambda: FULL, fixed(1), gradient=False),
    Operation("torch.zeros_like({a})", bound=fixed(0), gradient=False),
    Operation("double({a}.detach())", bound=lambda a: 2 * a, gradient=False),
    Operation("{a}.cumsum(0)", 1, full, lambda a: SIZE * a, SIZE),
    Operation("{a}.clone()", bound=largest),
    Operation("{a}.permute(1, 0) * 2", 1, full, lambda a: 2 * a, 2, rows=False),
    Operation("torch.complex({a}, {b})", 2, full, largest, gives="c"),
    Operation("{a} + {b}", 2, takes="cc", gives="c"),
    Operation("{a} * {b}", 2, same, lambda a, b: 2 * a * b, 128, "o", takes="cc", gives="c"),
    Operation("{a}.conj() * 2", 1, same, lambda a: 2 * a, 2, takes="c", gives="c"),
    Operation(
        "({a} * {b}.conj()).real", 2, same, lambda a, b: 2 * a * b, 128, "o", rows=False, is_complex=True, takes="cc"
    ),
    Operation("torch.view_as_real({a} * 2).sum(-1)", 1, same, lambda a: 4 * a, 4, takes="c"),
    Operation("{a}.real - {a}.imag", 1, same, lambda a: 2 * a, 2, takes="c"),
    Operation("(({a} & 0x7FFFFFFF) > 0).float()", bound=fixed(1), gradient=False, takes="i"),
    Operation("torch._foreach_add([{a}, {b}], 1)", 2, listed, lambda *bounds: max(bounds) + 1, saves="o", gives="l"),
    Operation("torch._foreach_mul({a}, 2)", 1, alike, lambda a: 2 * a, 2, "o", takes="l", gives="l"),
    Operation("torch._foreach_add({a}, {b})", 2, alike, saves="o", takes="ll", gives="l"),
    Operation("torch.stack([*{a}]).sum(0)", 1, stacked, lambda a: 3 * a, takes="l"),
    Operation(
        "both({a}.detach(), {b}.detach())", 2, listed, lambda *bounds: 2 * max(bounds), gradient=False, gives="l"
    ),
)


@dataclass(frozen=True)
class InPlace:
    """An update of {a}, a matrix or a view of one; {b} is broadcast to it."""

    text: str
    arity: int
    bound: Callable[..., float]
    reads: bool = True  # its own value
    chains: bool = True  # returns what it writes
    gradient: bool = False  # may {a} be one that carries a gradient?
    takes: str = "rr"


UPDATES = (
    InPlace("{a}.add_({b})", 2, lambda a, b: a + b, gradient=True),
    InPlace("{a}.mul_(2)", 1, lambda a: 2 * a, gradient=True),
    InPlace("{a}.copy_({b})", 2, largest, reads=False),
    InPlace("{a}.zero_()", 1, fixed(0), reads=False),
    InPlace("{a}.clamp_(-2, 2)", 1, lambda a: min(a, 2)),
    InPlace("{a}[1:9] = 3", 1, lambda a: max(a, 3), chains=False),
    InPlace("{a}[:, ::2].add_({b}[:, ::2])", 2, lambda a, b: a + b, chains=False),
    InPlace("{a}[4:20].copy_({b}[8:24])", 2, largest, chains=False),
    InPlace("add_to({a}, {b})", 2, lambda a, b: a + b, chains=False),
    InPlace("torch.add({a}, {b}, out={a})", 2, lambda a, b: a + b, chains=False),
    InPlace("{a}.relu_()", 1, largest),
    InPlace("scaled_into({a}, {a}, 2)", 1, lambda a: 2 * a, chains=False),
    InPlace("scaled_into({a}, {b}.contiguous(), 2)", 2, lambda a, b: 2 * b, reads=False, chains=False),
    InPlace("{a}[1:9][:, 2:5].mul_(2)", 1, lambda a: 2 * a, chains=False),
    InPlace("{a}[0, 0].sub_({b}[1, 1]).mul_(2)", 2, lambda a, b: 2 * (a + b), chains=False),
    InPlace("{a}[:, 2][3:9] += {b}[3:9, 0]", 2, lambda a, b: a + b, chains=False),
    InPlace("{a}[4][::2] = {b}[5][1::2]", 2, largest, chains=False),
    InPlace("torch.maximum({a}, {b}, out={a})", 2, largest, chains=False),
    InPlace("torch.cat([{b}[:16], {b}[16:]], out={a})", 2, largest, reads=False, chains=False),
    InPlace("{a}.mul_(2)", 1, lambda a: 2 * a, gradient=True, takes="c"),
    InPlace("{a}.add_({b})", 2, lambda a, b: a + b, gradient=True, takes="cc"),
    InPlace("{a}.copy_({b})", 2, largest, reads=False, takes="cc"),
    InPlace("{a}.real.add_({b})", 2, lambda a, b: a + b, chains=False, takes="cr"),
    InPlace("torch.view_as_real({a}).mul_(2)", 1, lambda a: 2 * a, chains=False, takes="c"),
    InPlace("torch.mul({b}, 2, out={a})", 2, lambda a, b: 2 * b, reads=False, chains=False, takes="cc"),
    InPlace("torch.complex({b}, {b}, out={a})", 2, largest, reads=False, chains=False, takes="cr"),
    InPlace("torch._foreach_sub_({a}, 1)", 1, lambda a: a + 1, chains=False, takes="l"),
    InPlace("torch._foreach_mul_({a}, 2)", 1, lambda a: 2 * a, chains=False, takes="l"),
    InPlace("torch._foreach_add_({a}, {b})", 2, lambda a, b: a + b, chains=False, takes="ll"),
    InPlace("torch._foreach_copy_({a}, {b})", 2, largest, reads=False, chains=False, takes="ll"),
    InPlace("{a}.zero_()", 1, fixed(0), reads=False, takes="i"),
)

# What brings an updated value back into its bounds.
CLAMPS = {
    "r": ("{a}.clamp_(-2, 2)",),
    "c": ("{a}.real.clamp_(-2, 2)", "{a}.imag.clamp_(-2, 2)"),
    "l": ("torch._foreach_clamp_max_({a}, 2)", "torch._foreach_clamp_min_({a}, -2)"),
}

# Who writes first, and wholly, what `empty_like` has allocated.
FILLS = ("scaled_into({a}, {b}.contiguous(), 2)", "{a}.copy_({b} * 2)", "torch.mul({b}, 2, out={a})")


@dataclass(frozen=True)
class View:
    """A view of a matrix, or of any list; where `shape` is none, of the shape that it makes of the list's."""

    text: str
    shape: tuple[Any, ...] | None
    takes: str = "r"
    gives: str = "r"
    rows: bool = True  # laid out by rows, if the matrix is
    whole: bool = False  # of a matrix that is laid out by rows, and no view


VIEWS = (
    View("{a}.t()", FULL, rows=False),
    View("{a}.view(16, 64)", (16, 64)),
    View("{a}[1:]", (31, SIZE)),
    View("{a}[:, 1:]", (SIZE, 31)),
    View("{a}[8:24]", (16, SIZE)),
    View("{a}[:, ::2]", (SIZE, 16)),
    View("{a}[3:4]", (1, SIZE)),
    View("{a}[:, 5:6]", (SIZE, 1)),
    View("{a}.view(32, 32)", FULL),
    View("{a}.permute(1, 0)", FULL, rows=False),
    View("{a}.unbind(0)[3]", (SIZE,)),
    View("{a}.unbind(1)[4]", (SIZE,), rows=False),
    View("{a}.split(16)", ((16, SIZE),) * 2, gives="l"),
    View("{a}.chunk(2, 1)", ((SIZE, 16),) * 2, gives="l"),
    View("{a}.unbind(0)[1:4]", ((SIZE,),) * 3, gives="l"),
    View("{a}[1]", None, "l"),
    View("{a}.view(torch.int32)", FULL, gives="i"),
    View("{a}.view(torch.float32)", FULL, "i"),
    View("torch.view_as_complex({a}.view(32, 16, 2))", (SIZE, 16), gives="c", whole=True),
    View("torch.view_as_real({a})", (SIZE, SIZE, 2), "c", rows=False),
    View("{a}.real", FULL, "c", rows=False),
    View("{a}.imag", FULL, "c", rows=False),
    View("{a}.conj()", FULL, "c", "c"),
    View("{a}.mH", FULL, "c", "c", rows=False),
    View("{a}[:, 1:]", (SIZE, 31), "c", "c"),
)

# What wide programs draw from as well. Their values are not exact, so they are compiled only.
MORE_OPERATIONS = (
    Operation("torch.softmax({a}, 1)", 1, full, largest, saves="r"),
    Operation("F.layer_norm({a}, (32,))", 1, full, largest, saves="o"),
    Operation("torch.stack([{a}, {b}]).sum(0)", 2, full),
    Operation("torch.sort({a}, 1)[0]", 1, full, largest),
    Operation("{a}.topk(32, 1).values", 1, full, largest),
    Operation("torch.split({a}, 16)[1].repeat(2, 1)", 1, full, largest),
    Operation("{a}.chunk(2, 1)[0].repeat(1, 2)", 1, full, largest),
    Operation("torch.var_mean({a}, 1, keepdim=True)[0]", 1, always((SIZE, 1)), largest, saves="o"),
    Operation("{a}.index_select(0, torch.arange(31, -1, -1, device='cuda'))", 1, full, largest),
    Operation("{a}.gather(1, ({b} > 0).long())", 2, full, largest),
    Operation("{a}.half().float()", bound=largest),
    Operation("{a}.double().float()", bound=largest),
    Operation("{a}.expand(2, 32, 32).sum(0)", 1, full),
    Operation("{a}.flip(0)", 1, full, largest),
    Operation("{a}.roll(1, 0)", 1, full, largest),
    Operation("F.pad({a}, (1, 1))[:, 1:33]", 1, full, largest, rows=False),
    Operation(
        "F.conv2d({a}.view(1, 1, 32, 32), torch.ones(1, 1, 3, 3, device='cuda'), padding=1).view(32, 32)",
        1,
        full,
        largest,
        saves="o",
    ),
    Operation("torch.addmm({a}, {b}, {b})", 2, full, largest, saves="o"),
    Operation("torch.bmm({a}.view(1, 32, 32), {b}.view(1, 32, 32)).view(32, 32)", 2, full, largest, saves="o"),
    Operation("{a}.masked_fill({b} > 0, 0)", 2, full, largest),
    Operation("torch._foreach_add([{a}, {b}], 1)[0]", 2, full, largest, saves="o"),
    Operation("torch._foreach_mul([{a}, {b}], 2)[1]", 2, full, largest, saves="o"),
    Operation("torch.tril({a})", 1, full, largest),
    Operation("{a}.diag().expand(32, 32).clone()", 1, full, largest),
    Operation("torch.randn_like({a})", bound=largest, gradient=False, random=True),
    Operation("{a}.max(1, keepdim=True)[0]", 1, always((SIZE, 1)), largest),
    Operation("torch.logsumexp({a}, 1, keepdim=True)", 1, always((SIZE, 1)), largest, saves="or"),
    Operation("torch.einsum('ij,kj->ik', {a}, {b})", 2, full, largest, saves="o"),
    Operation("torch.view_as_real(torch.complex({a}, {b}))[..., 0]", 2, full, largest, rows=False, is_complex=True),
    Operation(
        "torch.nonzero_static({a}, size=32).float().sum(1, keepdim=True)", 1, always((SIZE, 1)), largest, gradient=False
    ),
    Operation("torch.cdist({a}, {b})", 2, full, largest, saves="or"),
    Operation("torch.empty_like({a}).fill_(2)", bound=largest, gradient=False),
    Operation("torch.full((32, 32), 3.0, device='cuda')", 0, lambda: FULL, fixed(3), gradient=False),
    Operation(
        "F.scaled_dot_product_attention({a}[None, None], {b}[None, None], {a}[None, None])[0, 0]",
        2,
        full,
        largest,
        saves="or",
    ),
    Operation("{a}.sigmoid() * {a}.tanh()", bound=largest, saves="o"),
    Operation("torch.addcmul({a}, {b}, {b})", 2, bound=largest, saves="o"),
    Operation("torch.fft.fft({a})", 1, full, fixed(64), 32, gives="c"),
    Operation("torch.fft.ifft({a}).real", 1, full, largest, rows=False, is_complex=True, takes="c"),
    Operation("torch.polar({a}, {b})", 2, full, largest, 64, "or", gives="c"),
    Operation("{a}.abs()", 1, same, lambda a: 2 * a, saves="or", takes="c"),
    Operation("({a} @ {b}.mH).imag", 2, full, fixed(64), 128, "o", rows=False, is_complex=True, takes="cc"),
    Operation("torch._foreach_lerp({a}, {b}, 0.5)", 2, alike, largest, saves="o", takes="ll", gives="l"),
    Operation("torch._foreach_norm({a})", 1, lambda s: ((),) * len(s), largest, saves="or", takes="l", gives="l"),
    Operation('F.cross_entropy({a}, torch.zeros(32, dtype=torch.long, device="cuda"))', 1, always(()), largest),
)

MORE_UPDATES = (
    InPlace("{a}.index_add_(0, torch.arange({a}.shape[0], device='cuda'), {a} * 2)", 1, largest, chains=False),
    InPlace("{a}.masked_fill_({a} > 0, 1)", 1, largest),
    InPlace("{a}.scatter_(1, torch.zeros(1, 1, device='cuda', dtype=torch.long), 1.0)", 1, largest),
    InPlace("{a}[torch.arange(0, 2, device='cuda') * 0] = 1", 1, largest, chains=False),
    InPlace("{a}.normal_()", 1, largest, reads=False),
    InPlace("torch._foreach_add_([{a}], 1)", 1, largest, chains=False),
    InPlace("torch._foreach_mul_([{a}], 2)", 1, largest, chains=False),
    InPlace("{a}.lerp_({b}.expand_as({a}), 0.5)", 2, largest),
    InPlace("{a}.addcmul_({b}, {b})", 2, largest),
    InPlace("{a}[{a} > 0] = 1", 1, largest, chains=False),
    InPlace("torch.neg({a}, out={a})", 1, largest, chains=False),
    InPlace("{a}.sub_({b}).mul_(2)", 2, largest),
    InPlace("{a}.data.add_(1)", 1, largest, chains=False),
    InPlace("{a}.fill_(2)", 1, fixed(2), reads=False),
    InPlace("{a}.bernoulli_(0.5)", 1, fixed(1), reads=False),
    InPlace("{a}.cumsum_(0)", 1, largest),
    InPlace("{a}.clamp_min_(0)", 1, largest),
    InPlace("{a}[2:20].diagonal()[3:9].mul_(2)", 1, largest, chains=False),
    InPlace("{a}[3].index_put_((torch.arange(4, device='cuda') * 2,), {b}[6, :4])", 2, largest, chains=False),
    InPlace("{a}[1][{a}[2] > 0] = 1", 1, largest, chains=False),
    InPlace("{a}[5:9].copy_({a}[6:10].clone())", 1, largest, chains=False),
    InPlace("{a}.t()[1:3][:, 4].add_(1)", 1, largest, chains=False),
    InPlace("torch.fft.fft({b}, out={a})", 2, largest, reads=False, chains=False, takes="cr"),
    InPlace("torch.fft.fft({b}, out={a})", 2, largest, reads=False, chains=False, takes="cc"),
    InPlace("torch.cumsum({b}, 0, out={a})", 2, largest, reads=False, chains=False),
    InPlace("torch.matmul({b}, {b}, out={a})", 2, largest, reads=False, chains=False),
    InPlace("{a}.conj_physical_()", 1, largest, takes="c"),
    InPlace("torch._foreach_lerp_({a}, {b}, 0.5)", 2, largest, chains=False, takes="ll"),
    InPlace("torch._foreach_addcmul_({a}, {b}, {b})", 2, largest, chains=False, takes="ll"),
    InPlace("torch._foreach_sqrt_({a})", 1, largest, chains=False, takes="l"),
)

MORE_VIEWS = (
    View("{a}.split(16)[0]", (16, SIZE)),
    View("{a}.chunk(2, 1)[1]", (SIZE, 16)),
    View("{a}.narrow(0, 2, 20)", (20, SIZE)),
    View("{a}.unbind(0)[3].view(1, 32)", (1, SIZE)),
    View("{a}.select(1, 4).unsqueeze(1)", (SIZE, 1)),
    View("{a}.reshape(64, 16)", (64, 16)),
    View("{a}.diagonal(1)", (31,)),
    View("{a}.squeeze()", FULL),
    View("{a}.diagonal().unsqueeze(0)", (1, SIZE)),
    View("{a}.unflatten(0, (2, 16))[1]", (16, SIZE)),
)

"""Chooses the inputs of a region that are in the key of a call: those that are not tensors on the device.

Seeds of attention are in no key, whether they are on the host or on the device: Note [Seeds of attention] of
`attention_seeds`.

Note [Numbers that are parameters]
A number that no tensor's size or stride depends on is left out of the key: the graph computes with the number of each
launch (`numbers`). If a capture shows that the region uses the number for anything else, the number is put into the key
(`kept`), and the region begins anew.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch import Tensor

from torch_overlay._inductor.relaunch import attention_seeds, keys
from torch_overlay._inductor.relaunch.capture import capture
from torch_overlay._inductor.relaunch.numbers.traced import NUMBERS
from torch_overlay._inductor.relaunch.refusals import log


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch_overlay._inductor.relaunch.compiled_code import Code


class CallKeys:
    """Positions of the inputs that are in a key (`keyed`: numbers, then `scalars`, tensors in host memory), and of
    those that are in none: `seeds` of attention, and `free` numbers. `kept`: numbers that had to be put into the key,
    and why. `key_of` makes the key of a call; None before the first call."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.key_of: Callable[[Sequence[Any]], Any] | None = None
        self.keyed: tuple[int, ...] = ()
        self.scalars: frozenset[int] = frozenset()
        self.seeds: frozenset[int] = frozenset()
        self.free: tuple[int, ...] = ()
        self.kept: dict[int, str] = {}

    def choose(self, inputs: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
        """Choose by the inputs of the first call, and return `key_of`."""
        could_be = {range(len(inputs))[k] for k in self.code.numbers}.difference(self.kept)
        self.free = tuple([k for k in sorted(could_be) if type(inputs[k]) in NUMBERS])
        left_out = self.seeds.union(self.free)
        others = [k for k, value in enumerate(inputs) if not capture.is_region(value) and k not in left_out]
        self.scalars = frozenset([k for k in others if isinstance(inputs[k], Tensor)])
        return self._key(others)

    def _key(self, positions: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
        numbers, scalars = ([k for k in positions if (k in self.scalars) is among] for among in (False, True))
        self.keyed, self.key_of = (*numbers, *scalars), (key_of := keys.key_of(numbers, scalars))
        return key_of

    def drop_seeds(self, key: Any) -> Any:
        """Take seeds out of the key, and return what this key of a call has become."""
        kept = [i for i, k in enumerate(self.keyed) if k not in self.seeds]
        positions = [self.keyed[i] for i in kept]
        self.scalars = self.scalars.intersection(positions)
        self._key(positions)
        return tuple([key[i] for i in kept])

    def place_seeds(self, inputs: list[Any], device: Any) -> None:
        """Move seeds to the device that are in host memory because the forward ran as compiled."""
        on_host = [k for k in self.seeds if not capture.is_region(inputs[k])]
        if on_host and not device.is_capturing():
            for k in on_host:
                inputs[k] = attention_seeds.to_device(inputs[k], device.device)

    def keep(self, positions: Collection[int], why: str) -> None:
        """Put free numbers into the key of the next calls, all of them if it is not known which."""
        for k in (positions := positions or self.free):
            log.info("%s: each value of the number at input %d gets a graph of its own: %s", self.code.name, k, why)
        self.kept |= dict.fromkeys(positions, why)
        self.key_of = None

"""Which elements a C++ kernel that Inductor generated loads and stores, from its source.

    for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(64L); x0+=static_cast<int64_t>(8L))
        ... tmp1.store(out_ptr0 + static_cast<int64_t>(320L + x0));

stores 64 elements from element 320 on. As in `kernel_ranges`, indices that are sums of multiples of loop variables are
understood; a parameter that is used in any other way may be touched everywhere. A row of pinned memory may be read
while a copy fills another one.
"""

from __future__ import annotations

import re

from torch_overlay.analysis.race_check.kernel_ranges import _NotLinear, _parsed, Elements, KernelRanges


_LOOP = re.compile(r"for\(int64_t (\w+)=static_cast<int64_t>\((\d+)L\); \1<static_cast<int64_t>\((\d+)L\);")
_ANY_LOOP = re.compile(r"for ?\((?:\w+ )?(\w+) ?=")
_ACCESS = re.compile(r"\b(\w+_ptr\d+)(?: \+ |\[)static_cast<int64_t>\(([^()]*)\)")


class HostKernelRanges(KernelRanges):
    """`elements` of a parameter of the kernel; None: it may be everything."""

    def __init__(self, source: str) -> None:
        self.accesses, self.definitions = {}, {}
        body = source.partition("\n{\n")[2]
        self.loops: dict[str, Elements] = {}
        ends: dict[str, list[int]] = {}
        for name, first, last in _LOOP.findall(body):
            ends.setdefault(name, []).extend((int(first), int(last)))
        for name, numbers in ends.items():
            self.loops[name] = Elements(min(numbers), (max(numbers) - min(numbers),), (1,))
        for name in _ANY_LOOP.findall(_LOOP.sub("", body)):
            self.loops.pop(name, None)
        self.indices: dict[str, list[str]] = {}
        for parameter, index in _ACCESS.findall(body):
            self.indices.setdefault(parameter, []).append(re.sub(r"(\d)L\b", r"\1", index))
        for parameter, found in list(self.indices.items()):
            if len(re.findall(rf"\b{parameter}\b", body)) != len(found):
                del self.indices[parameter]

    def elements(self, parameter: str) -> list[Elements] | None:
        if parameter not in self.indices:
            return None
        try:
            found = [self._read(_parsed(index), dict(self.loops)) for index in self.indices[parameter]]
        except (_NotLinear, SyntaxError, RecursionError):
            return None
        return None if any(e.offset < 0 or min(e.strides, default=0) < 0 for e in found) else found


__all__ = ["HostKernelRanges"]

"""Remembers operators that a CUDA graph can't hold, and has the code that calls them compiled again without them.

Note [Operators in which a capture failed]
An operator of a library may synchronise, launch on another stream, or allocate on its own: nothing says so before a
capture of it fails. Then the operator's name is kept, in this process and beside Inductor's cache. Code with such an
operator is partitioned at it, like code with an operator that Inductor knows to be unsafe: it runs between two graphs.
The frame in which it was found is compiled again at its next call, for the code that there is has no such partition;
for that, its entry among Dynamo's compiled code is invalidated, as if an object that it depends on had been deleted.
Such entries count towards Dynamo's limit, beyond which it compiles a frame no more: one place is left free.

Names are enough. What an operator does may depend on its arguments, but no later process should have to find out at
which call it fails.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import uuid
from collections import Counter
from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.runners import on_reset


if TYPE_CHECKING:
    from collections.abc import Mapping

MOST = 8  # times that a frame is compiled again; where more operators fail, it runs without a graph
FILE = "cudagraph_failed_operators.json"

log = logging.getLogger(__name__)

_failed: dict[tuple[bool, str | None], dict[str, str]] = {}  # where it is kept -> operator -> what failed
_frames: Counter[Any] = Counter()  # Dynamo's number of a frame -> how often it was compiled again
_lock = threading.RLock()


def _path() -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return os.path.join(cache_dir(), FILE)


def _place() -> tuple[bool, str | None]:
    """Return what decides where it is kept, without a look at the disk: `failed` is asked for each node of a graph."""
    import torch._inductor.config as inductor_config

    return inductor_config.force_disable_caches, os.environ.get("TORCHINDUCTOR_CACHE_DIR")


def failed() -> Mapping[str, str]:
    """Return the operators, by the names of their overloads ("mylib::op.default"), with what failed in each."""
    import torch._inductor.config as inductor_config

    with _lock:
        if (place := _place()) not in _failed:
            _failed[place] = {} if inductor_config.force_disable_caches else _read(_path())
        return _failed[place]


def _read(path: str) -> dict[str, str]:
    """Return what a file has, or nothing if it can't be read or is another version's."""
    import torch

    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError):
        with open(path, encoding="utf-8") as file:
            read = json.load(file)
        if read["torch"] == torch.__version__:
            return {str(name): str(why) for name, why in read["operators"].items()}
    return {}


def remember(operator: str, why: str, lasting: bool = True) -> None:
    """Keep the operator in this process, and if `lasting` for later ones, if the cache can be written: beside what
    other processes have found meanwhile, which this one doesn't take over, for its code is compiled without it."""
    import torch
    import torch._inductor.config as inductor_config

    with _lock:
        names = dict(failed())
        if operator in names:
            return
        names[operator] = why
        _failed[_place()] = names
        if inductor_config.force_disable_caches or not lasting:
            return
        path = _path()
        beside = f"{path}.{uuid.uuid4().hex}"  # containers share a cache and the numbers of processes
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(beside, "w", encoding="utf-8") as file:
                kept = {"torch": torch.__version__, "operators": _read(path) | names}
                json.dump(kept, file, indent=1, sort_keys=True)
            os.replace(beside, path)
        except OSError as error:
            log.info("later processes will find out again that %s fails in a capture: %s", operator, error)
            with contextlib.suppress(OSError):
                os.unlink(beside)


@on_reset
def forget() -> None:
    """Drop what this process knows, as `torch._dynamo.reset()` does; what is kept beside the cache stays."""
    with _lock:
        _failed.clear()
        _frames.clear()


def compile_again(compile_id: Any) -> bool:
    """Have Dynamo compile the frame again at its next call. Return False if it can't be, or mustn't be."""
    frame = getattr(compile_id, "frame_id", None)
    if frame is None or not _may_recompile():
        return False
    with _lock:
        if _frames[frame] >= MOST:
            return False
        found = _invalidate(compile_id)
        _frames[frame] += found
    return found


def _may_recompile() -> bool:
    from torch._dynamo import config, eval_frame

    return not config.error_on_recompile and eval_frame._stance.stance == "default"


def _invalidate(compile_id: Any) -> bool:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo import config
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    for reference in list(input_codes.seen):
        code = reference()
        entries = [] if code is None else _debug_get_cache_entry_list(code)
        for entry in entries:
            guards: Any = entry.guard_manager
            if entry.compile_id == compile_id and not isinstance(guards, DeletedGuardManagerWrapper):
                if len(entries) >= config.recompile_limit - 1:
                    return False
                why = "an operator that a CUDA graph can't hold is split off"
                guards.extra_state.invalidate(entry, DeletedGuardManagerWrapper(why))
                return True
    return False

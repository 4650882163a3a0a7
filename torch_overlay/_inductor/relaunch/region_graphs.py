"""Makes the graphs of a region, one for a state, and refuses where there can be none.

A capture that fails for an operator has the frame compiled again without it: Note [Operators in which a capture failed]
of `split_off`.
"""

from __future__ import annotations

import ctypes
import functools
import time
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters

from torch_overlay import config
from torch_overlay._inductor import profiler_ranges
from torch_overlay._inductor.relaunch import causes, compiled_region, split_off
from torch_overlay._inductor.relaunch.capture.allocations import AllocationPlan
from torch_overlay._inductor.relaunch.capture.branches import has_branches
from torch_overlay._inductor.relaunch.capture.capture import CaptureRequest
from torch_overlay._inductor.relaunch.capture.culprit import CaptureFailed, Culprit, find_differing, make_or_blame
from torch_overlay._inductor.relaunch.capture.make_graph import capturing
from torch_overlay._inductor.relaunch.launch.relaunch import graph_of
from torch_overlay._inductor.relaunch.verify import Verified, VerifyError


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay._inductor.relaunch.compiled_region import CompiledRegion
    from torch_overlay._inductor.relaunch.launch.relaunch import Relaunch, Split
    from torch_overlay._inductor.relaunch.states import CallKeys, State, States


OF_BRANCHES = ("condition", "capture")  # after which conditions are split off
FAILURES = 3  # so many captures of a key may fail for another reason than a refusal


class RegionGraphs:
    """Makes what the states of a region launch. `refusals`: the last one of each code."""

    def __init__(self, region: CompiledRegion, states: States, keys: CallKeys) -> None:
        self.region, self.code, self.states, self.keys = region, region.code, states, keys
        self.verify = config.cudagraph_verify
        self.named = config.nvtx is True
        self.refusals: dict[str, causes.Refused] = {}
        self._known_to_fail = frozenset(split_off.failed())  # operators that the code was compiled without

    def make(self, key: Any, state: State, inputs: Sequence[Any]) -> bool:
        """Make the state's graph from a call with these inputs. Return False if the call has to run without one. Raises
        NumberEscaped if a number has to be in the key."""
        states = self.states
        wanted = dict(state.alignments)  # another thread may lower them meanwhile
        alignments = [wanted.get(k, compiled_region.FULL) for k in range(len(inputs))]
        region, plan, numbers = self.region, state.plan or AllocationPlan(), {k: inputs[k] for k in self.keys.free}
        request = CaptureRequest(region.device, region.model, inputs, alignments, plan, self.code, numbers)
        if not capturing.acquire(blocking=False):
            return False
        start = time.perf_counter()
        try:
            states.captures += 1
            made = make_or_blame(request)
            if request.plan.opaque:
                self._compare(request, made)
        except CaptureFailed as failed:
            self._fail(state, failed)
            return False
        finally:
            capturing.release()
            self.region.governor.note_capture(time.perf_counter() - start)
        counters["torch_overlay"]["cudagraph_captures"] += 1
        counters["torch_overlay"]["cudagraph_nodes"] += graph_of(made).nodes
        # From here on, each launch is one for a call; its last stage counts it.
        made.stages[-1].call.count_in(states.launches, ctypes.addressof(states.launches))
        relaunch = self._finished(made)
        states.set_graph(state, relaunch)
        state.captured_for = wanted
        with states.lock:
            if not key and not self.keys.seeds and states.get(key) is state:
                states.try_launch = relaunch.try_launch
        self._say_bound()
        return True

    def _compare(self, request: CaptureRequest, made: Relaunch | Split) -> None:
        """Raise CaptureFailed if a launch on copies of these inputs has other results than the compiled code: Note
        [Kernels outside of a capture] of `capture.culprit`."""
        unwritten = set(self.code.static_inputs).difference(self.code.mutated_inputs)
        shared = {id(request.inputs[k]) for k in unwritten}  # parameters most often, for which there may be no room

        def clone(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if id(tensor) in shared else compiled_region.clone_flat(tensor)

        counts = counters["torch_overlay"]
        launched = counts["cudagraph_relaunches"]
        try:
            Verified(made, self.region.plain, self.code, clone).check(request.inputs)
        except VerifyError as error:
            causes.log.info("%s: %s", self.code.name, error)
            culprit = find_differing(request)
            raise CaptureFailed("operator", str(error) if culprit is None else culprit.did, culprit) from error
        except torch.OutOfMemoryError as error:
            raise CaptureFailed("out-of-memory", str(error), None, is_final=False) from error
        except Exception as error:  # the call's own launch raises it, too, which `runner` handles
            causes.log.info("%s could not be compared: %s", self.code.name, error)
        finally:
            counts["cudagraph_relaunches"] = launched  # a launch for no call

    def _finished(self, made: Relaunch | Split) -> Relaunch | Split | Verified:
        """Return what a call launches: named and verified, as the options say."""
        if self.named:
            stages = made.stages
            for i, stage in enumerate(stages, start=1):
                part = f"stage {i} of {len(stages)}, " if len(stages) > 1 else ""
                nodes = "1 node" if stage.nodes == 1 else f"{stage.nodes} nodes"
                name = f"{self.code.name}, {part}graph of {nodes}"
                stage.show(functools.partial(profiler_ranges.within, name))
        if self.verify:
            return Verified(made, self.region.plain, self.code, compiled_region.clone_flat)
        made.forget()
        return made

    def _say_bound(self) -> None:
        if self.states.captures == self.states.most_captures:
            message = f"{self.states.captures} captures for different sizes and numbers: no more are made"
            self.refuse(None, "templates", f"{message}; torch_overlay.config.cudagraph_templates sets the bound")

    def refuse(self, state: State | None, reason: str, message: str, **about: str) -> None:
        """Refuse: from now on, run the state's calls as compiled that its graph doesn't serve, if it has one for better
        aligned inputs. Without a state, only say so."""
        found = self.refusals[reason] = causes.Refused.of(reason, message, **about, region=self.code)
        if state is not None:
            state.refused = reason
        causes.refuse(found)

    def give_up(self, state: State, error: Exception) -> None:
        """Drop the state's graph, a launch of which the driver has refused."""
        self.states.set_graph(state)
        if has_branches(self.region.model):
            self._blame_conditions(state, error)
        else:
            self.refuse(state, "host-memory", f"its copies can't be patched: {error}")

    def _blame_conditions(self, state: State, error: Exception, line: str = "") -> None:
        """A different driver may do, or a different operator may have failed: later processes try again."""
        self._blame(state, Culprit("cond", line, f"can't be in a graph: {error}"), lasting=False)

    def _fail(self, state: State, failed: CaptureFailed) -> None:
        """Blame the operator for which there is no graph; otherwise refuse, or let a later call try again."""
        if failed.culprit is not None:
            self._blame(state, failed.culprit)
            return
        state.failures += not failed.is_final
        if not failed.is_final and state.failures < FAILURES:
            return
        if failed.reason in OF_BRANCHES and has_branches(self.region.model):
            self._blame_conditions(state, failed, failed.line)
        else:
            self.refuse(state, failed.reason, str(failed), operator=failed.operator, line=failed.line)

    def _blame(self, state: State, culprit: Culprit, lasting: bool = True) -> None:
        """Have the frame compiled again without the operator; if it can't be, refuse."""
        split_off.remember(culprit.operator, culprit.did, lasting)
        message = f"{culprit.operator} {culprit.did}"
        about = {"operator": culprit.operator, "line": culprit.line}
        if culprit.operator not in self._known_to_fail and split_off.compile_again(self.code.compile_id):
            found = causes.Refused.of("operator", message, **about, region=self.code)
            self.refusals["operator"], state.refused = found, "operator"
            where = f" ({culprit.line})" if culprit.line else ""
            causes.log.warning("%s%s; from the next call on it runs between two graphs", message, where)
        else:
            self.refuse(state, "operator", message, **about)

"""Lists the programs that have their graphs with a seam only: a `RelaunchPolicy` alone runs them without, or with
fewer. What they compute has to be right all the same. Note [What a policy can't do] of `policy`"""

from typing import NamedTuple


class Need(NamedTuple):
    """The target of a seam, and why."""

    seam: str
    why: str


COLLECTIVE = Need("torch._inductor.utils:is_cudagraph_unsafe_fx_node", "collectives are split off")
BRANCH = Need("torch._inductor.lowering:", "a condition doesn't take the graphs from the whole code")
NUMBER = Need(
    "torch._inductor.output_code:CompiledFxGraph.__init__",
    "a number that no size depends on is a parameter of one graph",
)
SEEDS = Need(
    "torch._inductor.lowering:", "seeds of memory-efficient attention are moved to where operators expect them"
)
STREAM = Need(
    "torch._dynamo.graph_bytecode_inputs:",
    "the caller's streams are replaced by those of a capture",
)

NEEDS: dict[str, Need] = {
    "attention_efficient": SEEDS,
    "attention_without_dropout": SEEDS,
    "attention_late_backward": SEEDS,
    "attention_retained": SEEDS,
    "attention_evaluated": SEEDS,
    "attention_of_sizes": SEEDS,
    "branch_that_writes": BRANCH,
    "branches": BRANCH,
    "branches_that_copy": BRANCH,
    "collectives": COLLECTIVE,
    "collectives_of_a_backward": COLLECTIVE,
    "computed_numbers": NUMBER,
    "condition_in_a_branch": BRANCH,
    "condition_in_training": BRANCH,
    "conditions_of_sizes": BRANCH,
    "decode_position": NUMBER,
    "integer_that_changes": NUMBER,
    "mixture_of_depths": BRANCH,
    "number_and_dropout": NUMBER,
    "number_and_mutation": NUMBER,
    "number_in_training": NUMBER,
    "number_too_large": NUMBER,
    "numbers_and_sizes": NUMBER,
    "products_in_branches": BRANCH,
    "random_branch": BRANCH,
    "small_transformer": SEEDS,
    "streams_inside": STREAM,
}

"""Every place where the overlay touches upstream code, and the patches that carry these places.

A table and nothing else. To add a seam: append an entry to the group of its patch, take its fingerprint from
`python tools/fingerprint.py torch.module:Class.name`, then run `python tools/fingerprint.py --write` once, so that
base.json lists the file. The patches stand in the order of the series. New modules need no entry: each travels in the
first patch that reaches it by imports, and what no seam reaches in the last one.
"""

from __future__ import annotations

from torch_overlay.seams import Patch, Seam


PATCHES: tuple[Patch, ...] = (
    Patch(
        slug="overlay-core",
        subject="Hooks, configuration and logging of torch._overlay",
        description="Dynamo traces no module of torch._overlay, and the log has its name. Later patches put the "
        "decorators of torch._overlay.hooks above upstream's functions. No behaviour changes.",
    ),
    Patch(
        slug="aot-stream-placement",
        subject="Streams are placement in AOTAutograd, not operations",
        description="Synchronisation on streams and events leaves the graph before it is partitioned. What the outside "
        "can tell of it stays on the nodes, as tokens; order inside the graph is data dependence.",
        upstream="replaces the control_deps threading of pytorch#185627, #189096, #193410",
    ),
    Patch(
        slug="inductor-stream-planner",
        subject="Derive stream events from data dependencies on the final schedule",
        description="A planner emits the fewest events that order what the schedule placed on several streams, delays "
        "frees until the memory's stream is ordered after every access, and switches the current stream only for "
        "lines that read it.",
        upstream="not sent yet; fixes the causes of pytorch#178549, #186023, #194234",
    ),
    Patch(
        slug="inductor-cache-key",
        subject="Stream placement is part of the compile cache keys",
        description="A graph's keys in the FX graph cache and the AOTAutograd cache ignore FX node metadata, and so "
        "the stream that a node was placed on: code compiled for one placement is served to another. With it in the "
        "key, the AOTAutograd cache may hold graphs with streams, which it bypasses.",
    ),
    Patch(
        slug="inductor-mutation-order",
        subject="A buffer is read before it is written over by a library or custom operator",
        description="Readers of the old value that become buffers while such an operator is lowered were launched "
        "after it, and read the new value. No program that was right compiles to other code.",
    ),
    Patch(
        slug="inductor-partition-device",
        subject="Graph partitions that are compiled on one rank know their device",
        description="A partition looked its stream up on a device whose index was a variable of the function that "
        "calls it, and failed with a NameError.",
    ),
    Patch(
        slug="aot-recomputed-random",
        subject="A budget of memory does not compute random numbers again",
        description="With activation_memory_budget or aggressive_recomputation, backwards computed random operators "
        "again without the state of their generator: gradients were those of other dropout masks, silently.",
    ),
    Patch(
        slug="inductor-concat-results",
        subject="A result that shows a part of a concatenation has memory of its own",
        description="Inputs of a concatenation are computed in place, but for those that the graph returns. A view of "
        "one, as a result, lay in the concatenation: who wrote to one of the results changed the other.",
    ),
    Patch(
        slug="inductor-lazy-kernels",
        subject="A C++ wrapper launches its own kernels",
        description="Where two C++ wrappers of a process have a kernel in common, the second one loaded the binary of "
        "whichever kernel had that name last. Results were wrong, or memory was written that nobody named.",
    ),
    Patch(
        slug="inductor-host-constants",
        subject="A constant that is returned on the host is not made on the GPU",
        description="With CUDA graphs, constants of the host that a graph returns, or saves for its backward, came on "
        "the GPU. They stay where the program makes them.",
    ),
    Patch(
        slug="compile-garbage",
        subject="What a call that compiles has made goes when the program drops it",
        description="Circles of references kept it until somebody collected garbage: a pattern that doesn't match is "
        "an exception, returned with the frames of the compilation, and a backward is compiled while it is called; a "
        "traced object's variable and that of its __dict__ refer to one another, and to the program's object.",
    ),
    Patch(
        slug="dynamo-stream-objects",
        subject="Stream objects of compiled frames: one table per thread and call, nothing kept alive",
        description="Compiled code finds its streams and events in a table of the process, which nested calls and "
        "other threads overwrite, and which keeps what frames make alive. The table now belongs to the innermost call.",
    ),
    Patch(
        slug="dynamo-streams",
        subject="Dynamo traces streams and events as eager runs them",
        description="Construction, contexts, current and default streams, set_stream, queries, timing and comparisons "
        "trace without a graph break, touch nothing while tracing, and resume on the right stream after a break.",
        upstream="not sent yet; concerns pytorch#196193, #195573, #187472, #173172",
    ),
    Patch(
        slug="inductor-relaunch",
        subject="CUDA graphs that are pointed at other memory for each call",
        description="A region is captured once, at addresses that mean nothing; every pointer in the graph is proven, "
        "and patched when it moves. No input is copied, no pool is kept, outputs are fresh, mutated inputs are "
        "allowed.",
        upstream="not sent yet; an alternative to cudagraph trees",
    ),
)

SEAMS: tuple[Seam, ...] = (
    # ---- overlay form only
    Seam(
        target="torch._guards:CompileContext.__init__",
        impl="torch_overlay:_context_init",
        patch=None,
        fingerprint="f8c6f8a16c6af826",
        why="All other seams are installed when the first compilation begins.",
        ends="the patch series, whose hooks are in the files",
        early=True,
    ),
    Seam(
        target="torch._guards:TracingContext.__init__",
        impl="torch_overlay:_context_init",
        patch=None,
        fingerprint="145b1342375ccd1d",
        why="Graphs that are given to compile_fx, and saved code that is loaded, have no CompileContext.",
        ends="the patch series, whose hooks are in the files",
        early=True,
    ),
    # ---- overlay-core
    Seam(
        target="torch._dynamo.trace_rules:",
        impl="torch_overlay._skip_files:register",
        kind="register",
        patch="overlay-core",
        why="Dynamo must not trace the frames of hooks and of what they call.",
        ends="upstream takes the code into modules that it skips already",
    ),
    Seam(
        target="torch._logging._registrations:",
        impl="torch_overlay._logging:register",
        kind="register",
        patch="overlay-core",
        why='TORCH_LOGS="torch_overlay" and torch._logging.set_logs know the log name.',
        ends="the code's modules log under names that upstream already registers",
        early=True,
    ),
    # ---- inductor-cache-key
    Seam(
        target="torch._inductor.codecache:FxGraphHashDetails.__init__",
        impl="torch_overlay._inductor.cache_key:hash_details_init",
        patch="inductor-cache-key",
        fingerprint="97568663a99c86d1",
        why="Compile cache keys must contain the overlay's version and configuration, and the stream of each node.",
        ends='upstream adds node.meta["custom"] to FxGraphHashDetails',
    ),
    Seam(
        target="torch._functorch._aot_autograd.autograd_cache:check_node_safe",
        impl="torch_overlay._inductor.cache_key:check_node_safe",
        patch="inductor-cache-key",
        fingerprint="2f5d0a7421845806",
        why="Graphs with streams may be cached: the key has what Dynamo knows of the objects behind their numbers.",
        ends="upstream caches graphs with get_external_object_by_index",
    ),
    # ---- inductor-mutation-order
    Seam(
        target="torch._inductor.ir:MutationOutput.__init__",
        impl="torch_overlay.upstream_fixes.mutation_order:mutation_output_init",
        patch="inductor-mutation-order",
        fingerprint="1b88419da25df2c3",
        why="FallbackKernel, TemplateBuffer, Switch and WhileLoop become operations before the readers of what they "
        "mutate are realized.",
        ends="upstream realizes the readers before the operation is registered",
    ),
    Seam(
        target="torch._inductor.graph:GraphLowering.mark_buffer_mutated",
        impl="torch_overlay.upstream_fixes.mutation_order:mark_buffer_mutated",
        patch="inductor-mutation-order",
        fingerprint="9f72827f51a72236",
        why="Before a buffer is written, only readers of its own name are realized, not those of a view that a call "
        "returned.",
        upstream="pytorch#198104",
        ends="upstream realizes the readers of all names of the memory",
    ),
    # ---- inductor-partition-device
    Seam(
        target="torch._inductor.codegen.wrapper:_coor_device_idx_ref",
        impl="torch_overlay.upstream_fixes.partition_device:device_index",
        patch="inductor-partition-device",
        fingerprint="2cc172e7951e438e",
        why="The variable with the device's index is its function's; a partition is another function.",
        ends="upstream defines the variable in each partition that uses it",
    ),
    # ---- aot-recomputed-random
    Seam(
        target="torch._functorch.partitioners:choose_saved_values_set",
        impl="torch_overlay.upstream_fixes.recomputed_random:choose_saved_values_set",
        patch="aot-recomputed-random",
        fingerprint="8c2bb81101b21345",
        why="The partitioner saves no state of a generator for what a budget of memory has it compute again.",
        ends="upstream saves the state, or the numbers",
    ),
    # ---- inductor-concat-results
    Seam(
        target="torch._inductor.ir:ConcatKernel.create",
        impl="torch_overlay.upstream_fixes.aliases:concatenate",
        patch="inductor-concat-results",
        fingerprint="b391e68816c3f097",
        why="An input of a concatenation that is returned through a view is computed in the concatenation's memory.",
        ends="upstream looks at the storages of what the graph returns",
    ),
    # ---- inductor-lazy-kernels
    Seam(
        target="torch._inductor.runtime.triton_lazy_compile:run_triton_kernel_with_autotune",
        impl="torch_overlay.upstream_fixes.lazy_kernels:run_triton_kernel_with_autotune",
        patch="inductor-lazy-kernels",
        fingerprint="5c5faf5678eaa9a6",
        why="A kernel that has run before doesn't store its binary, which is looked up by the kernel's name.",
        ends="upstream stores the binary whenever a wrapper asks for it",
    ),
    # ---- inductor-host-constants
    Seam(
        target="torch._inductor.fx_passes.post_grad:ConstructorMoverPass.__init__",
        impl="torch_overlay.upstream_fixes.host_constants:mover_init",
        patch="inductor-host-constants",
        fingerprint="9a1cd8f540698769",
        why="With CUDA graphs, a constant that is returned on the host is made on the GPU, and so would be a pinned "
        "buffer that a program copies back, which is an error.",
        ends="upstream moves no constructor of what the graph returns, and drops pin_memory where it moves one",
        methods=(
            "cannot_be_moved",
            "__call__",
        ),
    ),
    # ---- compile-garbage
    Seam(
        target="torch._dynamo.output_graph:OutputGraph.cleanup",
        impl="torch_overlay.upstream_fixes.dynamo_cleanup:cleanup",
        patch="compile-garbage",
        fingerprint="cbac163e81db83b8",
        why="A traced object and the variable of its __dict__ keep one another, and the program's object, alive.",
        ends="upstream's cleanup lets go of such variables, too",
    ),
    Seam(
        target="torch._inductor.pattern_matcher:",
        impl="torch_overlay.upstream_fixes.pattern_traceback",
        kind="module",
        patch="compile-garbage",
        fingerprint="a53a7d64c29f02fd",
        why="The exception that says why a pattern doesn't match keeps the frames of the compilation.",
        ends="upstream returns it without its traceback",
        methods=(
            "PatternExpr.match",
            "MultiOutputPattern.match",
        ),
    ),
    # ---- aot-stream-placement
    Seam(
        target="torch._functorch._aot_autograd.streams:",
        impl="torch_overlay.doors.stream_policy",
        kind="module",
        patch="aot-stream-placement",
        fingerprint="e28563990e5b8df0",
        why="A stream policy in place of the passes that graph_capture calls one after the other: values threaded "
        "through control_deps break mutation, partitioning and CUDA graphs; synchronisation and frees follow from the "
        "final schedule; sums of gradients run where their consumers run; updated inputs are joined into the caller's "
        "stream, where upstream raises.",
        upstream="pytorch#197416, #195573, #187695, #168061, #167513, #151079",
        ends="upstream has a stream policy (upstream/stream-policy.patch)",
        methods=(
            "assign_backward_streams",
            "assign_epilogue_copy_streams",
            "insert_backward_syncs",
            "sync_deallocations",
            "wrap_all_sync_nodes_with_control_deps",
            "populate_fw_metadata_with_stream_indices",
        ),
    ),
    Seam(
        target="torch._functorch._aot_autograd.runtime_wrappers:_create_runtime_wrapper",
        impl="torch_overlay.doors.stream_policy:create_runtime_wrapper",
        patch="aot-stream-placement",
        fingerprint="9b68da67b495ecf6",
        why="The stream policy orders what comes after the copy that writes an update back, and says where a returned "
        "view is made anew.",
        upstream="pytorch#172522",
        ends="upstream has a stream policy (upstream/stream-policy.patch)",
    ),
    Seam(
        target="torch._functorch._aot_autograd.functional_utils:gen_alias_from_base",
        impl="torch_overlay.doors.stream_policy:gen_alias_from_base",
        patch="aot-stream-placement",
        fingerprint="e632759a3727c487",
        why="The stream on which a view was made is the one on which autograd's engine runs its backward: the stream "
        "policy makes it.",
        ends="upstream has a stream policy (upstream/stream-policy.patch)",
    ),
    Seam(
        target="torch._functorch._aot_autograd.graph_compile:",
        impl="torch_overlay._functorch.streams.hooks",
        kind="module",
        patch="aot-stream-placement",
        fingerprint="f884b60c5b6667a2",
        why="What a backward computes again runs with its consumer, and the forward's waits don't concern it; a saved "
        "tensor that shares memory with another one, or that a side stream's memory holds, is not donated.",
        ends="upstream compares saved tensors with each other, and takes the patch",
        methods=(
            "_partition_joint_graph_into_fw_bw",
            "collect_bw_donated_buffer_idxs",
        ),
    ),
    Seam(
        target="torch._functorch._aot_autograd.runtime_wrappers:_AOTDispatchAutogradFunctionFactory.build",
        impl="torch_overlay._inductor.double_backward:build",
        patch="aot-stream-placement",
        fingerprint="3cb27618283817bd",
        why="The error of a gradient of a gradient doesn't say that torch.func.grad works.",
        ends="upstream's message says it",
    ),
    Seam(
        target="torch._functorch._activation_offloading.activation_offloading:enable_activation_offloading",
        impl="torch_overlay._functorch.offload.hooks:enable_activation_offloading",
        patch="aot-stream-placement",
        fingerprint="45016e983d303648",
        why="Copies to the host on a stream of their own free the original's storage before its last reader.",
        ends="upstream's wait frees by dropping references, and the patch is merged",
    ),
    Seam(
        target="torch._functorch.compile_utils:fx_graph_cse",
        impl="torch_overlay._functorch.streams.hooks:common_subexpressions",
        patch="aot-stream-placement",
        fingerprint="3eefabf196b0dd91",
        why="Equal operations on two streams are one where it is decided what is saved, and two where they run.",
    ),
    # ---- inductor-stream-planner
    Seam(
        target="torch._inductor.scheduler:Scheduler.__init__",
        impl="torch_overlay._inductor.overrides:scheduler_init",
        patch="inductor-stream-planner",
        fingerprint="73fb5cf350787d23",
        why="Plans the final schedule of a region and emits the plan; places copies of saved activations in it; keeps "
        "visible stream operations in order and out of captured graphs; notes what is split off, and why. A write "
        "comes after the readers of the old value, also if the writer of a version between is dropped, and partitions "
        "that compute parts of a concatenation hand one result on.",
        upstream="pytorch#178549, #194234",
        methods=(
            "compute_dependencies",
            "dead_node_elimination",
            "_populate_stream_assignments",
            "compute_last_usage",
            "should_partition",
            "_log_graph_partitions",
            "get_graph_partition_signature",
            "_codegen",
            "_codegen_partitions",
            "enter_context",
            "generate_stream_ctx_switching",
            "get_buf_stream",
            "has_cross_stream_hazard",
        ),
    ),
    Seam(
        target="torch._inductor.codegen.wrapper:PythonWrapperCodegen.__init__",
        impl="torch_overlay._inductor.overrides:wrapper_init",
        patch="inductor-stream-planner",
        fingerprint="c252fc74cd2e07c2",
        why="A planned region looks its streams up once, frees a buffer when its stream is ordered after its last "
        "use on another one, waits for copies where the host reads them, and makes aligned copies after a "
        "kernel's waits; switches of the current stream are placed when memory is planned; kernels side by side "
        "share no memory; a condition is a call, by which a capture takes both branches.",
        upstream="pytorch#178549, #186023, #187224",
        methods=(
            "codegen_device_guard_enter",
            "codegen_free",
            "generate_fallback_kernel",
            "codegen_deferred_alignment_copies",
            "sync_d2h_copy",
            "run_wrapper_ir_passes",
            "memory_plan_reuse",
            "codegen_switch",
        ),
    ),
    Seam(
        target="torch._inductor.codegen.wrapper:PythonWrapperCodegen.write_get_raw_stream",
        impl="torch_overlay._inductor.streams.codegen:write_get_raw_stream",
        patch="inductor-stream-planner",
        fingerprint="1962d0e17d3c94c4",
        why="A launch takes the raw handle of its own stream.",
    ),
    Seam(
        target="torch.fx.passes.graph_transform_observer:GraphTransformObserver.__init__",
        impl="torch_overlay._inductor.streams.fx_passes:observer_init",
        patch="inductor-stream-planner",
        fingerprint="c02a0cfca490771d",
        why="A pass must not move a surviving node to another stream, and a node that it makes runs where the one "
        "that it replaces did; reorder_for_locality delays side branches until what they were to run beside is "
        "launched. A result of the graph must not become an input, or another result, where a pass removes the "
        "operation that made it.",
        upstream="pytorch#189095",
        methods=(
            "__enter__",
            "__exit__",
            "apply_graph_pass",
        ),
    ),
    Seam(
        target="torch._inductor.pattern_matcher:_common_custom_context",
        impl="torch_overlay._inductor.streams.fx_passes:common_custom_context",
        patch="inductor-stream-planner",
        fingerprint="f4fb7e2be4df2ae7",
        why="A pattern's replacement carries the boundary tokens of what it replaces.",
        upstream="pytorch#189095",
    ),
    Seam(
        target="torch._inductor.graph:GraphLowering.__init__",
        impl="torch_overlay._inductor.streams.lowering:graph_lowering_init",
        patch="inductor-stream-planner",
        fingerprint="eb4035d01b2f48ec",
        why="Puts visible stream operations of the final FX graph in order, folds branches that can't pay, and makes "
        "values that are promised to such an operation buffers before it.",
        methods=("run_node",),
    ),
    Seam(
        target="torch._inductor.fx_passes.reinplace:",
        impl="torch_overlay._inductor.streams.fx_passes",
        kind="module",
        patch="inductor-stream-planner",
        fingerprint="5b853d6537d1dbb0",
        why="Each update of a part of a tensor copies the whole tensor where the parts are written on several streams: "
        "the hooks choose the scatters that become updates in place. What is returned, or saved, and put into an input "
        "as well is computed there, and so is the input itself.",
        ends="upstream reinplaces scatters whose neighbours run on another stream, and counts what the graph returns "
        "as a reader",
        methods=(
            "reinplace_inplaceable_ops",
            "reinplace_inplaceable_ops_core",
            "scatter_always_uses_mutation",
        ),
    ),
    # ---- dynamo-stream-objects
    Seam(
        target="torch._dynamo.graph_bytecode_inputs:",
        impl="torch_overlay._dynamo.external_objects",
        kind="module",
        patch="dynamo-stream-objects",
        fingerprint="b1a1c0a5dd41bc84",
        why="The table of objects belongs to the thread and to the innermost running graph, not to the process, and "
        "keeps nothing alive beyond a call; a new frame starts with an empty numbering, in which an event that is "
        "reached by two names has one number; the prologue that fills the table is ours.",
        upstream="pytorch#186025, pytorch#180497",
        ends="upstream's table is per thread and call, and its numbering per frame",
        methods=(
            "get_external_object_by_index",
            "set_external_object_by_index",
            "store_user_object_weakrefs",
            "stash_graph_created_object",
            "reset_user_object_tracking",
            "register_user_object",
            "has_user_objects",
        ),
    ),
    Seam(
        target="torch._dynamo.codegen:PyCodegen.make_call_generated_code",
        impl="torch_overlay._dynamo.external_objects:make_call_generated_code",
        patch="dynamo-stream-objects",
        fingerprint="8d5cbea3f7fb5514",
        why="One call hands a graph its stream objects, one puts the table of the outer graph back.",
        upstream="pytorch#186025",
        ends="upstream's prologue keeps and restores the previous table",
    ),
    Seam(
        target="torch._dynamo.convert_frame:_compile",
        impl="torch_overlay._dynamo.hooks:compile_frame",
        patch="dynamo-stream-objects",
        fingerprint="8041208bb845db0c",
        why="A compilation inside a running compiled function must not lose that function's objects.",
        ends="upstream's registry is per frame",
    ),
    Seam(
        target="torch._functorch._aot_autograd.runtime_wrappers:",
        impl="torch_overlay._dynamo.external_objects",
        kind="module",
        patch="dynamo-stream-objects",
        fingerprint="e2476fb662d00ff9",
        why="A backward has its forward's table for as long as it runs: upstream saves the objects of the first frame "
        "ever compiled, and leaves them in the table for ever.",
        upstream="pytorch#186025",
        ends="upstream's table is per thread and call, and a backward's is restored after it",
        methods=(
            "_snapshot_external_objects",
            "_AutogradBackwardCompiler.get_or_compile",
        ),
    ),
    Seam(
        target="torch.autograd.function:BackwardCFunction._compiled_autograd_key",
        impl="torch_overlay._dynamo.compiled_backward:autograd_key",
        patch="dynamo-stream-objects",
        fingerprint="8a2fab0847241879",
        why="The only moment at which compiled autograd asks each node of a backward: its streams are known there.",
        ends="compiled autograd keeps the streams of what it traces",
    ),
    Seam(
        target="torch._dynamo.compiled_autograd:AutogradCompilerInstance.__init__",
        impl="torch_overlay._dynamo.compiled_backward:compiler_init",
        patch="dynamo-stream-objects",
        fingerprint="8c39f0cc67f4c887",
        why="Operations copied from a backward graph keep their streams; the graph says which stream each runs on, "
        "and a call brings the streams.",
        ends="compiled autograd keeps the streams of what it traces",
        methods=(
            "proxy_call_aot_backward",
            "end_capture",
        ),
    ),
    Seam(
        target="torch._functorch._aot_autograd.runtime_wrappers:_AnalyzeCustomOpInputOutputMode.__torch_dispatch__",
        impl="torch_overlay.upstream_fixes.wrapped_numbers:look_at_operator",
        patch="dynamo-stream-objects",
        fingerprint="3819d257ae3fd568",
        why="Under compiled autograd, code for a GPU that reads a number which autograd saved fails in its first call.",
        ends="the mode lets operators through that were given numbers in place of tensors",
    ),
    Seam(
        target="torch._dynamo.utils:GmWrapper.forward",
        impl="torch_overlay._dynamo.compiled_backward:run_wrapped_graph",
        patch="dynamo-stream-objects",
        fingerprint="fcdc1eab30693cec",
        why="Streams of a graph's nodes get lost where the graph is wrapped because an input is a list.",
        ends="AOTAutograd traces a wrapped graph as it traces one that isn't",
    ),
    # ---- dynamo-streams
    Seam(
        target="torch._dynamo.variables.streams:",
        impl="torch_overlay._dynamo.registration:register_variables",
        kind="register",
        patch="dynamo-streams",
        why="Methods, attributes and hash of streams and events: no call while tracing, run-time values from the run. "
        "A graph break inside a stream context resumes on the stream instead of running the whole frame eagerly. "
        "record_stream of a lazily conjugated tensor raises, and records the stream for a copy.",
        upstream="pytorch#173172, pytorch#180179, pytorch#92804",
        ends="upstream traces these methods without touching the object, StreamContextVariable has a reconstruct_type, "
        "and record_stream passes through the fallbacks of lazy views",
    ),
    Seam(
        target="torch._dynamo.symbolic_convert:InstructionTranslatorBase.setup_or_before_with",
        impl="torch_overlay._dynamo.contexts:setup_or_before_with",
        patch="dynamo-streams",
        fingerprint="00a6e751ec2b306d",
        why="A stream may be entered again inside its own block, so each block gets a context of its own.",
        ends="a with block of a stream has its own variable",
    ),
    Seam(
        target="torch._dynamo.variables.streams:",
        impl="torch_overlay._dynamo.contexts",
        kind="module",
        patch="dynamo-streams",
        fingerprint="cfcd5d613ba79406",
        why="torch.cuda.stream(None) does nothing; entering a stream of another device makes that device current, and "
        "leaving it leaves the device; comparison with the current stream is guarded as a relation, for streams of "
        "the frame the run compares; a stream or event that the frame made and returns is the one of the graph.",
        upstream="pytorch#196193, #185594",
        ends="pytorch#196193 is fixed; upstream enters the device of a stream together with the stream, guards these "
        "comparisons so, and keeps the objects of a frame in its own locals",
        methods=(
            "StreamContextVariable.create",
            "StreamContextVariable.enter",
            "StreamContextVariable.exit",
            "StreamVariable.tp_richcompare_impl",
            "StreamVariable.reconstruct",
            "EventVariable.reconstruct",
        ),
    ),
    Seam(
        target="torch._dynamo.output_graph:OutputGraph.__init__",
        impl="torch_overlay._dynamo.hooks:output_graph_init",
        patch="dynamo-streams",
        fingerprint="5491e42845d0ea63",
        why="A stream in a local variable crosses a graph break as a value; a branch in a stream context reads its "
        "tensor on the stream; an event may be recorded after a mutation of an input; profiler ranges that "
        "nobody wants leave; the backend gets the facts of the frame.",
        upstream="pytorch#187472, #184487, #195573, #197416",
        ends="StreamVariable is no ContextWrappingVariable, and upstream orders write-backs by the user's joins",
        methods=(
            "_get_stack_values_to_restore",
            "compile_subgraph",
            "cleanup_graph",
            "check_input_mutation_on_current_stream",
            "call_user_compiler",
        ),
    ),
    Seam(
        target="torch._dynamo.variables.torch:TorchInGraphFunctionVariable._get_handlers",
        impl="torch_overlay._dynamo.hooks:get_handlers",
        patch="dynamo-streams",
        fingerprint="eb40a01300b912a1",
        why="default_stream, set_stream and current_stream of other devices; nothing is executed while tracing.",
        ends="upstream has handlers for these functions",
    ),
    Seam(
        target="torch._dynamo.variables.functions:UserFunctionVariable.bind_args",
        impl="torch_overlay._dynamo.hooks:bind_args",
        patch="dynamo-streams",
        fingerprint="f75e14ba7e6bd01b",
        why="Methods of an object that the frame makes find the streams and events of their closure cells.",
        ends="methods of objects that the frame makes have a source",
    ),
    Seam(
        target="torch._dynamo.variables.functions:SkipFunctionVariable.call_function",
        impl="torch_overlay._dynamo.functions:call_skipped",
        patch="dynamo-streams",
        fingerprint="1094df77cbfd632f",
        why="A dictionary of streams may have an entry for each thread: the thread's number is a guarded constant.",
        ends="upstream traces threading.get_ident",
    ),
    Seam(
        target="torch._dynamo.variables.user_defined:UserDefinedObjectVariable.invoke_descriptor_get",
        impl="torch_overlay._dynamo.functions:invoke_descriptor_get",
        patch="dynamo-streams",
        fingerprint="febf070d2d16fa4f",
        why="A stream may be made by a cached property, whose lock Dynamo can't trace.",
        ends="upstream traces functools.cached_property",
    ),
    Seam(
        target="torch._dynamo.variables.tensor:SymNodeVariable.evaluate_expr",
        impl="torch_overlay._dynamo.hooks:evaluate_expr",
        patch="dynamo-streams",
        fingerprint="9968bab4758c545c",
        why="A branch on a query under fullgraph=True is an error that says what a query is, and what to do.",
        ends="upstream says where an unbacked number comes from",
    ),
    Seam(
        target="torch._dynamo.variables.ctx_manager:ProfilerRecordFunctionContextVariable.create",
        impl="torch_overlay._dynamo.ranges:create_range",
        patch="dynamo-streams",
        fingerprint="9334946b703e666a",
        why="A range of record_function begins and ends at its place in a program with streams, and its name is "
        "known where a profiler may want it.",
        ends="upstream's profiler operations are ordered with the stream program",
        methods=(
            "enter",
            "exit",
        ),
    ),
    Seam(
        target="torch._dynamo.variables.user_defined:",
        impl="torch_overlay._dynamo.hooks",
        kind="module",
        patch="dynamo-streams",
        fingerprint="82f1c139c31e3bdc",
        why="The classes of streams, events and stream contexts: the frame makes them at run time, with all their "
        "arguments, and contextlib.ExitStack calls the methods of the class of a context.",
        ends="upstream makes the objects at run time only, and StreamContextVariable has __enter__ and __exit__ as "
        "methods, bound and unbound",
        methods=(
            "UserDefinedClassVariable.call_function",
            "UserDefinedClassVariable.resolve_cls_descriptor",
        ),
    ),
    Seam(
        target="torch._dynamo.variables.streams:SymbolicStreamState.__init__",
        impl="torch_overlay._dynamo.registration:state_init",
        patch="dynamo-streams",
        fingerprint="690aaa70db9fa485",
        why="Which stream is current is known for each device.",
        ends="upstream's state knows the current stream of each device",
    ),
    Seam(
        target="torch._dynamo.symbolic_convert:InstructionTranslatorBase._maybe_emit_sync_dealloc",
        impl="torch_overlay._dynamo.hooks:maybe_emit_sync_dealloc",
        patch="dynamo-streams",
        fingerprint="5ec7077bdee6794b",
        why="The planner orders frees across streams; an event and a wait at `del x` would only be in its way.",
        upstream="pytorch#168061",
        ends="upstream plans frees after scheduling",
    ),
    Seam(
        target="torch.fx.passes.canonicalize:_is_safe_to_reorder",
        impl="torch_overlay._dynamo.canonical_order:is_safe_to_reorder",
        patch="dynamo-streams",
        fingerprint="04466f38a1426d5b",
        why="Random functions have an effect, and in a program with streams a copy that blocks the host has one, too.",
    ),
    Seam(
        target="torch._dynamo.source:CurrentStreamSource.reconstruct",
        impl="torch_overlay._dynamo.hooks:reconstruct_current_stream",
        patch="dynamo-streams",
        fingerprint="c8c0d7e3c55472b4",
        why="Index 0 is a torch.cuda.Stream on CUDA, which both kinds of events accept.",
        upstream="pytorch#176486",
        ends="get_current_stream returns a torch.cuda.Stream on CUDA",
    ),
    # ---- inductor-relaunch
    Seam(
        target="torch._inductor.compile_fx:",
        impl="torch_overlay._inductor.relaunch.hooks",
        kind="module",
        patch="inductor-relaunch",
        fingerprint="6526ea3c996a385b",
        why="Small tensors in host memory that a graph only reads on the device are kept there, and what the device "
        "alone reads of a number in host memory is computed there, also what a backward reads.",
        ends="upstream moves such numbers to the device before it partitions",
        methods=(
            "_compile_fx_inner",
            "_recursive_joint_graph_passes",
        ),
    ),
    Seam(
        target="torch._inductor.output_code:",
        impl="torch_overlay._inductor.relaunch.hooks",
        kind="module",
        patch="inductor-relaunch",
        fingerprint="cc87a504426addc7",
        why="Users who set no policy get ours; only here is the switch that Inductor turns off for all of a frame. A "
        "manager of cudagraph trees is asserted; without trees there is none.",
        methods=(
            "CompiledFxGraph.post_compile",
            "maybe_handle_backward_generation",
        ),
    ),
    Seam(
        target="torch._inductor.output_code:CompiledFxGraph.__init__",
        impl="torch_overlay._inductor.relaunch.hooks:note_outputs",
        patch="inductor-relaunch",
        fingerprint="535767a1f4ea1ff1",
        why="Which outputs are saved for the backward alone, and what was split off, is known while there is a graph, "
        "not when its code is loaded.",
    ),
    Seam(
        target="torch.cuda.memory:memory_stats_as_nested_dict",
        impl="torch_overlay._inductor.relaunch.hooks:memory_stats",
        patch="inductor-relaunch",
        fingerprint="22faec6b2d444326",
        why="The statistics of the allocator list each pool that captures ever used, and take longer with each.",
        ends="the allocator forgets the statistics of pools that are deleted",
    ),
    Seam(
        target="torch._inductor.async_compile:AsyncCompile.wait",
        impl="torch_overlay._inductor.relaunch.hooks:wait_for_kernels",
        patch="inductor-relaunch",
        fingerprint="6c00a87786a87412",
        why="While its workers compile kernels this process only waits; what the first capture needs is loaded then.",
    ),
    Seam(
        target="torch._inductor.utils:is_cudagraph_unsafe_fx_node",
        impl="torch_overlay._inductor.relaunch.hooks:is_cudagraph_unsafe_fx_node",
        patch="inductor-relaunch",
        fingerprint="951a2782005bf3db",
        why="Collectives, control flow, and operators in which a capture failed are split off.",
    ),
    Seam(
        target="torch._inductor.compile_fx:get_cpp_wrapper_config",
        impl="torch_overlay._inductor.relaunch.hooks:get_cpp_wrapper_config",
        patch="inductor-relaunch",
        fingerprint="fc27aadbd78bf7b3",
        why="C++ wrappers turn CUDA graphs off before any code asks for one; that is told like all other refusals.",
    ),
    Seam(
        target="torch._inductor.lowering:",
        impl="torch_overlay._inductor.relaunch.lowerings:register",
        kind="register",
        patch="inductor-relaunch",
        why="The backward of memory-efficient attention reads its seeds on the host unless it is captured, but a graph "
        "of its forward leaves them on the device. torch.cond takes the CUDA graph from the whole function. An "
        "operator that writes to a view in a different type gets a copy, whose numbers are written back for its bits.",
        ends="the operator takes its seeds where they are, torch.cond is split off alone, and views write bits",
    ),
)

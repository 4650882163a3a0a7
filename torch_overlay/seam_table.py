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
        description="The decorators that later patches put above upstream functions, the configuration module, and "
        "the log name. No behaviour changes.",
    ),
    Patch(
        slug="inductor-cache-key",
        subject="Stream placement is part of the compile cache keys",
        description="A graph's keys in the FX graph cache and the AOTAutograd cache ignore FX node metadata, and so "
        "the stream that a node was placed on: code compiled for one placement is served to another.",
    ),
    # ---- new patches go above this one: it takes the modules that no seam reaches
    Patch(
        slug="overlay-tools",
        subject="Tools of torch._overlay: the simulated GPU and what else no hook needs",
        description="Modules that compile and check stream programs without a GPU. Nothing in torch imports them.",
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
        description="A planner emits the fewest events that order what the schedule placed on several streams, delays frees "
        "until the memory's stream is ordered behind every access, and switches the current stream only for lines that read it.",
        upstream="not sent yet; fixes the causes of pytorch#178549, #186023, #194234",
    ),
)

SEAMS: tuple[Seam, ...] = (
    # ---- overlay form only
    Seam(
        target="torch._dynamo.trace_rules:",
        impl="torch_overlay._engine.skip_files:register",
        kind="register",
        patch=None,
        fingerprint="",
        why="Dynamo must not trace the overlay's own frames. In the patched form they lie in torch/ and are skipped.",
    ),
    # ---- overlay-core
    Seam(
        target="torch._logging._registrations:",
        impl="torch_overlay._logging:register",
        kind="register",
        patch="overlay-core",
        fingerprint="",
        why='TORCH_LOGS="torch_overlay" and torch._logging.set_logs know the log name.',
        ends="the code's modules log under names that upstream already registers",
    ),
    # ---- inductor-cache-key
    Seam(
        target="torch._inductor.codecache:FxGraphHashDetails.__init__",
        impl="torch_overlay._inductor.cache_key:hash_details_init",
        kind="wrap",
        patch="inductor-cache-key",
        fingerprint="97568663a99c86d1",
        why="Compile cache keys must contain the overlay's version and configuration, and the stream of each node.",
        ends='upstream adds node.meta["custom"] to FxGraphHashDetails',
    ),
    # ---- aot-stream-placement
    Seam(
        target="torch._functorch._aot_autograd.streams:wrap_all_sync_nodes_with_control_deps",
        impl="torch_overlay._functorch.stream_placement:wrap_all_sync_nodes",
        kind="wrap",
        patch="aot-stream-placement",
        fingerprint="91585ff4694121db",
        why="Threading values through control_deps breaks mutation, partitioning and CUDA graphs; placement and tokens replace it.",
        upstream="pytorch#197416, #195573, #187695",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._functorch._aot_autograd.streams:insert_backward_syncs",
        impl="torch_overlay._functorch.stream_placement:skip_pass",
        kind="wrap",
        patch="aot-stream-placement",
        fingerprint="f9b0c513811477fe",
        why="The planner orders the backward from its data dependencies.",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._functorch._aot_autograd.streams:sync_deallocations",
        impl="torch_overlay._functorch.stream_placement:skip_pass",
        kind="wrap",
        patch="aot-stream-placement",
        fingerprint="3fd239a154b6e472",
        why="The planner delays frees; no node keeps a tensor alive.",
        upstream="pytorch#168061",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._functorch._aot_autograd.streams:get_stream_or_current_stream",
        impl="torch_overlay._functorch.stream_placement:stream_or_ambient",
        kind="wrap",
        patch="aot-stream-placement",
        fingerprint="7baf07ae3af0231d",
        why="A node without a stream runs on index 0; upstream registers a new stream object at each question.",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._functorch._aot_autograd.streams:populate_fw_metadata_with_stream_indices",
        impl="torch_overlay._functorch.stream_placement:populate_stream_indices",
        kind="wrap",
        patch="aot-stream-placement",
        fingerprint="b1e2f744c677eecc",
        why="Mutations written back by the caller are joined into the ambient stream, where upstream raises.",
        ends="the patch is merged",
    ),
    # ---- inductor-stream-planner
    Seam(
        target="torch._inductor.graph:GraphLowering.run_node",
        impl="torch_overlay._inductor.stream_lowering:run_node",
        kind="wrap",
        patch="inductor-stream-planner",
        fingerprint="052e4e829c394e0c",
        why="Values promised to a visible stream operation become buffers before it.",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._inductor.scheduler:Scheduler.compute_dependencies",
        impl="torch_overlay._inductor.stream_lowering:compute_dependencies",
        kind="wrap",
        patch="inductor-stream-planner",
        fingerprint="d1a3f9dd1c477080",
        why="Visible stream operations have no tensors; their order is added as scheduling dependencies.",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._inductor.scheduler:Scheduler._codegen",
        impl="torch_overlay._inductor.stream_regions:codegen",
        kind="wrap",
        patch="inductor-stream-planner",
        fingerprint="37b31c21e9fbd411",
        why="Plans the final schedule of a region and emits the plan.",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._inductor.scheduler:Scheduler._codegen_partitions",
        impl="torch_overlay._inductor.stream_regions:codegen_partitions",
        kind="wrap",
        patch="inductor-stream-planner",
        fingerprint="3145d5590c394ee0",
        why="Captured partitions order their streams against the ambient stream; the caller's streams are joined around them.",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._inductor.scheduler:Scheduler.enter_context",
        impl="torch_overlay._inductor.stream_codegen:enter_context",
        kind="wrap",
        patch="inductor-stream-planner",
        fingerprint="b468f5af0309786c",
        why="Called before each node: the place of the plan's records and waits.",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._inductor.scheduler:Scheduler.generate_stream_ctx_switching",
        impl="torch_overlay._inductor.stream_codegen:generate_stream_ctx_switching",
        kind="wrap",
        patch="inductor-stream-planner",
        fingerprint="b6221bb2a3ee3b8c",
        why="A planned region switches the current stream per line that reads it, not per node.",
        upstream="pytorch#194234",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._inductor.scheduler:Scheduler.get_buf_stream",
        impl="torch_overlay._inductor.stream_codegen:get_buf_stream",
        kind="wrap",
        patch="inductor-stream-planner",
        fingerprint="c36fd438234d3139",
        why="The stream of a buffer's memory; upstream loses it through mutation renames.",
        upstream="pytorch#178549",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._inductor.scheduler:Scheduler.has_cross_stream_hazard",
        impl="torch_overlay._inductor.stream_codegen:has_cross_stream_hazard",
        kind="wrap",
        patch="inductor-stream-planner",
        fingerprint="06ebf5ca248de23b",
        why="In-place reuse must also wait for readers on other streams.",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._inductor.codegen.wrapper:PythonWrapperCodegen.codegen_device_guard_enter",
        impl="torch_overlay._inductor.stream_codegen:codegen_device_guard_enter",
        kind="wrap",
        patch="inductor-stream-planner",
        fingerprint="c888a33da3631434",
        why="A planned region looks its streams up once, at its entry.",
        upstream="pytorch#186023",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._inductor.codegen.wrapper:PythonWrapperCodegen.codegen_free",
        impl="torch_overlay._inductor.stream_codegen:codegen_free",
        kind="wrap",
        patch="inductor-stream-planner",
        fingerprint="1952ca3742b1b66b",
        why="A buffer that another stream uses is freed when its own stream is ordered behind that use.",
        upstream="pytorch#178549",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._inductor.codegen.wrapper:PythonWrapperCodegen.generate_fallback_kernel",
        impl="torch_overlay._inductor.stream_codegen:generate_fallback_kernel",
        kind="wrap",
        patch="inductor-stream-planner",
        fingerprint="3f2ee9441f809175",
        why="Visible records and synchronisations are direct calls, not operators.",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._inductor.codegen.wrapper:PythonWrapperCodegen.write_get_raw_stream",
        impl="torch_overlay._inductor.stream_codegen:write_get_raw_stream",
        kind="wrap",
        patch="inductor-stream-planner",
        fingerprint="1962d0e17d3c94c4",
        why="A launch takes the raw handle of its own stream.",
        ends="the patch is merged",
    ),
    Seam(
        target="torch._inductor.codegen.wrapper:PythonWrapperCodegen.run_wrapper_ir_passes",
        impl="torch_overlay._inductor.stream_codegen:run_wrapper_ir_passes",
        kind="wrap",
        patch="inductor-stream-planner",
        fingerprint="14cd7bf4eed20798",
        why="Switches of the current stream are placed when memory planning has decided which allocations remain.",
        ends="the patch is merged",
    ),
)

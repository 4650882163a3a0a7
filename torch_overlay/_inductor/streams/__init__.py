"""Streams in Inductor: from placed FX nodes to a plan of events, and from the plan to generated code.

Begin with `planner`, which is pure: `plan` in, events out. In the order in which a graph meets them:

    fx_passes, copies_in_place, host_copies   keep the placement through passes over the FX graph
    lowering                                  lower it, with the user's visible operations in their order
    single_stream                             decide what runs on which stream after all
    reader, parts                             read the final schedule
    planned_region, codegen                   where regions begin and end; upstream's functions that ask
    emitter, switching, region_names          write the plan into the wrapper's lines
    graph_facts                               facts of the whole graph; for the backward, whose memory saved values are
    region_spec, runtime                      a region's boundary as data; what generated code calls
"""

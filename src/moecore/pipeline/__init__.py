"""Pipeline parallelism: which stage has which layers, and which rank runs what and when.

layout string -> PipelineLayout     (name, pp, chunks, micro-batches) -> Schedule -> Timeline
"""

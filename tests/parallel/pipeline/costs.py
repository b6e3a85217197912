from moecore.parallel.pipeline.layout import LayoutCosts, PipelineLayout


def sum_stages(costs: LayoutCosts, layout: PipelineLayout) -> tuple[float, ...]:
    """Return the summed cost of each stage of a layout."""
    return tuple(
        costs.embedding * stage.embedding
        + sum(costs.layers[layer] for layer in stage.layers)
        + sum(costs.mtp[module] for module in stage.mtp)
        + costs.loss * stage.loss
        for stage in layout.stages
    )

"""PipelineConfig: how a model is cut into stages, and in which order they run. A record alone."""

from __future__ import annotations

from dataclasses import dataclass

from moecore.base.fields import CheckedRecord, Count, Rules
from moecore.base.options.names import ScheduleName
from moecore.parallel.pipeline.layout import PipelineLayout, even_layout, parse_layout
from moecore.parallel.pipeline.orders import DEFERRING, RULES


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig(CheckedRecord):
    """Stages of a model over `ParallelConfig.pp` ranks, and the order of their micro-batches.

    Attributes:
        layout: what each stage runs, such as "Et*3|(tt|)*29m|L": E embedding, t a layer, m a
            multi-token prediction module, L head and loss, | the border of two stages; ()
            groups, *n repeats. None = layers as even as they divide, over `chunks` stages per rank,
            and none of them begins with a layer that reads more than hidden states.
        chunks: stages per rank; None = those of the layout, or of a schedule in a V two, else one.
        schedule: the order of forwards and backwards, see docs/pipeline.md.
    """

    layout: str | None = None
    chunks: Count | None = None
    schedule: ScheduleName = "1f1b"

    def _rules(self) -> Rules:
        if self.layout is not None and self.chunks is not None:
            yield "chunks", f"be None with a layout ({self.layout!r}), which has them: drop one"

    @property
    def defers(self) -> bool:
        """Whether weight gradients are computed apart from those of inputs."""
        return self.schedule in DEFERRING

    def stages(
        self, pp: int, num_layers: int, num_mtp_layers: int = 0, bound: frozenset[int] = frozenset()
    ) -> PipelineLayout:
        """Return the stages of a model over pp ranks; `bound` is `StageParts.bound`.

        Raises:
            ValueError: when the layout is not one of this model.
        """
        if self.layout is not None:
            return parse_layout(self.layout, num_layers=num_layers, num_mtp_layers=num_mtp_layers)
        chunks = self.chunks or RULES[self.schedule].chunks or 1
        return even_layout(
            num_layers, num_stages=pp * chunks, num_mtp_layers=num_mtp_layers, bound=bound
        )

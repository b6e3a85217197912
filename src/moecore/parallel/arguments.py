"""Arguments of forwards, compared by the ranks that compute parts of the same rows.

tp, cp and pp ranks of a data rank each take their part of the rows that all of them are given.
Other tokens, documents or labels on one of these ranks give a wrong gradient and no error, so
the first forward with gradients compares the arguments, and so does each one of new shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moecore.base.agreement import comparable, difference, raise_on_others
from moecore.base.failures import known_to_others
from moecore.base.torch_names import is_inside, tree_leaves
from moecore.parallel.attached import Attached

COMPARED = "the comparison of new shapes of rows, which ranks take by meshes.data_rank"
OF_OWN_TOKENS = "hidden"  # argument of a native decoder's stage, not the same on all these ranks


class SharedArguments:
    """Raises where ranks that share rows are given other arguments."""

    def __init__(
        self,
        groups: Mapping[int, dist.ProcessGroup | None],
        stages: dist.ProcessGroup | None,
        device_type: str,
    ) -> None:
        self._groups, self._stages, self._device_type = groups, stages, device_type
        self._seen: set[str] = set()  # shapes of forwards that were compared

    def check(self, arguments: Mapping[str, Any], cp: int | None) -> None:
        """Raise where arguments of a forward, or of all micro-batches of a pipeline, differ."""
        # Where shapes are new it is collective over the ranks that share the rows, and has host
        # syncs. The first time it is collective over the world, so that all ranks raise.
        if is_inside() or not torch.is_grad_enabled():
            return
        shapes = repr({name: _shapes(value) for name, value in arguments.items()})
        if shapes in self._seen:
            return
        arguments = {n: value for n, value in arguments.items() if n != OF_OWN_TOKENS}
        is_first = not self._seen
        self._seen.add(shapes)
        values = {name: [comparable(x) for x in tree_leaves(v)] for name, v in arguments.items()}
        entries = {"names of arguments": list(arguments), "value": values}
        groups = [self._stages, self._groups.get(cp or 0, self._groups[0])]
        with known_to_others(COMPARED):  # ranks without new shapes compare nothing
            found = [
                difference(entries, self._device_type, group=g) for g in groups if g is not None
            ]
        problem = next((one for one in found if one is not None), None)
        if problem is not None:
            problem += (
                " on ranks that share rows (tp, cp, pp): seed and shard data by meshes.data_rank "
                "of meshes.data_ranks"
            )
        if is_first:
            raise_on_others(problem, self._device_type)
        elif problem is not None:
            raise ValueError(problem)

    def before_forward(self, _model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Forward pre-hook of the model."""
        if not torch.compiler.is_compiling():
            named = {f"argument {place}": value for place, value in enumerate(args)}
            self.check({**named, **kwargs}, kwargs.get("cp"))

    def before_schedule(self, micro_batches: Sequence[Mapping[str, Any]]) -> None:
        """Compare the micro-batches of a pipeline."""
        named = {
            f"micro_batches[{place}].{name}": value
            for place, inputs in enumerate(micro_batches)
            for name, value in inputs.items()
        }
        self.check(named, None)


def _shapes(value: Any) -> list[str]:
    """Return dtypes of tensors, and shapes of rows: `cu_seqlens` have new ones all the time."""
    found = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    return [f"{x.dtype} {tuple(x.shape) if x.ndim > 1 else x.ndim}" for x in found]


def compare_arguments(model: nn.Module, found: Attached) -> None:
    """Let forwards of a model, or runs of its stages, compare what ranks were given."""
    meshes = found.request.meshes
    groups = {0: meshes.micro_batch_group, **found.shared_by}
    stages = None if meshes.pipeline_groups is None else meshes.pipeline_groups[0]
    if stages is None and not any(groups.values()):
        return
    found.arguments = SharedArguments(groups, stages, meshes.device_type)
    if stages is None:  # else `run_pipeline` calls the model stage by stage
        hook = found.arguments.before_forward
        model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

"""stream_weights: the unsharded tensors of a model with Hugging Face names, in buckets.

A stream plans once which tensors there are and which ranks have their shards. Each pass computes
digests of the weights and then assembles one bucket after another on every rank. A separate CUDA
stream runs the collectives of the next bucket before the caller receives the current bucket, so two
buckets exist at a time. If a rank fails, leaves its loop, or has changed weights, the pass ends
with an error on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from moecore.base.failures import RankError, explain_transport_errors, run_and_share_errors
from moecore.base.fields import NumBytes, check_arguments, format_name
from moecore.base.params import chunk_by_size
from moecore.base.rank_checks import Group, gather_objects
from moecore.families.transformers.lora import unwrap_peft
from moecore.io.checkpoint.ranks import ControlGroup, get_rank_and_world
from moecore.io.hf.buckets import BucketCollector, WeightBucket, WeightMeta, count_bucket_bytes
from moecore.io.hf.changes import Digests, WeightsVersion, list_local_storage
from moecore.io.hf.collect import Item, LocalPart, PartOwners, describe_local_part, read_shard_box
from moecore.io.hf.config_fields import HFConfig
from moecore.io.hf.export import check_export_dtype
from moecore.io.hf.export_plan import (
    ExportLayout,
    ExportPlan,
    collect_export_tensors,
    make_items,
    plan_export,
)
from moecore.io.hf.lora import StoredAdapter, collect_adapter_tensors
from moecore.io.hf.merge import Merge, find_merges, lacks_unmerged_adapters
from moecore.io.hf.pieces import FileRecipe, TensorPiece
from moecore.train.memory.streams import CopyStream

LoRA = Literal["merged", "apart"]
PASS = "a pass of a weight stream (of all ranks)"  # in error texts


def stream_weights(
    model: nn.Module,
    *,
    bucket_bytes: NumBytes = 1 << 30,
    dtype: torch.dtype | None = None,
    layout: ExportLayout = "per_expert",
    lora: LoRA = "merged",
    config: HFConfig | None = None,
) -> WeightStream:
    """Return a stream of a model's weights for any number of passes. Collective.

    The tensors have the names, shapes, dtypes and bits of the files that `export_hf` would write.
    The model does not change and may be trained between two passes.

    Args:
        model: as in `export_hf`; also a PeftModel with unmerged adapters.
        bucket_bytes: maximum bytes of a bucket and its message buffer; two buckets exist at a time.
            A larger tensor is the only tensor of its bucket.
        dtype, layout: as in `export_hf`.
        lora: "merged" streams the weights with the active adapters added, as `merge_adapters`
            computes them; "apart" streams the weights without adapters, then the tensors of the
            active adapter with peft's names.
        config: as in `export_hf`, but may be None for a native decoder, for the tensor names that
            all families except Mixtral share.

    Raises:
        ValueError: on every rank, as `export_hf`, or with `lora="apart"` unless
            exactly one adapter is active.
        NotImplementedError: as `export_hf`, or for adapters that `merge_adapters` does not merge.
    """
    check_arguments(stream_weights, locals())
    run_and_share_errors(lambda: check_export_dtype(dtype))
    plan = plan_export(model, config, dtype, layout, needs_config=False)
    entries = run_and_share_errors(lambda: _find_adapter(model, lora))
    pieces: dict[str, TensorPiece] = {}
    for of_rank in gather_objects({name: entry.piece for name, entry in entries.items()}):
        pieces |= of_rank
    if pieces:  # the active adapter's tensors follow the weights
        owners = PartOwners({name: entry.tensor for name, entry in entries.items()})
        recipes = {n: FileRecipe(owners.shapes[n], (piece,)) for n, piece in pieces.items()}
        items = make_items(owners.dtypes, recipes, {}, dtype, lambda _: False)
        plan = replace(plan, items=[*plan.items, *items], owners=plan.owners.merge(owners))
    return WeightStream(model, plan, bucket_bytes, lora)


def _find_adapter(model: nn.Module, lora: LoRA) -> dict[str, StoredAdapter]:
    """Return the active LoRA adapter's tensors, with their file pieces, by name; {} if "merged"."""
    if lora == "merged" or unwrap_peft(model) is model:
        return {}
    names: list[str] = cast(Any, model).active_adapters
    if len(names) != 1 or lacks_unmerged_adapters(model):
        raise ValueError(
            f"active adapters ({names}) must be one that is not merged to be given apart: choose "
            "one by set_adapter, or pass lora='merged'"
        )
    return collect_adapter_tensors(model, names[0])


class WeightStream:
    """Streams the Hugging Face tensors of a model in any number of passes (vLLM's `WeightSource`).

    If one rank iterates over a pass to its end, every rank must do so.

        for name, tensor in stream:      # a pass: every rank gets every tensor
            ...
        version = stream.version
        train()
        for name, tensor in stream.changed_since(version):
            ...

    The tensors of a bucket share one buffer, which exists as long as one of the tensors exists. If
    a rank leaves a pass early, the pass ends on all ranks when the rank closes its generator: use
    `break`, or `contextlib.closing(iter(stream))` if an exception may leave the loop.
    """

    def __init__(self, model: nn.Module, plan: ExportPlan, bucket_bytes: int, lora: LoRA) -> None:
        """Stream the tensors of `plan`; `bucket_bytes` and `lora` are as for `stream_weights`."""
        self._model, self._plan, self._lora = model, plan, lora
        self._items: list[Item] = plan.items
        self._control = ControlGroup()  # shared by the results of `changed_since`
        self._collector = BucketCollector(
            plan.owners, plan.items, plan.device, bucket_bytes // 4, self._control.group
        )
        self._max_bytes = max(1, bucket_bytes - self._collector.capacity)  # of a bucket
        self._digests = Digests()
        self._parts: dict[str, LocalPart] | None = None  # of the tensors in the first pass
        self._expected_digests: dict[str, Any] | None = None  # None = any weights
        self._version: WeightsVersion | None = None

    @property
    def version(self) -> WeightsVersion:
        """The version (digests) of the weights in the last pass that all ranks completed."""
        if self._version is None:
            raise ValueError("version (None) must be of a pass to its end: iterate first")
        return self._version

    @property
    def device(self) -> torch.device:
        """The device of the streamed tensors."""
        return self._plan.device

    def metadata(self) -> list[WeightMeta]:
        """Return name, dtype and shape of each streamed tensor, in order. No communication."""
        return [WeightMeta(item.name, item.dtype, item.shape) for item in self._items]

    def changed_since(self, version: WeightsVersion) -> WeightStream:
        """Return a stream of the tensors that may have changed since `version`. Collective.

        If the weights change before a pass of the new stream, the pass raises ValueError. The
        new stream's `version` also covers the weights that it does not send.

        Raises:
            ValueError: on every rank, if `version` is from another stream, or as `buckets`.
        """

        def begin() -> _StreamPass:
            check_arguments(WeightStream.changed_since, {"version": version})
            if version.owner is not self._digests:
                raise ValueError(
                    "version (of another stream) must be one that this stream has returned: send "
                    "all weights once"
                )
            return self._begin_pass()

        with explain_transport_errors(PASS):
            digests = run_and_share_errors(begin, self._control.group).digests
            names = {n for n, d in digests.items() if version.digests.get(n) != d}
            changed = set[str]().union(*gather_objects(names, self._control.group))
        stream = copy.copy(self)
        stream._items = [i for i in self._items if any(name in changed for name, _ in i.parts)]
        stream._expected_digests, stream._version = digests, None
        return stream

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor), on the model's device. Collective; raises as `buckets`."""
        with self._run_pass() as run:
            run.launch_bucket()
            while (bucket := run.take_bucket()) is not None:
                tensors = bucket.tensors()
                del bucket
                yield next(tensors)
                run.launch_bucket()  # the caller has no tensor of the previous bucket any more
                yield from tensors
                del tensors

    def buckets(self) -> Generator[WeightBucket]:
        """Yield the buckets of a pass. Collective.

        Delete a bucket before requesting the next, otherwise three buckets exist at a time.

        Raises:
            ValueError: on every rank, if the model's tensors have other shapes, dtypes or shards
                than in the first pass, their memory is offloaded, or another pass is open.
            RuntimeError: on every rank, if a rank left the pass, or after the last bucket if
                weights changed during the pass. Training can continue.
        """
        with self._run_pass() as run:
            run.launch_bucket()
            while (bucket := run.take_bucket()) is not None:
                run.launch_bucket()
                yield bucket
                del bucket

    @contextmanager
    def _run_pass(self) -> Iterator[_StreamPass]:
        """Return the context of a pass, which ends with RuntimeError if weights changed."""
        with explain_transport_errors(PASS):
            run = run_and_share_errors(self._begin_pass, self._control.group)
        with self._collector.open_pass():
            try:
                yield run
            except GeneratorExit:
                run.end_early()
                raise
            with explain_transport_errors(PASS):
                run_and_share_errors(lambda: self._check_unchanged(run), self._control.group)
        self._version = WeightsVersion(run.digests, self._digests)

    def _begin_pass(self) -> _StreamPass:
        """Compute the digests of the current weights and return a new pass."""
        base = unwrap_peft(self._model)
        tensors = collect_export_tensors(base, self._plan.values)
        tensors |= {n: a.tensor for n, a in _find_adapter(self._model, self._lora).items()}
        parts = {name: describe_local_part(tensor) for name, tensor in tensors.items()}
        self._parts = self._parts or parts
        if parts != self._parts:
            raise ValueError(
                "model (changed) must hold the same parts of the same tensors in every pass: make "
                "a new stream"
            )
        merges = find_merges(self._model) if self._lora == "merged" else []
        by_weight = {id(merge.weight): merge for merge in merges}
        merge_of = {n: by_weight[id(t)] for n, t in tensors.items() if id(t) in by_weight}
        buckets = chunk_by_size(self._items, count_bucket_bytes, self._max_bytes)
        run = _StreamPass(tensors, merge_of, buckets, self._collector, self._control.group)
        for name in tensors:
            shards = (shard for x in run.list_inputs(name) for shard in list_local_storage(x))
            if any(shard.numel() and not shard.untyped_storage().nbytes() for shard in shards):
                raise ValueError(
                    f"{format_name(name)} (without memory) must have its values to be streamed: "
                    "call onload('weights') first"
                )
        run.digests = self._compute_digests(run, tensors)
        if self._expected_digests not in (None, run.digests):
            raise ValueError(
                "weights (changed) must be those of the call of changed_since: call it again"
            )
        return run

    def _check_unchanged(self, stream_pass: _StreamPass) -> None:
        """Raise RuntimeError if tensors changed during the pass `stream_pass`. Host sync."""
        self._collector.raise_error()
        names = {name for item in self._items for name, _ in item.parts}
        digests = self._compute_digests(stream_pass, names & stream_pass.tensors.keys())
        if any(stream_pass.digests[name] != digest for name, digest in digests.items()):
            raise RuntimeError(
                "weights (changed) must stay as they are while a stream of them is open: end the "
                "stream before the optimizer's step, and begin a new one"
            )

    def _compute_digests(self, stream_pass: _StreamPass, names: Iterable[str]) -> dict[str, Any]:
        """Return, by name, a tuple of each tensor's digest and then its LoRA scaling factors."""
        digests = self._digests.compute({name: stream_pass.list_inputs(name) for name in names})
        factors = {n: merge.list_scaling_factors() for n, merge in stream_pass.merges.items()}
        return {n: (*digest, factors.get(n, ())) for n, digest in digests.items()}


class _PassExit(RuntimeError):
    """Raised on every rank if the rank `args[0]` left a pass before its end."""

    def __str__(self) -> str:
        return f"rank {self.args[0]} has left a stream of weights before its end"


class _StreamPass:
    """One pass over the buckets of a stream; the next bucket is prefetched."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        merges: Mapping[str, Merge],
        buckets: Iterator[list[Item]],
        collector: BucketCollector,
        group: Group,
    ) -> None:
        """`buckets` yields lists of items, whose values are read from `tensors` with `merges`."""
        self.tensors, self.merges, self._collector, self._group = tensors, merges, collector, group
        self.digests: dict[str, Any] = {}
        self._copies = CopyStream(collector.device)
        self._merged_weights: dict[str, Tensor] = {}  # copies with adapters added, by source
        self._remaining = buckets
        self._next_bucket: tuple[WeightBucket | None, Any] | None = None

    def list_inputs(self, name: str) -> list[Tensor]:
        """Return the tensors from which the streamed values of a weight are computed."""
        merge = self.merges.get(name)
        return [self.tensors[name], *(() if merge is None else merge.list_tensors())]

    def launch_bucket(self) -> None:
        """Launch the collectives of the next bucket on the copy stream, if a bucket remains."""
        items = next(self._remaining, None)
        if items is None:
            return
        self._copies.wait_for_current_stream()
        with torch.no_grad(), self._copies.use_next_stream(), explain_transport_errors(PASS):
            self._update_merged_weights({name: None for item in items for name, _ in item.parts})
            bucket = self._collector.collect_bucket(items, self._read)
        self._next_bucket = bucket, self._copies.record_event()

    def take_bucket(self) -> WeightBucket | None:
        """Return the launched bucket once all ranks agree; None at the end. Collective."""
        if self._next_bucket is None:
            return None
        with explain_transport_errors(PASS):
            run_and_share_errors(self._collector.raise_error, self._group)
        (bucket, event), self._next_bucket = self._next_bucket, None
        self._copies.wait_for_event(event)
        return bucket

    def end_early(self) -> None:
        """End the pass early: the next `take_bucket` of every other rank raises an error."""
        rank, _ = get_rank_and_world()

        def fail() -> None:
            raise _PassExit(rank)

        # RankError: the other ranks have ended.
        with suppress(RankError, _PassExit), explain_transport_errors(PASS):
            if self._next_bucket is None:
                self.launch_bucket()  # the other ranks have launched it too
            self._copies.synchronize()
            run_and_share_errors(fail, self._group)

    def _update_merged_weights(self, names: Iterable[str]) -> None:
        """Add LoRA adapters to copies of the named weights; free all other copies. Collective."""
        before, self._merged_weights = self._merged_weights, {}
        for name in names:
            if name in before:
                self._merged_weights[name] = before[name]
            elif name in self.merges:
                tensor = self.tensors[name]
                local = read_shard_box(tensor, (slice(None),) * tensor.ndim).clone()
                self.merges[name].add(local)
                self._merged_weights[name] = local

    def _read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Return a box of this rank's shard, with the weight's adapters added."""
        weight = self._merged_weights.get(name)
        return read_shard_box(self.tensors[name], box) if weight is None else weight[box]

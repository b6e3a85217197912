"""Tensor parallelism with sequence parallelism: what ranks exchange, and how weights are cut.

Legend: B sequences, T tokens of a sequence, G tp ranks, t = T / G tokens of one rank, D model dim.

Outside of attention and dense MLPs every tp rank works on its own t tokens of each sequence. Those
two gather the sequence, compute their slice of the heads or hidden dim for all tokens, and send
every rank the sum of the partial results for its own tokens:

    x_BtD -> gather -> x_BTD -> q/k/v, attention, o_proj -> partial y_BTD -> scatter_sum -> y_BtD

Latent attention gathers its latents instead, which each rank makes of its own tokens (see mla.py).

So norms, router and shared experts need no communication; their weights are whole on each tp rank,
and their gradients are partial sums over tp (`moecore.base.params.local_param`). Embedding and head
are cut over the vocabulary: a rank looks up or multiplies its rows for all tokens,

    tokens_BT -> own rows, else 0 -> scatter_sum -> x_BtD ... x_BtD -> gather -> own logits_BTv

and the loss needs three numbers per token of each rank (`loss.py`).

A gradient on one rank is that of the sum of all ranks' losses with respect to what the rank holds;
each exchange below is the transpose of itself under that reading.

Source: Megatron sequence parallelism (arXiv:2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moecore.base.params import shard_parameter
from moecore.base.peft_layers import is_tuner_layer, lora_base, lora_pairs
from moecore.base.regions import run_and_save
from moecore.base.torch_private import is_gloo, is_silent
from moecore.models.config import DecoderConfig
from moecore.moe.dispatch.collectives import exchanged, gather_ranks, sum_ranks
from moecore.moe.dispatch.peer_memory import find_peer_problem
from moecore.moe.layer import MoELayer


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place among the tp ranks, and the exchanges between them.

    Every method is a collective unless its docstring excludes it.
    """

    group: dist.ProcessGroup
    rank: int
    size: int  # G

    @cached_property
    def peer_problem(self) -> str | None:
        """Why GPUs cannot read each other's memory, or None; the first look has host syncs."""
        if is_gloo(self.group, "cuda"):
            return "must have NCCL, and so a GPU for each rank"
        return find_peer_problem(self.group)

    def local_slice(self, x_BT: Tensor) -> Tensor:
        """Return this rank's slice of dim 1, contiguous. No communication."""
        self._check(x_BT)
        size = x_BT.shape[1] // self.size
        return x_BT.narrow(1, self.rank * size, size).contiguous()

    def gather(self, x_BtD: Tensor) -> Tensor:
        """Return x_BTD, all ranks' tokens; backward adds what all ranks did with this rank's."""
        x_BTD: Tensor = run_and_save(_gather, x_BtD, self.group)
        return x_BTD

    def gather_last(self, x_BTv: Tensor) -> Tensor:
        """Return x_BTV, all ranks' columns, of any dims before; backward as of `gather`."""
        parts_GNv = self.gather(x_BTv.reshape(1, 1, -1, x_BTv.shape[-1]))[0]
        return parts_GNv.transpose(0, 1).reshape(*x_BTv.shape[:-1], -1)

    def local_rows(self, ids_BT: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return rows of this rank's part of a vocabulary, and which ids are of other parts.

        Ids of other parts are row 0. A part has `num_rows` rows. No communication.

        Raises:
            ValueError: on a CPU for ids outside of the vocabulary; a GPU's lookup asserts.
        """
        size = num_rows * self.size
        exists_BT = (ids_BT >= 0) & (ids_BT < size)
        is_seen = ids_BT.device.type == "cpu" and not torch.compiler.is_compiling()
        if is_seen and not exists_BT.all():  # on every rank alike
            raise ValueError(
                f"tokens ({int(ids_BT.min())} to {int(ids_BT.max())}) must be in "
                f"[0, vocab_size {size}): use the tokenizer of this model"
            )
        local_ids_BT = ids_BT - self.rank * num_rows
        elsewhere_BT = exists_BT & ((local_ids_BT < 0) | (local_ids_BT >= num_rows))
        return local_ids_BT.masked_fill(elsewhere_BT, 0), elsewhere_BT

    def scatter_sum(self, y_BTD: Tensor) -> Tensor:
        """Return y_BtD, this rank's tokens of the sum over ranks, added in fp32."""
        self._check(y_BTD)
        y_BtD: Tensor = run_and_save(_scatter_sum, y_BTD, self.group)
        return y_BtD

    def gather_replicated(self, x_BtD: Tensor) -> Tensor:
        """Return x_BTD for a result equal on all ranks; backward takes this rank's slice of it."""
        gather = partial(_gather, group=self.group)
        x_BTD: Tensor = run_and_save(exchanged, x_BtD, gather, self.local_slice)
        return x_BTD

    def gather_columns(self, x_BTv: Tensor) -> Tensor:
        """Return x_BTV, as `gather_replicated` does of dim 1."""
        return self.gather_replicated(x_BTv.transpose(1, 2)).transpose(1, 2).contiguous()

    def _check(self, x_BT: Tensor) -> None:
        if x_BT.shape[1] % self.size:
            raise ValueError(
                f"sequence length ({x_BT.shape[1]}) must be a multiple of tp ({self.size}): "
                "pad the sequences"
            )

    def sum_shared(self, value: Tensor) -> Tensor:
        """Return the sum over ranks, which each uses in its own way; backward adds gradients."""
        add = partial(_all_reduce, group=self.group)
        total: Tensor = run_and_save(exchanged, value, add, add)
        return total


def sum_value(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks; this rank's gradient is that of its own part. Collective."""
    add = partial(_all_reduce, group=group)
    total: Tensor = run_and_save(exchanged, value, add, lambda grad: grad)
    return total


def apply_tensor_parallel(model: nn.Module, config: DecoderConfig, tp_mesh: DeviceMesh) -> None:
    """Cut the dense parameters of a decoder over tp, in place. No communication."""
    # A module that names its cut (`tp_shard_dim`) has its weight sharded on that dim, and a bias
    # with the weight's rows, and factors of peft's LoRA as their linear; every other parameter
    # becomes a replicated DTensor, except those of routed experts, which live on the expert mesh.
    # Modules with a `tp` attribute get the record that they exchange through.
    check_tensor_parallel(config, tp_mesh.size())
    if tp_mesh.size() == 1:
        return
    tp = TensorParallel(tp_mesh.get_group(), tp_mesh.get_local_rank(), tp_mesh.size())
    layers = [m for m in model.modules() if isinstance(m, MoELayer)]
    expert_modules = {m for layer in layers for m in layer.part("experts").modules()}
    factors = _factors(model, tp.size)
    for path, module in model.named_modules():
        if module in expert_modules:
            continue
        if hasattr(module, "tp"):
            module.tp = tp
        dim: int | None = factors.get(module, getattr(module, "tp_shard_dim", None))
        for name, param in list(module.named_parameters(recurse=False)):
            if isinstance(param, DTensor):
                raise ValueError(
                    f"parameter {path}.{name} ({param.placements}) must be whole before tensor "
                    "parallelism: call apply_tensor_parallel before fully_shard, and once"
                )
            placement = Replicate() if dim is None or dim >= param.ndim else Shard(dim)
            shard_parameter(module, name, tp_mesh, (placement,), reads_plain=module in factors)


def _factors(model: nn.Module, tp: int) -> dict[nn.Module, int | None]:
    """Return A and B of peft's LoRA -> the dim that is cut.

    Raises:
        NotImplementedError: for adapters that read all of a weight.
        ValueError: for dropout, which each rank would draw anew for equal tokens.
    """
    dims = dict[nn.Module, int | None]()
    for path, module in model.named_modules():
        if not is_tuner_layer(module):
            continue
        base = lora_base(module)
        if base is None:
            raise NotImplementedError(
                f"adapters of {path} ({type(module).__name__}) must be LoRA of linears without "
                f"DoRA and biases under ParallelConfig.tp ({tp}): change LoraConfig, or lower tp"
            )
        for part in module.modules():
            if isinstance(part, nn.Dropout) and part.p > 0:
                raise ValueError(
                    f"LoraConfig.lora_dropout ({part.p}) must be 0 under ParallelConfig.tp ({tp}), "
                    "whose ranks compute equal tokens: set it to 0"
                )
        # Outputs are of rows of W and B, inputs of columns of W and A.
        dim: int | None = getattr(base, "tp_shard_dim", None)
        for a, b in lora_pairs(module):
            dims |= {a: 1 if dim == 1 else None, b: 0 if dim == 0 else None}
    return dims


def check_tensor_parallel(config: DecoderConfig, tp: int) -> None:
    """Raise a ValueError that names the field of a decoder that tp does not divide."""
    names = ["num_heads", "num_kv_heads", "mlp_hidden_dim", "vocab_size"]
    if config.linear_attention is not None:
        names.append("linear_attention.num_k_heads")
    for name in names:
        value = attrgetter(name)(config)
        if value % tp:
            raise ValueError(
                f"DecoderConfig.{name} ({value}) must be a multiple of tp ({tp}): lower tp"
            )


def _gather(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' dim 1. With one sequence the result is the receive buffer itself."""
    parts_GBtD: Tensor = gather_ranks(x_BtD, group)
    parts_GBtD = parts_GBtD.unflatten(0, (group.size(), x_BtD.shape[0]))
    return parts_GBtD.transpose(0, 1).flatten(1, 2)


def _scatter_sum(y_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send rank g its tokens, dim 1, and add what the ranks send."""
    size = group.size()
    parts_GBtD = y_BTD.unflatten(1, (size, y_BTD.shape[1] // size)).transpose(0, 1)
    return sum_ranks(parts_GBtD.flatten(0, 1), group)


def _all_reduce(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    value = value.clone(memory_format=torch.contiguous_format)
    if not is_silent(value):
        dist.all_reduce(value, group=group)
    return value

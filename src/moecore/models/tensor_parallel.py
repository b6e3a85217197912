"""Tensor parallelism with sequence parallelism of the decoder: collectives and sharded weights.

Legend: B sequences, T tokens of a sequence, G tp ranks, t = T / G tokens of one rank, D model dim.

Outside of attention and dense MLPs every tp rank computes its t tokens of each sequence. Attention
and MLPs all-gather the sequence, compute their heads or hidden dims for all tokens, and
reduce-scatter the partial results:

    x_BtD -> gather -> x_BTD -> q/k/v, attention, o_proj -> partial y_BTD -> reduce_scatter -> y_BtD

Latent attention gathers the latents of each rank's tokens instead (see mla.py).

Norms, router and shared experts need no communication. Their weights are replicated over tp, and
their gradients are partial sums over tp (`moecore.base.params.get_local_param`). Embedding and head
are sharded over the vocabulary. A rank looks up or multiplies its rows for all tokens,

    tokens_BT -> own rows, else 0 -> reduce_scatter -> x_BtD ... x_BtD -> gather -> own logits_BTv

and the loss needs three numbers per token of each rank (`loss.py`).

A rank's gradient is the gradient of the sum of all ranks' losses with respect to the rank's local
tensor. Under this definition the backward of each collective below is its transpose.

Source: Megatron sequence parallelism (arXiv:2205.05198).
"""

from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moecore.base.params import shard_parameter
from moecore.base.peft_layers import find_lora_base, is_tuner_layer, list_lora_pairs
from moecore.base.regions import run_and_save
from moecore.base.torch_private import is_gloo, skips_communication
from moecore.models.config import DecoderConfig
from moecore.moe.dispatch.collectives import (
    all_gather_rows,
    exchange_with_grad,
    reduce_scatter_rows,
)
from moecore.moe.dispatch.peer_memory import find_peer_access_problem
from moecore.moe.layer import MoELayer


@dataclass(frozen=True)
class TensorParallel:
    """The tp process group, this rank's index in it, and the collectives of tensor parallelism.

    Every method is a collective unless its docstring says "No communication".
    """

    group: dist.ProcessGroup
    rank: int
    size: int  # G

    @cached_property
    def peer_problem(self) -> str | None:
        """Why GPUs cannot read each other's memory, or None. Host sync at first access."""
        if is_gloo(self.group, "cuda"):
            return "must have NCCL, and so a GPU for each rank"
        return find_peer_access_problem(self.group)

    def slice_local_tokens(self, x_BT: Tensor) -> Tensor:
        """Return this rank's slice of dim 1 (T), contiguous. No communication."""
        self._check_divisible(x_BT)
        size = x_BT.shape[1] // self.size
        return x_BT.narrow(1, self.rank * size, size).contiguous()

    def gather_tokens(self, x_BtD: Tensor) -> Tensor:
        """All-gather x_BtD along dim 1 to x_BTD. Backward reduce-scatters the gradient."""
        x_BTD: Tensor = run_and_save(_all_gather, x_BtD, self.group)
        return x_BTD

    def gather_last_dim(self, x_BTv: Tensor) -> Tensor:
        """All-gather the last dim, sharded over tp. Backward reduce-scatters the gradient."""
        parts_GNv = self.gather_tokens(x_BTv.reshape(1, 1, -1, x_BTv.shape[-1]))[0]
        return parts_GNv.transpose(0, 1).reshape(*x_BTv.shape[:-1], -1)

    def find_local_rows(self, ids_BT: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """Map token ids to rows of this rank's shard of `num_rows` rows; return rows and a mask.

        The bool mask is True where another shard has the id; the row is 0 there. On CPUs an id
        outside of the vocabulary raises a ValueError. No communication.
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

    def reduce_scatter(self, y_BTD: Tensor) -> Tensor:
        """Reduce-scatter y_BTD along dim 1 to y_BtD, summed in fp32. Backward all-gathers."""
        self._check_divisible(y_BTD)
        y_BtD: Tensor = run_and_save(_reduce_scatter, y_BTD, self.group)
        return y_BtD

    def gather_replicated(self, x_BtD: Tensor) -> Tensor:
        """All-gather x_BtD to x_BTD, used identically on all ranks. Backward slices gradients."""
        gather = partial(_all_gather, group=self.group)
        x_BTD: Tensor = run_and_save(exchange_with_grad, x_BtD, gather, self.slice_local_tokens)
        return x_BTD

    def _check_divisible(self, x_BT: Tensor) -> None:
        if x_BT.shape[1] % self.size:
            raise ValueError(
                f"sequence length ({x_BT.shape[1]}) must be a multiple of tp ({self.size}): "
                "pad the sequences"
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over ranks. Backward all-reduces the gradient."""
        add = partial(_all_reduce, group=self.group)
        total: Tensor = run_and_save(exchange_with_grad, x, add, add)
        return total


def all_reduce_replicated(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce `x`, used identically on all ranks. Backward returns the gradient unchanged."""
    add = partial(_all_reduce, group=group)
    total: Tensor = run_and_save(exchange_with_grad, x, add, lambda grad: grad)
    return total


def apply_tensor_parallel(model: nn.Module, config: DecoderConfig, tp_mesh: DeviceMesh) -> None:
    """Shard the dense parameters of a decoder over the 1-D `tp_mesh` in place. No communication.

    Raises a ValueError if tp does not divide heads or dims, or for parameters that are DTensors.
    """
    # The weight and bias of a module with `tp_shard_dim` are sharded along this dim, and factors of
    # peft's LoRA as their linear. Other parameters become replicated DTensors, except routed
    # experts. Modules with an attribute `tp` get the `TensorParallel`.
    check_tensor_parallel(config, tp_mesh.size())
    if tp_mesh.size() == 1:
        return
    tp = TensorParallel(tp_mesh.get_group(), tp_mesh.get_local_rank(), tp_mesh.size())
    layers = [m for m in model.modules() if isinstance(m, MoELayer)]
    expert_modules = {m for layer in layers for m in layer.get_part("experts").modules()}
    loras = _find_lora_shard_dims(model, tp.size)
    for path, module in model.named_modules():
        if module in expert_modules:
            continue
        if hasattr(module, "tp"):
            module.tp = tp
        dim: int | None = loras.get(module, getattr(module, "tp_shard_dim", None))
        for name, param in list(module.named_parameters(recurse=False)):
            if isinstance(param, DTensor):
                raise ValueError(
                    f"parameter {path}.{name} ({param.placements}) must be whole before tensor "
                    "parallelism: call apply_tensor_parallel before fully_shard, and once"
                )
            placement = Replicate() if dim is None or dim >= param.ndim else Shard(dim)
            shard_parameter(module, name, tp_mesh, (placement,), reads_local_tensor=module in loras)


def _find_lora_shard_dims(model: nn.Module, tp: int) -> dict[nn.Module, int | None]:
    """Map the modules A and B of peft's LoRA to the dim that tp shards; None = replicated."""
    dims = dict[nn.Module, int | None]()
    for path, module in model.named_modules():
        if not is_tuner_layer(module):
            continue
        base = find_lora_base(module)
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
        # Output features are rows of W and B. Input features are columns of W and A.
        dim: int | None = getattr(base, "tp_shard_dim", None)
        for a, b in list_lora_pairs(module):
            dims |= {a: 1 if dim == 1 else None, b: 0 if dim == 0 else None}
    return dims


def check_tensor_parallel(config: DecoderConfig, tp: int) -> None:
    """Raise a ValueError if `tp` ranks do not divide the heads and dims of a decoder."""
    names = ["num_heads", "num_kv_heads", "mlp_hidden_dim", "vocab_size"]
    if config.linear_attention is not None:
        names.append("linear_attention.num_k_heads")
    for name in names:
        value = attrgetter(name)(config)
        if value % tp:
            raise ValueError(
                f"DecoderConfig.{name} ({value}) must be a multiple of tp ({tp}): lower tp"
            )


def _all_gather(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather [B, t, D] along dim 1 to [B, T, D]; for B = 1 it aliases the receive buffer."""
    parts_GBtD: Tensor = all_gather_rows(x_BtD, group)
    parts_GBtD = parts_GBtD.unflatten(0, (group.size(), x_BtD.shape[0]))
    return parts_GBtD.transpose(0, 1).flatten(1, 2)


def _reduce_scatter(y_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter [B, T, D] along dim 1 to [B, T / G, D], summed in fp32."""
    size = group.size()
    parts_GBtD = y_BTD.unflatten(1, (size, y_BTD.shape[1] // size)).transpose(0, 1)
    return reduce_scatter_rows(parts_GBtD.flatten(0, 1), group)


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a new tensor with the sum of `x` over the group. No autograd."""
    x = x.clone(memory_format=torch.contiguous_format)
    if not skips_communication(x):
        dist.all_reduce(x, group=group)
    return x

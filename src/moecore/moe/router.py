"""Router: chooses the experts of each token, and the weight of each choice.

    x_TD -> jitter -> logits_TE -> choice -> weights_TK -> padding and capacity -> Routing

Legend: T local tokens, N tokens of the micro-batch on all its ranks, D model dim, E experts
(including zero experts, which return their input), K experts per token (E with expert choice).

Logits, scores and weights are fp32 (or fp64) for any dtype of x: a rounded score may choose another
expert, and later stages cannot correct that choice. `parallelize_moe` excludes the router's weight
from mixed precision for the same reason. If scores are equal, the lower expert id wins.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moecore.base.options.layer import ASSIGNMENTS, MoEConfig
from moecore.base.params import derive_seed, get_local_param, init_normal_
from moecore.kernels.common import disable_autocast
from moecore.kernels.routing.margins import NUM_BINS, add_margins_, compute_even_bias
from moecore.kernels.routing.route import RouteOptions, route, route_weights
from moecore.kernels.routing.route_tokens import route_tokens
from moecore.kernels.routing.router_logits import router_logits, router_logits_ref
from moecore.kernels.routing.scores import compute_scores_ref
from moecore.moe.assignment import (
    choose_by_sinkhorn,
    choose_tokens_by_expert,
    mask_choices_within_capacity,
)
from moecore.moe.micro_batch import MicroBatch, compute_capacity, sort_by_position
from moecore.moe.records import ChoiceTape, Routing
from moecore.moe.selection_bias import BiasOwner

TABLE_ROWS = 8192  # of token ids that are given experts at once


class Router(BiasOwner):
    """Chooses K experts per token and their weights, from logits x @ weight^T.

    Parameters and buffers:
        weight: [E, D].
        bias: [E], with `config.router_bias`.
        expert_bias: buffer `expert_bias_name`, fp32 [E], with `config.expert_bias`. `move_bias_to`
            moves it to another module.
        token_experts: buffer `token_experts_name`, int64 [hash_vocab_size, K], with assignment
            "hash". Each row has distinct ids.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        expert_bias_name: str = "expert_bias",
        token_experts_name: str = "token_experts",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.options = _make_route_options(config)  # `set_config` changes no field of it
        self.expert_bias_name = expert_bias_name
        # In a tuple, because an attribute that is a module would become a child.
        self._bias_owner: tuple[BiasOwner] | None = None  # None = the router itself
        self.token_experts_name = token_experts_name
        self.tape: ChoiceTape | None = None
        # (T, E, K, device) -> int32 ids [T, K] for any scores; see moe/forced_routing.py.
        self.forced_ids: Callable[[int, int, int, torch.device], Tensor] | None = None
        E, D = config.num_candidates, config.dim
        self.weight = nn.Parameter(torch.empty(E, D, device=device, dtype=dtype))
        bias = torch.empty(E, device=device, dtype=dtype) if config.router_bias else None
        self.bias = None if bias is None else nn.Parameter(bias)
        if config.expert_bias:
            zeros_E = torch.zeros(E, device=device, dtype=torch.float32)
            self.register_bias(expert_bias_name, zeros_E)
        if config.assignment == "hash":
            shape = config.hash_vocab_size, config.top_k
            table = torch.empty(shape, device=device, dtype=torch.int64)
            self.register_buffer(token_experts_name, table)

    @property
    def selection_bias(self) -> Tensor | None:
        """The fp32 [E] buffer that is added to scores to choose experts; None without a bias."""
        bias_E = self.bias_owner._buffers.get(self.expert_bias_name)
        return bias_E if bias_E is None or bias_E.ndim == 1 else bias_E.view(-1)  # ERNIE: [1, E]

    @property
    def bias_owner(self) -> BiasOwner:
        """The module whose buffer is the selection bias; the router by default."""
        return self if self._bias_owner is None else self._bias_owner[0]

    def move_bias_to(self, new_owner: BiasOwner) -> None:
        """Move the selection bias to `new_owner`, as a buffer with the same name."""
        bias_E = self._buffers.pop(self.expert_bias_name)
        assert bias_E is not None
        self.bias_name, self._bias_owner = "", (new_owner,)
        new_owner.register_bias(self.expert_bias_name, bias_E)

    @property
    def is_collective_free(self) -> bool:
        """Whether a token's experts do not depend on other tokens: forward runs no collective."""
        is_rule_local = self.config.assignment in ("learned", "hash")
        has_micro_batch_bias = self.training and self.config.balance.bias_per_micro_batch
        return is_rule_local and self._get_capacity_factor() is None and not has_micro_batch_bias

    def init_weights(self, *, std: float, key: str, seed: int) -> None:
        """Draw the weight from N(0, std^2), zero the biases, and draw the hash table uniformly."""
        init_normal_(self.weight, std=std, key=f"{key}.weight", seed=seed)
        for tensor in (self.bias, self.selection_bias):
            if tensor is not None:
                nn.init.zeros_(tensor)
        table_VK = self._buffers.get(self.token_experts_name)
        if table_VK is not None:
            generator = torch.Generator().manual_seed(derive_seed(seed, f"{key}.token_experts"))
            options: Any = dict(generator=generator, device="cpu", dtype=torch.float32)
            for rows_vK in table_VK.split(TABLE_ROWS):
                scores_vE = torch.rand(len(rows_vK), self.config.num_experts, **options)
                rows_vK.copy_(scores_vE.topk(rows_vK.shape[1]).indices)

    def forward(self, x_TD: Tensor, micro_batch: MicroBatch | None = None) -> Routing:
        """Return the routing of x_TD. Collective unless `is_collective_free`. No host sync."""
        micro_batch = micro_batch or MicroBatch()
        config, width = self.config, self.config.router_jitter
        if width and self.training:
            x_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - width, 1 + width)
        is_fused = (
            config.assignment == "learned"
            and config.router_dtype != "float64"
            and self.tape is None
            and self.forced_ids is None
            and not (self.training and config.balance.bias_per_micro_batch)
        )
        with disable_autocast(x_TD):
            weight_ED = get_local_param(self.weight)
            bias_E = None if self.bias is None else get_local_param(self.bias)
            if is_fused:
                inputs = (self.selection_bias, self.options)
                logits_TE, ids_TK, weights_TK = route_tokens(x_TD, weight_ED, bias_E, *inputs)
            else:
                if config.router_dtype == "float64":
                    logits_TE = router_logits_ref(x_TD, weight_ED, bias_E, dtype=torch.float64)
                else:
                    logits_TE = router_logits(x_TD, weight_ED, bias_E)
                ids_TK, weights_TK = self._get_choices(logits_TE, micro_batch)
            if micro_batch.padding_mask_T is not None:
                ids_TK = ids_TK.masked_fill(micro_batch.padding_mask_T[:, None], -1)
            if self.tape is not None:
                self.tape.observe_choice(ids_TK)
            remaining_TK, capacity = self._drop_choices(ids_TK, weights_TK, micro_batch)
        return Routing(
            expert_ids_TK=remaining_TK,
            weights_TK=weights_TK,
            logits_TE=logits_TE,
            chosen_ids_TK=ids_TK,
            padding_mask_T=micro_batch.padding_mask_T,
            capacity=capacity,
            pad=config.capacity is not None and config.capacity.pad,
        )

    def _get_choices(self, logits_TE: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return int32 ids and fp32 weights [T, K], recorded by a `ChoiceTape` or chosen now."""
        if self.tape is None:
            return self._choose_experts(logits_TE, micro_batch)
        logits = logits_TE.detach()
        choices = self.tape.get_recorded_choice(
            len(logits), logits.device, lambda: self._choose_experts(logits, micro_batch)[0]
        )
        if choices is None:
            return self._choose_experts(logits_TE, micro_batch)
        ids_TK, recorded_TK = choices
        weights_TK = route_weights(logits_TE, ids_TK, self.options)
        if recorded_TK is not None:
            weights_TK = torch.where(recorded_TK < 0, weights_TK, recorded_TK)
        return ids_TK, weights_TK

    def _choose_experts(self, logits_TE: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return int32 ids and fp32 weights [T, K] by the config's rule, or by `forced_ids`."""
        options, choice = self.options, self.config.assignment
        if self.forced_ids is not None:
            T, E = logits_TE.shape
            ids_TK = self.forced_ids(T, E, self.config.top_k, logits_TE.device)
            return ids_TK, route_weights(logits_TE, ids_TK, options)
        if choice == "learned" or (choice == "sinkhorn" and not self.training):
            bias_E = self.selection_bias
            if bias_E is not None and self.training and self.config.balance.bias_per_micro_batch:
                compute: Any = compute_micro_batch_bias
                bias_E = compute(logits_TE, bias_E, self.config, micro_batch)
            return route(logits_TE, bias_E, options)
        with torch.no_grad():
            if choice == "hash":
                ids_TK = self._look_up_ids(logits_TE, micro_batch.token_ids_T)
            else:
                ids_TK = self._assign_experts(logits_TE, micro_batch).to(torch.int32)
        return ids_TK, route_weights(logits_TE, ids_TK, options)

    def _look_up_ids(self, logits_TE: Tensor, token_ids_T: Tensor | None) -> Tensor:
        """Return each token's experts in the hash table, int32 [T, K]."""
        T, table_VK = len(logits_TE), self._buffers[self.token_experts_name]
        assert table_VK is not None
        if token_ids_T is None and T == 0:
            return table_VK[:0].int()
        if token_ids_T is None or len(token_ids_T) != T:
            text = "None" if token_ids_T is None else f"{len(token_ids_T)} of them"
            raise ValueError(
                f"token_ids ({text}) must be those of the {T} tokens with assignment ('hash'): "
                "pass the ids that were embedded"
            )
        return F.embedding(token_ids_T, table_VK).int()  # indexing would accept the id -1

    def _assign_experts(self, logits_TE: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Return ids [T, K] by a rule that compares tokens: Sinkhorn, expert choice or a user's.

        An id is -1 if fewer than K experts choose the token.
        """
        config, E, K = self.config, self.config.num_experts, self.config.top_k
        logits_NE, padding_N = micro_batch.all_gather_rows(logits_TE), micro_batch.gather_padding()
        rule = ASSIGNMENTS[config.assignment]
        if config.assignment == "sinkhorn":
            rule = choose_by_sinkhorn
        if rule is not None:
            return micro_batch.slice_local_rows(rule(logits_NE, K, padding_N))
        scores_NE = compute_scores_ref(logits_NE, config.score_function)
        factor = self._get_capacity_factor() or 1.0
        _, capacity = compute_capacity(factor, scores_NE.shape[0], K, E, padding_N)
        return micro_batch.slice_local_rows(choose_tokens_by_expert(scores_NE, capacity, padding_N))

    def _drop_choices(
        self, ids_TK: Tensor, weights_TK: Tensor, micro_batch: MicroBatch
    ) -> tuple[Tensor, int | None]:
        """Return ids with -1 for choices above the capacity, and the capacity; None = no limit."""
        config, factor, K = self.config, self._get_capacity_factor(), self.config.top_k
        if factor is None:
            return ids_TK, None
        padding_N = micro_batch.gather_padding()
        N = ids_TK.shape[0] * micro_batch.num_ranks
        max_tokens, capacity = compute_capacity(factor, N, K, config.num_experts, padding_N)
        if config.assignment == "expert_choice" and self.tape is None:
            return ids_TK, max_tokens  # experts chose at most `capacity`; a tape may exceed it
        tokens_N = sort_by_position(
            N, micro_batch.num_sequences, padding_N, ids_TK.device, micro_batch.cu_seqlens
        )
        stays_NK = mask_choices_within_capacity(
            micro_batch.all_gather_rows(ids_TK),
            micro_batch.all_gather_rows(weights_TK),
            config.num_experts,
            capacity=capacity,
            drop_order="probability" if config.capacity is None else config.capacity.drop,
            tokens_N=tokens_N,
        )
        return ids_TK.masked_fill(~micro_batch.slice_local_rows(stays_NK), -1), max_tokens

    def _get_capacity_factor(self) -> float | None:
        """Return the capacity factor in the current mode, training or eval; None = no limit."""
        capacity, experts_choose = self.config.capacity, self.config.assignment == "expert_choice"
        if capacity is None:
            return 1.0 if experts_choose else None
        if self.training or (experts_choose and capacity.eval_factor is None):
            return capacity.factor
        return capacity.eval_factor


@torch.compiler.disable
@torch.no_grad()
def compute_micro_batch_bias(
    logits_TE: Tensor, bias_E: Tensor, config: MoEConfig, micro_batch: MicroBatch
) -> Tensor:
    """Return fp32 [E], the selection bias for even loads in this micro-batch. Collective."""
    histogram_EX = logits_TE.new_zeros(config.num_candidates, NUM_BINS, dtype=torch.int64)
    score_options = (config.top_k, config.score_function)
    add_margins_(histogram_EX, logits_TE, bias_E, *score_options, micro_batch.padding_mask_T)
    if micro_batch.group is not None:
        dist.all_reduce(histogram_EX, group=micro_batch.group)
    return compute_even_bias(histogram_EX, bias_E, config.top_k)


def choose_best_ids(logits_TE: Tensor, config: MoEConfig, padding_mask_T: Tensor | None) -> Tensor:
    """Return int32 [T, K]: experts with the best scores, without bias or groups; -1 = padding."""
    options = replace(_make_route_options(config), num_groups=1, top_groups=1)
    ids_TK, _ = route(logits_TE.detach(), None, options)
    return ids_TK if padding_mask_T is None else ids_TK.masked_fill(padding_mask_T[:, None], -1)


def _make_route_options(config: MoEConfig) -> RouteOptions:
    return RouteOptions(
        top_k=config.top_k,
        score_function=config.score_function,
        score_order=config.score_order,
        normalize=config.normalizes,
        scale=config.routed_scaling_factor,
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        group_experts=config.group_experts,
    )

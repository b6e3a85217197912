"""MoELayer: routes tokens to experts and returns the weighted sum of each token's experts.

    x_TD -> router -> Routing -> dispatch -> source rows [S, L] -> experts -> combine -> y_TD
    x_TD -> shared expert ------------------------------------------------ added to --> y_TD

No other file calls all four stages. `RoutedLayer` has the stages after the router: dispatch,
experts, combine and load counts. `MoELayer` adds a router. `RoutedExperts`
(`moe/routed_experts.py`) receives ids and weights from the model's router.

Legend: T local tokens, D model dim, L dim of the routed experts (D, or the latent dim), S source
rows after dispatch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from moecore.base.fields import (
    CheckedRecord,
    Count,
    Device,
    FloatDtype,
    PositiveOrZero,
    Seed,
    check_arguments,
)
from moecore.base.options.layer import BalanceConfig, MoEConfig
from moecore.base.torch_private import annotate_range, get_autocast_dtype
from moecore.kernels.rows.record import Rows
from moecore.moe.balance import LoadTracker
from moecore.moe.clones import Cloner
from moecore.moe.dispatch.local import LocalDispatcher
from moecore.moe.expert_layout import ExpertLayout
from moecore.moe.experts import Experts
from moecore.moe.micro_batch import MicroBatch
from moecore.moe.records import Dispatcher, ExpertInput, Routing, split_zero_experts
from moecore.moe.router import Router
from moecore.moe.selection_bias import BiasOwner, add_submodule, get_or_create_bias_owner
from moecore.moe.shared_experts import Latent, SharedExpert, SharedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLayout(CheckedRecord):
    """Names of the child modules of a model's MoE block; the defaults are moecore's names.

    Attributes:
        router, experts, shared: child module names; a dotted name creates empty parent modules.
        shared_gate: name of a child that maps [T, D] to the shared expert's gate logits [T, 1];
            "" = none (moecore's own shared expert contains its gate).
        expert_bias: name of the router's selection bias buffer.
        bias_owner: name of the submodule that has this buffer; "" = the layer, None = the router.
        token_experts: name of the router's table of experts by token id (assignment "hash").
        latent_down, latent_up: names of children that project [T, D] to [T, L] before dispatch and
            back after combine; "" = moecore's own `latent`, if the config has a latent dim.
        expert_layout: parameter names and order of dims of the experts.
    """

    router: str = "router"
    experts: str = "experts"
    shared: str = "shared"
    shared_gate: str = ""
    expert_bias: str = "expert_bias"
    bias_owner: str | None = None
    token_experts: str = "token_experts"
    latent_down: str = ""
    latent_up: str = ""
    expert_layout: ExpertLayout = field(default_factory=ExpertLayout)


class RoutedLayer(nn.Module):
    """Base class of MoE layers, with the stages after the router: dispatch, experts, combine."""

    config: MoEConfig
    dispatcher: Dispatcher  # `parallelize_moe` replaces the local one
    cloner: Cloner | None = None  # clones hot experts on other ranks
    # int32 [E + 1]: the slot of each expert in the stacked parameters, then -1; None = the model's
    # order. `train/expert_moves.py` sets it.
    slots_E1: Tensor | None = None
    tracker: LoadTracker  # counts loads and computes the auxiliary losses

    @property
    def runs(self) -> int:
        """Number of times that the layer runs in one forward of its model."""
        return self.tracker.runs

    def get_part_name(self, role: str) -> str:
        """Return the module name for a role, "router", "experts" or "shared"; "" = this layer."""
        raise NotImplementedError

    def get_part(self, role: str) -> Any:
        """Return the module for a role, "router", "experts" or "shared"; None if absent."""
        raise NotImplementedError

    def check_config(self, layer_name: str, config: MoEConfig) -> None:
        """Raise ValueError if the layer cannot use a config; the error names `layer_name`."""

    def set_balance(self, balance: BalanceConfig) -> None:
        """Replace the balance config of this layer."""
        check_arguments(RoutedLayer.set_balance, locals())
        self.set_config(replace(self.config, balance=balance))

    def set_config(self, config: MoEConfig) -> None:
        """Replace the config; only balance, capacity, router_dtype and router_jitter may differ."""
        # These fields decide no parameter and no option of the kernels.
        self.config = config
        self.tracker.set_config(config)
        for owner in (self.get_part("router"), self.get_part("experts")):
            if owner is not None:
                owner.config = config

    def drop_step_state(self) -> None:
        """Drop the step's counts and the cached quantised copies of weights."""
        self.tracker.reset()
        self.get_part("experts").reader.drop_copies()
        if self.cloner is not None:
            self.cloner.drop_step_counts()

    def check_expert_order(self) -> None:
        """Raise NotImplementedError if `move_experts` has changed the order of the experts."""
        if self.slots_E1 is not None:
            raise NotImplementedError(
                "experts that move_experts moved must be in the model's order to be read or "
                "written by number: call move_experts(model, optimizers, None) before"
            )

    def run_on_zero_tokens(self, x_0D: Tensor) -> Tensor:
        """Return the output [0, D] for zero tokens, without this module's hooks."""
        return self.forward(x_0D)  # type: ignore[no-any-return]

    def _run_experts(self, expert_input: ExpertInput) -> Any:
        """Run the experts; return each received row's sum, or expert rows that combine sums."""
        if isinstance(self, Experts):  # `RoutedExperts`, whose own `forward` is the layer's
            return Experts.forward(self, expert_input)
        return self.get_part("experts")(expert_input)

    def _run_routed_experts(
        self, rows_TL: Tensor, routing: Routing, *, is_saved_elsewhere: bool = False
    ) -> Tensor:
        """Dispatch, run experts and combine: return each token's weighted sum of experts, [T, L].

        `is_saved_elsewhere` = another operation also saves `rows_TL` for backward.
        """
        zero_weights_T1: Tensor | None = None
        if self.config.zero_experts:
            routing, zero_weights_T1 = split_zero_experts(routing, self.config.num_experts)
        experts, dispatcher, clones = self.get_part("experts"), self.dispatcher, None
        multiple, adapters = experts.rows_multiple, experts.row_adapters
        with annotate_range("moecore::dispatch"):
            if multiple > 1:
                routing = replace(routing, rows_multiple=multiple)
            if self.slots_E1 is not None:  # the id -1 reads the last entry
                routing = replace(routing, physical_TK=self.slots_E1[routing.expert_ids_TK])
            if self.cloner is not None:
                place_clones = self.cloner.place_clones
                routing, clones = place_clones(routing, dispatcher.pairs, training=self.training)
            if adapters is not None:
                routing = adapters.group_choices(routing)
            expert_input = dispatcher.dispatch(rows_TL, routing)
            if adapters is not None:
                expert_input = adapters.add_groups(expert_input)
            if self.cloner is not None:
                expert_input = self.cloner.add_clones_to_input(expert_input, clones)
        rows = expert_input.rows
        if is_saved_elsewhere and rows.values is rows_TL:
            saved_rows = Rows(rows.values, rows.scales, rows.wide_dtype, is_saved_elsewhere=True)
            expert_input = expert_input.replace_rows(saved_rows)
        with annotate_range("moecore::experts"):
            y_SL = self._run_experts(expert_input)
        with annotate_range("moecore::combine"):
            y_TL = dispatcher.combine(y_SL, expert_input.plan)
        if zero_weights_T1 is None:
            return y_TL
        return (y_TL + rows_TL * zero_weights_T1).to(y_TL.dtype)

    def _track_load(
        self,
        y: Tensor,
        routing: Routing,
        micro_batch: MicroBatch,
        bias_E: Tensor | None,
        depth: int = 0,
    ) -> Tensor:
        """Return y, whose backward counts loads and auxiliary losses, or warns in eval mode."""
        if not self.training:
            if y.requires_grad and not torch.compiler.is_compiling():
                y.register_hook(_warn_about_eval_mode)
            return y
        return self.tracker.attach_losses(y, routing, micro_batch, bias_E, depth)


class MoELayer(RoutedLayer, BiasOwner):
    """A Mixture-of-Experts layer; a plain module in one process, CPU or GPU.

    The steps of a forward:

        1. router      logits, and the K experts and weights of each token
        2. dispatch    each token is sent to the ranks that own its experts
        3. experts     FC1, activation, routing weight, FC2; sum of a token's local experts
        4. combine     the sums are sent to the token's rank, and are added in fp32
        5. shared      the output of the shared expert is added
        6. losses      auxiliary losses are attached to the output, and loads are counted

    `parallelize_moe` replaces the dispatcher and shards the experts.

    Args:
        config: sizes and options of the layer.
        layout: names of the layer's parts.
        device: device of the parameters; "meta" allocates nothing.
        dtype: dtype of the parameters.
        runs: number of times that the layer runs in one forward of its model. The auxiliary losses
            and counts of all runs are summed. The end of a step raises an error if the number of
            runs was different.

    Raises:
        ValueError: when an argument has another type or range, or a layer with several runs has a
            global-batch loss.

    Source: the routing weight applied before FC2 is Megatron-Core's memory-efficient permutation
    (arXiv:2603.07685).
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        layout: LayerLayout | None = None,
        device: Device | None = None,
        dtype: FloatDtype | None = None,
        runs: Count = 1,
    ) -> None:
        check_arguments(MoELayer.__init__, locals())
        super().__init__()
        self.config = config
        self.layout = layout or LayerLayout()
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        names = self.layout
        router = Router(
            config,
            expert_bias_name=names.expert_bias,
            token_experts_name=names.token_experts,
            **factory_kwargs,
        )
        experts = Experts(config, layout=names.expert_layout, **factory_kwargs)
        add_submodule(self, names.router, router)
        add_submodule(self, names.experts, experts)
        if config.expert_bias and names.bias_owner is not None:
            router.move_bias_to(get_or_create_bias_owner(self, names.bias_owner))
        if config.latent_dim and not names.latent_down:
            self.latent = Latent(config, **factory_kwargs)
        if config.shared_hidden_dim:
            add_submodule(self, names.shared, SharedExpert(config, **factory_kwargs))
        self.shared_stream: torch.cuda.Stream | None = None  # its owner sets it: see SharedRun
        self.dispatcher = LocalDispatcher(config.num_experts)
        self.tracker = LoadTracker(config, runs=runs)
        if not router.weight.is_meta:
            seed = torch.randint(1 << 62, (), device="cpu")  # torch.manual_seed's
            self.init_weights(key="", seed=int(seed))

    def init_weights(self, *, key: str, std: PositiveOrZero = 0.02, seed: Seed = 0) -> None:
        """Draw all matrices, including the router's, from N(0, std^2). No communication.

        The values depend only on `key` (the layer's name in the model), `seed` and the parameter's
        name, not on the parallel layout. Biases become 0, and norms 1. Raises ValueError for a
        child of another class, such as a model's shared expert.
        """
        check_arguments(MoELayer.init_weights, locals())
        self.check_expert_order()
        for name, child in _iterate_children(self):
            if not isinstance(child, Router | Experts | SharedExpert | Latent):
                raise ValueError(
                    f"{name} ({type(child).__name__}) must be filled by its own model: call its "
                    "initialiser, and init_weights of this layer's router and experts"
                )
            child.init_weights(std=std, key=f"{key}.{name}", seed=seed)

    def get_part_name(self, role: str) -> str:
        """Return the name of the child module for a role, "router", "experts" or "shared"."""
        return getattr(self.layout, role)  # type: ignore[no-any-return]

    def get_part(self, role: str) -> Any:
        """Return the child module for a role, "router", "experts" or "shared"; None if absent."""
        path = getattr(self.layout, role)
        if path in self._modules:
            return self._modules[path]
        module: nn.Module | None = self
        for name in path.split("."):
            module = None if module is None else module._modules.get(name)
        return module

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        cp: int | None = None,
        token_ids: Tensor | None = None,
        depth: int = 0,
    ) -> Tensor:
        """Return the layer's output for any number of tokens, zero included.

        Args:
            x: [T, D] or [B, T, D]. Under tp, this rank's slice of each sequence.
            padding_mask: bool, shape of x without D, True = padding: the token is sent to no routed
                expert, uses no capacity and is not in losses and counts. None = no padding.
            cu_seqlens: int32 [n + 1] on the device. Sequence i is tokens cu_seqlens[i] :
                cu_seqlens[i + 1], counted row by row over the slices of all cp and tp ranks. The
                last entry is the number of tokens. The sequence loss and drops by position are per
                sequence. None = every row is one sequence.
            cp: number of context parallel ranks of this forward, with `ContextOptions.dynamic`;
                None = the cp degree of the meshes.
            token_ids: integers, shape of x without D, in [0, hash_vocab_size). Only assignment
                "hash" reads them. Padding may have any id in this range.
            depth: 0, or k in the k-th multi-token prediction, whose auxiliary losses are a mean
                over the micro-batches with a document of more than k tokens.

        Returns:
            The output, in the shape and dtype of x. Auxiliary losses do not change the output; its
            backward adds their gradients.

        Raises:
            ValueError: when the mask or `cu_seqlens` has a wrong shape or dtype, when no group of
                `cp` ranks exists, or when a layer with assignment "hash" has no ids of its tokens.
        """
        groups = self.tracker.groups.select_cp_groups(cp)
        group, cp_size = groups.micro_batch, groups.cp
        micro_batch = MicroBatch.from_input(x, padding_mask, cu_seqlens, group, cp_size, token_ids)
        tokens_TD = x_TD = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        router = self.get_part("router")
        shared = SharedRun(self._run_shared_experts, x_TD, self.shared_stream)
        if micro_batch.padding_mask_T is not None:  # 0 * NaN would reach the router's gradient
            tokens_TD = x_TD.masked_fill(micro_batch.padding_mask_T[:, None], 0)
        with annotate_range("moecore::router"):
            routing = router(tokens_TD, micro_batch)
        rows_TL = cast_to_autocast(tokens_TD)
        if self.config.latent_dim:
            down = self.layout.latent_down
            rows_TL = (self.get_submodule(down) if down else self.latent.project_down)(rows_TL)
        if self.config.weights_on_input:
            weights_T1 = routing.weights_TK  # K is 1; the experts then multiply by 1
            rows_TL = (rows_TL * weights_T1).to(rows_TL.dtype)
            routing = replace(routing, weights_TK=torch.ones_like(weights_T1))
        is_saved_elsewhere = rows_TL is tokens_TD and router.weight.requires_grad
        y_TL = self._run_routed_experts(rows_TL, routing, is_saved_elsewhere=is_saved_elsewhere)
        y_TD = y_TL
        if self.config.latent_dim:
            up = self.layout.latent_up
            y_TD = (self.get_submodule(up) if up else self.latent.project_up)(y_TL)
        if shared.y_TD is not None:
            y_TD = y_TD + shared.wait_for_output()
        y = y_TD.to(x.dtype)
        y = y if x.ndim == 2 else y.view(x.shape)
        return self._track_load(y, routing, micro_batch, router.selection_bias, depth)

    def _run_shared_experts(self, x_TD: Tensor) -> Tensor | None:
        """Return the shared expert's output, [T, D]; None without a shared expert."""
        shared = self.get_part("shared")
        if shared is None:
            return None
        y_TD: Tensor = shared(x_TD)
        if not self.layout.shared_gate:
            return y_TD
        gate_T1 = torch.sigmoid(self.get_part("shared_gate")(x_TD).float())
        return (y_TD * gate_T1).to(y_TD.dtype)


def _iterate_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (dotted name, module) of each child; an empty module yields its own children."""
    for name, child in module.named_children():
        if type(child) is BiasOwner:  # an empty module of a dotted name
            yield from _iterate_children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _warn_about_eval_mode(_: Tensor) -> None:  # a backward hook
    warnings.warn(
        "a MoELayer in eval mode balances and counts nothing, but gets gradients: call "
        "model.train() before training (from_pretrained gives models in eval mode)",
        stacklevel=2,
    )


def cast_to_autocast(x: Tensor) -> Tensor:
    """Return x in the autocast dtype if autocast is enabled, otherwise unchanged."""
    dtype = get_autocast_dtype(x)
    return x if dtype is None else x.to(dtype)

"""Experts(ExpertInput) -> y_SD: gather, FC1, activation x weight, FC2, sum per source row.

Legend: S source rows, D model dim, F hidden dim of this rank (hidden_dim / etp), C columns of FC1
(2F with a gate, otherwise F), E experts, e local experts (E / ep).

The routing weight is applied before FC2, so a backward needs only the rows and FC1's output.
`moe/backends.py` has the backends that multiply the matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from moecore.base.options.layer import MoEConfig
from moecore.base.options.precision import Recipe
from moecore.base.params import check_has_values, init_normal_, shard_parameter
from moecore.base.saved_tensors import UsedRows, mark_used_rows
from moecore.base.torch_private import NOTHING, StridedShard, get_storage_key, is_plain_eager
from moecore.kernels.experts.contract import (
    OPERANDS,
    ExpertMLPOptions,
    ExpertSpec,
    ExpertWeights,
    GradSink,
    LowRankUpdate,
    Magnitudes,
    find_sink,
)
from moecore.kernels.experts.expert_mlp import expert_mlp
from moecore.kernels.experts.products import (
    choose_products,
    quantise_matrices,
    uses_transformer_engine,
)
from moecore.kernels.rows.activation import ActivationOptions
from moecore.kernels.rows.record import Rows
from moecore.kernels.rows.scaling import GATHERED_KINDS, OperandPair
from moecore.kernels.rows.shard_blocks import view_as_matrices
from moecore.moe.amax_history import AmaxHistory
from moecore.moe.backends import (
    EXPERT_BACKENDS,
    ExpertBackend,
    check_backend,
    find_backend_computation,
)
from moecore.moe.clone_weights import concatenate_clones
from moecore.moe.expert_layout import ExpertLayout, compute_expert_shapes
from moecore.moe.low_rank import LowRank, RowAdapters
from moecore.moe.param_reader import ParamReader
from moecore.moe.records import ExpertInput, UnsummedRows
from moecore.moe.stored_weights import apply_to_blocks, get_four_bit_blocks

OwnActivation = Callable[[Tensor], Tensor]


class Experts(nn.Module):
    """E feed-forward networks with stacked weights.

    Parameters (`layout` may change names and order of dims):
        w1: [E, 2, F, D], or [E, F, D] without a gate or with gate_up "separate".
        w3: [E, F, D], with gate_up "separate".
        w2: [E, D, F].
        b1: [E, 2, F] or [E, F], with `fc1_bias`.
        b2: [E, D], with `fc2_bias`.
        lora: matrix name -> the low-rank updates of w1 or w2, after `add_low_rank_updates`.

    `own_activation` is a differentiable torch function that maps FC1's output [R, C] in fp32 to
    [R, F], elementwise. It replaces the config's activation, which then only decides whether FC1
    has a gate. The kernels of `expert_mlp` do not support it.
    """

    row_adapters: RowAdapters | None = None  # set if rows of a batch may use different adapters

    def __init__(
        self,
        config: MoEConfig,
        *,
        backend: ExpertBackend = "auto",
        layout: ExpertLayout | None = None,
        own_activation: OwnActivation | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.layout = layout or ExpertLayout()
        self.own_activation = own_activation
        if self.is_separate and config.fc1_bias:
            raise ValueError(
                "MoEConfig.fc1_bias (True) must be False with ExpertLayout.gate_up ('separate'): "
                "use 'split'"
            )
        self.reader = ParamReader()
        # (key, options) of the last forward; see `_make_options_key`.
        self._options_cache: tuple[Any, ExpertMLPOptions | None] = (None, None)
        self.set_backend(backend)
        self.etp_rank, self.etp_size = 0, 1  # the rank's slice of F, and of D in b2
        for name, shape in compute_expert_shapes(config, self.layout).items():
            parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)

    def set_backend(
        self, backend: ExpertBackend, *, recompute_fc1: bool = False, recipe: Recipe | None = None
    ) -> None:
        """Set the backend's name, recomputation of FC1 in backward, and the FP8 recipe or None."""
        self.check_backend(backend, recompute_fc1=recompute_fc1, recipe=recipe)
        self.backend, self.recompute_fc1, self.recipe = backend, recompute_fc1, recipe
        steps = 0 if recipe is None else recipe.amax_history
        self.history = AmaxHistory(steps, OPERANDS) if steps else None
        self.reader.drop_copies()

    def check_backend(
        self, backend: str, *, recompute_fc1: bool = False, recipe: Recipe | None = None
    ) -> None:
        """Raise ValueError if these experts cannot use `backend`, `recompute_fc1` and `recipe`."""
        check_backend(backend, self.make_spec(recipe=recipe))
        if recompute_fc1 and (EXPERT_BACKENDS[backend] is not None or self.needs_autograd):
            wrong = f"expert_backend ({backend!r})"
            if self.needs_autograd:
                feature = "biases" if self._has_bias else "an activation of the model's own"
                wrong = f"experts with {feature}"
            raise ValueError(
                f"MemoryOptions.recompute ('expert_fc1') must not go with {wrong}: use activation "
                "checkpointing instead"
            )

    def add_low_rank_updates(self, param_name: str, update: LowRank) -> None:
        """Register LoRA adapters of w1 or w2; later forwards add the adapters' outputs."""
        names = (self.layout.w1, self.layout.w2)
        if param_name not in names or self.is_separate:
            raise ValueError(
                f"LoRA of experts ({param_name}) must be on {' or '.join(names)}, and FC1 be one "
                "parameter: target these alone"
            )
        if not self.lora_updates:
            self.lora = nn.ModuleDict()
        self.lora[param_name] = update

    def shard_parameters(self, mesh: DeviceMesh) -> None:
        """Replace parameters by DTensors over axes "ep" and "etp" of `mesh`. No communication."""
        # ep shards the expert dim; etp shards the hidden dim of both matrices, so that the output
        # of FC2 is a partial sum. etp shards D of b2, so that the sum over etp counts b2 once.
        # Placements have no dims of size 1, except "ep" if both dims have size 1.
        names = mesh.mesh_dim_names or ()
        dims = tuple(n for n in names if mesh.size(names.index(n)) > 1) or ("ep",)
        submesh = mesh[dims]  # once: it takes a millisecond

        def shard(owner: nn.Module, name: str, etp: Placement) -> None:
            placements = {"ep": Shard(0), "etp": etp}
            shard_parameter(owner, name, submesh, tuple(placements[n] for n in dims))

        # The dim that etp shards, by role.
        split = int(self.config.gated and self.layout.gate_up == "split")
        transposed = self.layout.transposed
        hidden_dims = {"w1": 2 if transposed else 1 + split, "w2": 1 if transposed else 2}
        if self.is_separate:
            hidden_dims["w3"] = 1
        if self.config.fc1_bias:
            hidden_dims["b1"] = 1 + split
        if self.config.fc2_bias:
            hidden_dims["b2"] = 1
        for role, dim in hidden_dims.items():
            is_strided = role in ("w1", "b1") and self.is_strided
            etp = StridedShard(dim, split_factor=2) if is_strided else Shard(dim)
            shard(self, getattr(self.layout, role), etp)
        for owner in [m for m in self.modules() if isinstance(m, nn.ParameterDict)]:
            for adapter in list(owner):
                shard(owner, adapter, Replicate())
        self.etp_rank, self.etp_size = mesh.get_local_rank("etp"), mesh.size(names.index("etp"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply `fn` to parameters (`to_empty`, `to`); of stored weights, to their blocks."""
        apply_to_blocks(self, fn, partial(super()._apply, fn, recurse))
        return self

    @property
    def is_strided(self) -> bool:
        """Whether gate and up are concatenated, so that an etp slice of FC1 has two parts."""
        return self.config.gated and self.layout.gate_up == "concatenated"

    @property
    def is_separate(self) -> bool:
        """Whether gate and up of FC1 are two parameters."""
        return self.config.gated and self.layout.gate_up == "separate"

    def get_model_dim_idx(self, param: nn.Parameter) -> int | None:
        """Return the index of the model dim D in a matrix's shape; None for a bias."""
        transposed = self.layout.transposed
        fc1 = [self.layout.w1] + [self.layout.w3] * self.is_separate
        if any(param is getattr(self, name) for name in fc1):
            return 1 if transposed else param.ndim - 1
        if param is getattr(self, self.layout.w2):
            return 2 if transposed else 1
        return None

    @property
    def summed_dims(self) -> dict[str, int]:
        """Parameter name of w1 and w2 -> index of the input dim, over which the matmul sums."""
        names = (self.layout.w1, self.layout.w2)
        return {n: 1 if self.layout.transposed else getattr(self, n).ndim - 1 for n in names}

    def init_weights(self, *, std: float, key: str, seed: int) -> None:
        """Draw matrices from N(0, std^2) by `key`, `seed` and parameter names; set biases to 0."""
        for name, parameter in self.named_parameters(recurse=False):
            if name in (self.layout.b1, self.layout.b2):
                nn.init.zeros_(parameter)
            else:
                init_normal_(parameter, std=std, key=f"{key}.{name}", seed=seed)

    def make_spec(self, **fields: Any) -> ExpertSpec:
        """Return the record by which a backend is selected; `fields` sets its other fields."""
        return ExpertSpec(
            gated=self.config.gated,
            interleaved=self._is_interleaved,
            transposed=self.layout.transposed,
            fc1_bias=self.config.fc1_bias,
            fc2_bias=self.config.fc2_bias,
            own_activation=self.own_activation is not None,
            **fields,
        )

    def forward(self, inp: ExpertInput) -> Tensor | UnsummedRows:
        """Return y_SD, each row's sum over local experts, or `UnsummedRows` with `inp.unsummed`."""
        with self.reader.exclude_from_activations():
            num_groups = 0 if inp.index.offsets_g is None else self.num_adapters
            weights = self._prepare_weights(inp.rows.dtype, num_groups)
            context = NOTHING if inp.clones is None else concatenate_clones(weights, inp.clones)
            with context as all_weights:
                return self._run_backend(inp, all_weights or weights)

    def _run_backend(self, inp: ExpertInput, weights: ExpertWeights) -> Tensor | UnsummedRows:
        """Return the output for `inp` and `weights`, by `expert_mlp` or the backend's function."""
        key = self._make_options_key(inp.rows, weights)
        last_key, options = self._options_cache
        if options is None or key is None or key != last_key:
            activation = make_activation_options(
                self.config, interleaved=self._is_interleaved, own_activation=self.own_activation
            )
            spec = ExpertSpec.from_weights(inp.rows, weights, activation, self.recipe)
            run = find_backend_computation(self.backend, spec, needs_autograd=self.needs_autograd)
            if run is not None:
                return run(inp, weights, activation)
            options = ExpertMLPOptions(
                activation=activation,
                products=choose_products(cast(Any, self.backend), spec),
                saves_h=not self.recompute_fc1,
                recipe=self.recipe,
            )
            if key is not None:
                self._options_cache = key, options
        with _declare_used_rows(inp, is_quantised=self.recipe is not None):
            y = expert_mlp(
                inp.rows, weights, inp.index, options, unsummed=inp.unsummed, receiver=inp.receiver
            )
        return y if inp.unsummed is None else UnsummedRows(y)

    def _make_options_key(self, rows: Rows, weights: ExpertWeights) -> tuple[Any, ...] | None:
        """Return the cache key of this forward's `ExpertMLPOptions`; None = do not cache them."""
        w1_eCD, w2_eDF = weights.w1_eCD, weights.w2_eDF
        if torch.compiler.is_compiling() or w1_eCD.is_meta:
            return None
        is_contiguous = w1_eCD.is_contiguous() and w2_eDF.is_contiguous()
        is_plain = weights.quantised is not None or is_contiguous
        tensors = (rows.dtype, w1_eCD.dtype, w2_eDF.dtype, w1_eCD.device, w2_eDF.shape)
        options = (self.own_activation, self.backend, self.recompute_fc1, self.recipe)
        return (is_plain, *tensors, *options)

    def extra_repr(self) -> str:
        """Return the backend, the FP8 recipe and the 4-bit format, for the module's repr."""
        recipe = "" if self.recipe is None else f", {self.recipe.describe()}"
        blocks = get_four_bit_blocks(getattr(self, self.layout.w2))
        return f"backend={self.backend!r}{recipe}" + (
            f", stored in {blocks.kind}" if blocks else ""
        )

    @property
    def lora_updates(self) -> Mapping[str, LowRank]:
        """Parameter name of w1 or w2 -> its LoRA adapters; empty without LoRA."""
        return self._modules.get("lora") or {}  # type: ignore[return-value]

    @property
    def num_adapters(self) -> int:
        """Number of LoRA adapters by which dispatch groups each expert's rows; 1 = no groups."""
        return 1 if self.row_adapters is None else self.row_adapters.num_adapters

    @property
    def _has_bias(self) -> bool:
        return self.config.fc1_bias or self.config.fc2_bias

    @property
    def waits_on_host(self) -> bool:
        """Whether a forward reads the number of rows of each expert on the host."""
        is_separate = EXPERT_BACKENDS[self.backend] is not None
        return is_separate or uses_transformer_engine(self.backend, self.recipe)

    @property
    def rows_multiple(self) -> int:
        """Each expert's number of rows is padded to a multiple of this, which the recipe sets."""
        return 1 if self.recipe is None else self.recipe.row_multiple

    @property
    def needs_autograd(self) -> bool:
        """Whether there are biases or an `own_activation`, which `expert_mlp` does not support."""
        return self._has_bias or self.own_activation is not None

    @property
    def _is_interleaved(self) -> bool:
        return self.config.gated and self.layout.gate_up == "interleaved"

    def _prepare_weights(self, dtype: torch.dtype, num_groups: int = 0) -> ExpertWeights:
        """Return this rank's weights for the kernels, cast to `dtype` unless a recipe is set.

        `num_groups` is the number of LoRA adapters of which each row uses one; 0 = all of them.
        """
        config, transposed, history = self.config, self.layout.transposed, self.history
        has_lora = bool(self.lora_updates)
        w1 = self._read_param("w1", dtype)
        if self.is_separate:
            w1_eCD = torch.cat([w1, self._read_param("w3", dtype)], dim=1)
        else:
            w1_eCD = w1.transpose(1, 2) if transposed else w1.flatten(1, -2)
        w2_eDF = self._read_param("w2", dtype)
        if transposed:
            w2_eDF = w2_eDF.transpose(1, 2)
        b1_eC = self._read_param("b1", dtype).flatten(1) if config.fc1_bias else None
        b2_eD = None
        if config.fc2_bias:  # zeros outside this etp rank's slice of D, for the sum over etp
            b2_eD = self._read_param("b2", dtype)
            before = self.etp_rank * b2_eD.shape[1]
            b2_eD = F.pad(b2_eD, (before, config.expert_dim - before - b2_eD.shape[1]))
        magnitudes = None
        if history is not None:
            current: Any = history.get_current_amax(w1_eCD.device, training=self.training)
            past = {operand: history.get_max_amax(operand) for operand in OPERANDS}
            magnitudes = Magnitudes(past, history.has_all_amax, current)
        return ExpertWeights(
            w1_eCD=w1_eCD,
            w2_eDF=w2_eDF,
            b1_eC=b1_eC,
            b2_eD=b2_eD,
            update1=self._slice_lora("w1", dtype, num_groups) if has_lora else None,
            update2=self._slice_lora("w2", dtype, num_groups) if has_lora else None,
            sinks=(self._make_grad_sink("w1", w1_eCD), self._make_grad_sink("w2", w2_eDF)),
            quantised=self._quantise(w1_eCD, w2_eDF),
            magnitudes=magnitudes,
        )

    def _quantise(self, w1_eCD: Tensor, w2_eDF: Tensor) -> tuple[OperandPair, OperandPair] | None:
        """Return both matrices quantised by the recipe; None = no recipe, or kernels quantise."""
        recipe = self.recipe
        if recipe is None:
            return None
        if not is_plain_eager() or recipe.backend == "te":
            check_has_values(w1_eCD)
            return None
        fc1 = ["w1", "w3"] if self.is_separate else ["w1"]
        operands: list[OperandPair | None] = []
        for roles, matrices in ((fc1, w1_eCD), (["w2"], w2_eDF)):
            params = [getattr(self, getattr(self.layout, role)) for role in roles]
            blocks = self.reader.read_fp8_blocks(params[0])
            if blocks is not None and blocks.kind == GATHERED_KINDS.get(recipe.weight_block):
                operands.append(view_as_matrices(blocks, matrices.shape))
                continue
            check_has_values(matrices)
            make = partial(quantise_matrices, matrices, recipe)
            operands.append(self.reader.get_quantised_weights((recipe, *roles), params, make))
        w1, w2 = operands
        return None if w1 is None or w2 is None else (w1, w2)

    def _make_grad_sink(self, role: str, matrices: Tensor) -> GradSink | None:
        """Return the receiver of weight `role`'s gradient in place of autograd; None = autograd."""
        if self.layout.transposed or (role == "w1" and self.is_separate):
            return None
        return find_sink(getattr(self, getattr(self.layout, role)), matrices.shape)

    def _read_param(self, role: str, dtype: torch.dtype) -> Tensor:
        """Return the local shard of parameter `role`, cast to `dtype` unless a recipe quantises."""
        param = getattr(self, getattr(self.layout, role))
        if self.recipe is not None:  # it is quantised in its own dtype
            return self.reader.read(param, needs_values=False)
        return self.reader.read(param, dtype=dtype)

    def _slice_lora(self, role: str, dtype: torch.dtype, num_groups: int) -> LowRankUpdate | None:
        """Return this rank's slices of the LoRA update of matrix `role`; None = no LoRA."""
        name = getattr(self.layout, role)
        if name not in self.lora_updates:
            return None

        def slice_pair(a_erI: Tensor, b_eOr: Tensor) -> tuple[Tensor, Tensor]:
            """Return this etp rank's columns of FC2's A, or its rows of FC1's B as in w1."""
            if role == "w2":
                return a_erI.unflatten(2, (self.etp_size, -1))[:, :, self.etp_rank], b_eOr
            halves = 1 + (self.config.gated and not self._is_interleaved)
            by_half = b_eOr.unflatten(1, (halves, self.etp_size, -1))
            return a_erI, by_half[:, :, self.etp_rank].flatten(1, 2)

        read = partial(self.reader.read, dtype=dtype)
        return self.lora_updates[name].make_local_update(read, slice_pair, num_groups)


def _declare_used_rows(inp: ExpertInput, *, is_quantised: bool) -> AbstractContextManager[None]:
    """Return a context that tells saved-tensor hooks which rows of buffers have data."""
    # Packers know a matrix by its length. If R is S, they know the source rows by their storage,
    # unless experts save quantised rows instead.
    if (inp.unsummed is None and inp.balanced is None) or torch.compiler.is_compiling():
        return NOTHING
    values, index, ranges = inp.rows.values, inp.index, list[UsedRows]()
    S, R = values.shape[0], index.weights_R.shape[0]
    source, expert = (None, None) if inp.balanced is None else inp.balanced
    refetch = None if inp.unsummed is None else inp.unsummed.refetch
    lengths = [tensor.shape[0] for tensor in ([values] if refetch is None else refetch.tensors)]
    if refetch is None and source is not None:
        only = get_storage_key(values) if S == R else None
        ranges.append(UsedRows(S, slots=index.slots_SK, balanced=source, storage=only))
        lengths = lengths if is_quantised else []
    if R not in lengths:
        ranges.append(UsedRows(R, index.num_rows, balanced=expert))
    return mark_used_rows(*ranges)


def make_activation_options(
    config: MoEConfig,
    *,
    interleaved: bool = False,
    own_activation: Callable[[Tensor], Tensor] | None = None,
) -> ActivationOptions:
    """Return options of the config's activation, or of `own_activation` unless None."""
    return ActivationOptions(
        kind=config.activation,
        limit=config.activation_limit,
        up_limit=config.activation_up_limit,
        alpha=config.activation_alpha,
        interleaved=interleaved,
        function=own_activation,
    )

"""CutTransformer: attention and dense MLPs of a transformers model, cut over tensor parallel ranks.

Every tp rank has the same tokens, and runs transformers' own code with its part of the weights:

    attention, MLPs    weights of its heads or hidden dims; what `o_proj` and `down_proj` return is
                       added over the ranks, before their biases
    MoE layers         its slice of each sequence in, the slices of all ranks out
    all else           as in one process, on every rank

So ranks have equal activations, each with its own gradient, and one rule holds for all gradients: a
rank's is that of the sum of all ranks' losses, each divided by the number of ranks, with respect to
what the rank holds. Those of weights that ranks have alike are partial sums over tp, as those of
the native decoder are (`moecore.moe.params.grad_placements`), whichever way they came.

`cut_attention` and `cut_mlp` read from names, sizes and code which modules run on a part of their
weights. Others stay whole, which costs memory and time. Heads that ranks cannot share are refused.

Legend: B rows, T tokens of a row, G tp ranks, D model dim, H heads, E experts.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from moecore.base.torch_names import tree_map_only
from moecore.families.transformers.lora import lora_base, lora_pairs
from moecore.families.transformers.stock import is_hf, named, outermost, own_methods
from moecore.families.transformers.vocabulary import cut_vocabulary
from moecore.models.tensor_parallel import TensorParallel
from moecore.moe.dispatch.collectives import exchanged
from moecore.moe.layer import MoELayer, RoutedLayer
from moecore.moe.params import shard_parameter
from moecore.parallel.pipeline.stages import Elsewhere
from moecore.parallel.shard.units import find_blocks

BY_HEAD = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "g_proj")  # columns of query heads
BY_KV_HEAD = ("k_proj", "v_proj")
OF_ALL_HEADS = ("q_a_proj", "kv_a_proj_with_mqa", "indexer")  # latents, and which tokens are seen
OUTPUTS = ("o_proj", "out_proj")
COUNTS = frozenset(("num_heads", "num_attention_heads", "num_key_value_heads"))
# Linears of an MLP, the last of which reads what an activation has made of the others, by element.
MLPS = (("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj"), ("w1", "w3", "w2"))

logger = logging.getLogger("moecore.parallelize")


@dataclass(frozen=True, slots=True)
class ModuleCut:
    """What of a module a rank has a part of, by name."""

    columns: tuple[str, ...]  # linears, of whose outputs a rank has some
    row: str  # the linear that reads these, and whose outputs are added
    own: tuple[str, ...] = ()  # the module's own parameters, by head
    norms: tuple[str, ...] = ()  # that compare all heads
    # Linears of so few key or value heads that ranks share them -> elements of a head. Whole; a
    # rank takes the one head that its query heads read.
    shared: Mapping[str, int] | None = None


class CutTransformer:
    """What `TensorParallelModel` asks of a model, for one with modules of transformers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def apply_tensor_parallel(self, tp_mesh: DeviceMesh) -> None:
        """Cut everything but the routed experts over a mesh of one dim, in place.

        Raises:
            ValueError: for heads or hidden dims that tp does not divide, and dropout or jitter,
                which each rank would draw anew for equal tokens.
            NotImplementedError: for a model of which nothing can be cut.
        """
        tp = TensorParallel(tp_mesh.get_group(), tp_mesh.get_local_rank(), tp_mesh.size())
        if tp.size == 1:
            return
        cuts, whole = self.cuts(tp.size)
        for reason in whole:
            logger.info("tp leaves whole %s", reason)
        dims = dict[tuple[nn.Module, str], int]()
        for module, cut in cuts.items():
            dims |= dict(_dims(module, cut))
            _hook(tp, module, cut)
        dims |= {(module, "weight"): 0 for module in cut_vocabulary(self.model, tp)}
        for layer in self.model.modules():
            if isinstance(layer, RoutedLayer):
                OwnTokens(tp, layer)
        _shard(self.model, tp_mesh, dims)
        EqualLosses(tp, self.model)

    def cuts(self, tp: int) -> tuple[dict[nn.Module, ModuleCut], list[str]]:
        """Return `find_cuts`; raise as `apply_tensor_parallel` for a model that tp cannot cut."""
        _check(self.model, tp)
        cuts, whole = find_cuts(self.model, tp)
        if not cuts:
            raise NotImplementedError(
                f"ParallelConfig.tp ({tp}) must be 1 for {type(self.model).__name__}, of "
                f"which no module can be cut: {'; '.join(whole) or 'no attention is known'}"
            )
        return cuts, whole


def _check(model: nn.Module, tp: int) -> None:
    drawn = {f"{n}.p": m.p for n, m in model.named_modules() if isinstance(m, nn.Dropout)}
    for outer in outermost(model):
        fields = vars(outer.config.get_text_config()) if hasattr(outer, "config") else {}
        drawn |= {n: x for n, x in fields.items() if "drop" in n or "jitter" in n}
    for name, value in drawn.items():
        if isinstance(value, float) and value > 0:
            raise ValueError(
                f"{name} ({value}) must be 0 under ParallelConfig.tp ({tp}), whose ranks compute "
                "equal tokens: set it in the config"
            )


def find_cuts(model: nn.Module, tp: int) -> tuple[dict[nn.Module, ModuleCut], list[str]]:
    """Return how modules of decoder layers are cut, and why others are not, one of each class."""
    found, whole = dict[nn.Module, ModuleCut](), dict[type, str]()
    names = {module: name for name, module in model.named_modules()}
    layers = [m for m in model.modules() if isinstance(m, MoELayer)]
    skipped = {m for layer in layers for m in layer.modules()}
    for block in find_blocks(model):
        for module in block.modules():
            if module in skipped or not is_hf(module):
                continue
            is_attention = not module._modules.keys().isdisjoint(OUTPUTS)
            cut = cut_attention if is_attention else cut_mlp
            how = cut(names[module], module, tp)
            if isinstance(how, ModuleCut):
                found[module] = how
            elif how is not None:
                of = f"{names[module]} ({type(module).__name__})"
                whole.setdefault(type(module), f"{of}, whose {how}")
    return found, list(whole.values())


def cut_attention(name: str, module: Any, tp: int) -> ModuleCut | str:
    """Return how an attention module is cut by heads, or what of it is not known to have a part.

    Raises:
        ValueError: for heads that ranks cannot share.
    """
    linears = _linears(module)
    value_dim = getattr(module, "v_head_dim", None) or getattr(module, "head_dim", None)
    key_dim = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
    row = next((n for n in OUTPUTS if n in linears), None)
    if row is None or not value_dim or not key_dim or linears[row].in_features % value_dim:
        return "heads have no known size"
    H = linears[row].in_features // value_dim
    kv_heads = linears["k_proj"].out_features // key_dim if "k_proj" in linears else H
    sizes: dict[str, tuple[int, ...]] = {
        "q_proj": (H * key_dim, *_gated(module, H * key_dim)),
        "q_b_proj": (H * key_dim,),
        "kv_b_proj": (H * (getattr(module, "qk_nope_head_dim", 0) + value_dim),),
        "gate_proj": (H, H * value_dim),
        "g_proj": (H, H * value_dim),
        "k_proj": (kv_heads * key_dim,),
        "v_proj": (kv_heads * value_dim,),
    }
    for child, linear in linears.items():
        if child in sizes and linear.out_features not in sizes[child]:
            return f"{child} ({linear.out_features} outputs) is not {H} heads"
    norms = tuple(n for n in ("q_norm", "k_norm") if _is_of_all(module, n, linears))
    problem = _unknown(module, {*sizes, *OF_ALL_HEADS, row}, H)
    if problem is None and linears[row].bias is not None and row in _adapted(module):
        problem = f"{row} has a bias and adapters"
    if problem is None and not linears.keys() & {"q_proj", "q_b_proj"}:
        problem = "queries are made in another module"
    if problem is None and not linears.keys() & {"k_proj", "kv_b_proj"}:
        problem = "keys are those of another layer"
    if problem is None and "k_norm" in norms and kv_heads % tp:
        problem = "norm compares all key heads, of which there are fewer than ranks"
    if problem is not None:
        return problem
    if H % tp or (kv_heads % tp and tp % kv_heads):
        raise ValueError(
            f"{name}: heads ({H}) and key/value heads ({kv_heads}) must be multiples of "
            f"ParallelConfig.tp ({tp}), or the latter a divisor of it: lower tp"
        )
    shared = {} if kv_heads % tp == 0 else {"k_proj": key_dim, "v_proj": value_dim}
    columns = tuple(n for n in (*BY_HEAD, *BY_KV_HEAD) if n in linears and n not in shared)
    own = tuple(module._parameters)
    return ModuleCut(columns, row, own, norms, {n: d for n, d in shared.items() if n in linears})


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears of a module by name, those in peft's LoRA too."""
    parts = {n: lora_base(m) or m for n, m in module.named_children()}
    return {n: m for n, m in parts.items() if type(m) is nn.Linear}


def _adapted(module: nn.Module) -> dict[str, list[tuple[nn.Linear, nn.Linear]]]:
    """Return A and B of each adapter of the linears of a module, by the linear's name."""
    return {n: lora_pairs(m) for n, m in module.named_children() if lora_base(m) is not None}


def _gated(module: Any, size: int) -> tuple[int, ...]:
    """Return the size of queries with gates, if transformers cuts them by heads too."""
    # Gates may also be in another order, which no size tells.
    plan = getattr(getattr(module, "config", None), "base_model_tp_plan", None) or {}
    is_by_head = any(n.endswith(".q_proj") and how == "colwise" for n, how in plan.items())
    return (2 * size,) if is_by_head else ()


def _is_of_all(module: nn.Module, name: str, linears: Mapping[str, nn.Linear]) -> bool:
    """Whether a norm of queries or keys has a weight for each element of all heads."""
    norm, linear = getattr(module, name, None), linears.get(f"{name[0]}_proj")
    weight = getattr(norm, "weight", None)
    return linear is not None and weight is not None and weight.numel() == linear.out_features


def _unknown(module: nn.Module, known: set[str], num_heads: int) -> str | None:
    """Return what of an attention module may depend on all heads, or None."""
    for child, part in module.named_children():
        is_norm = "Norm" in type(part).__name__ and not list(part.children())
        if not (child in known or is_norm) and next(part.parameters(), None) is not None:
            return f"{child} ({type(part).__name__}) may read all heads"
    for child, tensor in (*module._parameters.items(), *module._buffers.items()):
        if child in module._buffers or (tensor is not None and tensor.shape != (num_heads,)):
            return f"{child} may not have an element per head"
    for method in own_methods(type(module)):
        code = getattr(inspect.unwrap(getattr(type(module), method)), "__code__", None)
        counts = COUNTS.intersection(getattr(code, "co_names", ()))
        if counts:
            return f"{method} reads {min(counts)}"
    return None


def cut_mlp(name: str, module: nn.Module, tp: int) -> ModuleCut | None:
    """Return how a dense MLP is cut by its hidden dim; None for any other module."""
    parts = {n: m for n, m in module.named_children() if next(m.parameters(), None) is not None}
    names = next((names for names in MLPS if set(names) == parts.keys()), None)
    if names is None or any(p is not None for p in module._parameters.values()):
        return None
    *columns, row = names
    linears = _linears(module)
    if linears.keys() != parts.keys():
        return None
    if linears[row].bias is not None and row in _adapted(module):
        return None
    size = linears[row].in_features
    if any(linears[n].out_features != size for n in columns):
        return None
    if size % tp:
        raise ValueError(
            f"{name}: the hidden dim ({size}) of {type(module).__name__} must be a multiple of "
            f"ParallelConfig.tp ({tp}): lower tp"
        )
    return ModuleCut(tuple(columns), row)


def _dims(module: nn.Module, cut: ModuleCut) -> Iterator[tuple[tuple[nn.Module, str], int]]:
    """Yield parameters that are cut, with their dims."""
    linears, adapted = _linears(module), _adapted(module)
    for name in cut.columns:
        yield (linears[name], "weight"), 0
        yield (linears[name], "bias"), 0
    yield (linears[cut.row], "weight"), 1
    # y = W x + s B A x: of columns a rank has rows of B and all of A, of a row the reverse.
    for name in adapted.keys() & {*cut.columns, cut.row}:
        for pair in adapted[name]:
            yield (pair[name != cut.row], "weight"), int(name == cut.row)
    for name in cut.own:
        yield (module, name), 0


def _hook(tp: TensorParallel, module: Any, cut: ModuleCut) -> None:
    """Let the parts of a module exchange what a rank's part of the weights does not give."""
    row: Any = module.get_submodule(cut.row)
    if row.bias is None:
        row.register_forward_hook(partial(_add, tp))
    else:
        row.__class__, row.tp = BiasedRow, tp
    for name in cut.norms:
        norm = module.get_submodule(name)
        norm.register_forward_pre_hook(partial(_gather_columns, tp))
        norm.register_forward_hook(partial(_own_columns, tp))
    for name, head_dim in (cut.shared or {}).items():
        linear = module.get_submodule(name)
        head = tp.rank * (linear.out_features // head_dim) // tp.size
        linear.register_forward_hook(partial(_own_head, head, head_dim))
    if cut.shared and hasattr(module, "num_key_value_groups"):
        kv_heads = module.k_proj.out_features // cut.shared["k_proj"]
        module.num_key_value_groups = module.num_key_value_groups * kv_heads // tp.size


class BiasedRow(nn.Linear):
    """A linear with some columns of its weight: y = sum over ranks of x @ weight^T, and bias."""

    tp: TensorParallel

    def forward(self, input: Tensor) -> Tensor:
        """Return [..., N], equal on all ranks. Collective."""
        return self.tp.sum_shared(F.linear(input, self.weight)) + self.bias


def _add(tp: TensorParallel, _linear: nn.Module, _args: Any, y: Tensor) -> Tensor:
    return tp.sum_shared(y)


def _gather_columns(tp: TensorParallel, _norm: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *rest = args
    return tp.gather_last(x), *rest


def _own_columns(tp: TensorParallel, _norm: nn.Module, _args: Any, y: Tensor) -> Tensor:
    return y.chunk(tp.size, dim=-1)[tp.rank]


def _own_head(head: int, head_dim: int, _linear: nn.Module, _args: Any, y: Tensor) -> Tensor:
    return y.narrow(-1, head * head_dim, head_dim)


def _shard(
    model: nn.Module, tp_mesh: DeviceMesh, dims: Mapping[tuple[nn.Module, str], int]
) -> None:
    """Make DTensors of all parameters but those of routed experts. Tied ones stay tied."""
    layers = [m for m in model.modules() if isinstance(m, RoutedLayer)]
    routed = {m for layer in layers for m in layer.part("experts").modules()}
    made = dict[nn.Parameter, nn.Parameter]()
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is None or module in routed:
                continue
            if param in made:
                module.register_parameter(name, made[param])
                continue
            dim = dims.get((module, name))
            placement = Replicate() if dim is None else Shard(dim)
            shard_parameter(module, name, tp_mesh, (placement,), reads_plain=True)
            made[param] = module._parameters[name]  # type: ignore[assignment]


class OwnTokens:
    """Lets a MoE layer get this rank's slice of the tokens, and return those of all ranks.

    Slices are of each row, or of tokens that have no rows any more. Padding makes them equal, and
    is routed nowhere.
    """

    def __init__(self, tp: TensorParallel, layer: RoutedLayer) -> None:
        self._tp, self._now = tp, threading.local()
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        layer.register_forward_hook(self._leave)
        router: Any = layer.part("router")
        if hasattr(router, "recorder"):  # before what transformers takes of it
            router.recorder.register_forward_hook(self._whole_logits, prepend=True)

    def _enter(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = named(layer, args, kwargs)
        x = given.pop("x" if isinstance(layer, MoELayer) else "hidden_states")
        self._now.shape = shape = x.shape[:-1]
        padding = -shape[-1] % self._tp.size
        if isinstance(layer, MoELayer):
            if padding and given.get("cu_seqlens") is not None:
                raise ValueError(
                    f"rows of documents ({shape[-1]} tokens) must be multiples of tp "
                    f"({self._tp.size}): pad the rows"
                )
            mask = given.get("padding_mask")
            if padding and mask is None:
                mask = x.new_zeros(shape, dtype=bool)
            if mask is not None:
                given["padding_mask"] = self._own(mask[..., None], padding, True)[..., 0]
            return (self._own(x, padding),), given
        fills = {"top_k_index": -1, "top_k_weights": 0}
        own = {name: self._own(given[name], padding, fill) for name, fill in fills.items()}
        return (self._own(x, padding),), own

    def _own(self, x_TD: Tensor, padding: int, fill: float = 0) -> Tensor:
        """Return this rank's slice of the tokens, which are the dim before the last."""
        x_TD = F.pad(x_TD, (0, 0, 0, padding), value=fill) if padding else x_TD
        return x_TD.chunk(self._tp.size, dim=-2)[self._tp.rank].contiguous()

    def _whole(self, y_tD: Tensor) -> Tensor:
        """Return all ranks' slices without padding, in the shape of the tokens."""
        *B, T = self._now.shape
        y_BtD = y_tD.view(*B, -1, y_tD.shape[-1]) if B else y_tD[None]
        y_BTD = self._tp.gather(y_BtD)[:, :T]
        return y_BTD.reshape(*B, T, -1)

    def _leave(self, layer: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._whole(output[0]), *output[1:])
        return self._whole(output)

    def _whole_logits(self, recorder: nn.Module, _args: Any, logits: tuple[Tensor, ...]) -> Any:
        if len(recorder._forward_hooks) == 1:  # transformers was never asked for them
            return logits
        logits_TE = self._whole(logits[0]).flatten(0, -2)
        return tuple(logits_TE for _ in logits)


class EqualLosses:
    """Divides the gradient by which a backward of equal ranks begins by their number."""

    def __init__(self, tp: TensorParallel, model: nn.Module) -> None:
        self._size, self._now = tp.size, threading.local()
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave, always_call=True)
        for outer in outermost(model):
            if outer is not model or outer.base_model is not model:
                outer.base_model.register_forward_pre_hook(self._check)

    def _enter(self, _model: nn.Module, _args: Any) -> None:
        self._now.depth = self._depth + 1

    def _leave(self, model: nn.Module, _args: Any, output: Any) -> Any:
        self._now.depth = max(self._depth - 1, 0)  # another hook may have raised before
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if isinstance(head, Elsewhere):  # a pipeline stage, whose gradient another one begins
            return output
        return tree_map_only(Tensor, self._divided, output)

    @property
    def _depth(self) -> int:
        return getattr(self._now, "depth", 0)

    def _check(self, base: nn.Module, _args: Any) -> None:
        if not self._depth and torch.is_grad_enabled():
            raise ValueError(
                f"{type(base).__name__} must be called by its whole model under tensor "
                f"parallelism ({self._size}), which begins backward: call the model"
            )

    def _divided(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x
        return exchanged(x, lambda x: x.view_as(x), lambda grad: grad / self._size)

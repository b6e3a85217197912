"""GraphedForwardBackward: forward and backward of an optimizer step as one CUDA graph.

    calls 1 .. warm_up      run eagerly; the last one is checked for work that a graph cannot record
    call warm_up + 1        captured, which computes nothing, then replayed
    calls after it          inputs copied in, replayed, outputs copied out

Every call computes the gradients of a training step. `TrainStep.finish` runs outside of the graph,
so its work may differ between steps. Captured collectives have no timeout. If a rank fails before
the first replay, all ranks raise. If a rank raises later, the other ranks hang, so end the job.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from moecore.base.fields import Bound, check_arguments
from moecore.base.rank_checks import gather_first_problem
from moecore.base.torch_private import (
    count_gradient_hooks,
    get_local_tensor,
    list_module_hooks,
    tree_leaves,
    tree_map_only,
)
from moecore.moe.dispatch.exchange import ExchangeError
from moecore.moe.dispatch.nvlink import NVLinkDispatcher
from moecore.moe.shortage import SkippedSteps
from moecore.moe.state import MoEState
from moecore.parallel.model.parallel_state import (
    get_capacity,
    get_moe_state,
    get_parallel_state,
    get_progress,
    reshard_units,
)

SYNC_WARNING = "called a synchronizing CUDA operation"
WATCH_WARNING = "Synchronization debug mode is a prototype"
Inputs = tuple[Tensor, ...]
WarmUp = Annotated[int, Bound(">=", 2), "the first call makes buffers, the last is watched"]


class GraphedForwardBackward:
    """Runs forward and backward of an optimizer step; after the warm-up as one CUDA graph.

    Every rank calls it for the same steps, with inputs of the same shapes. Between these calls,
    evaluation, checkpoints and steps of other shapes may run without it. The memory of all
    activations stays reserved between steps. All steps write the same gradient tensors.

    Python code runs only at capture. A value that changes from step to step must be a tensor among
    the inputs. A replay uses the Python numbers (such as a token count that divides the loss),
    branches of `if`, and tensors of the capture.

    Args:
        forward_backward: a function of GPU tensors with all micro-batches of a step. It runs
            forward and backward, and returns detached tensors, nested in tuples, lists or dicts, or
            None. It has no host sync, does not call the optimizer, and trains only parameters of
            `model`.
        model: a model that `parallelize_moe` has changed.
        warm_up: number of eager calls, >= 2. The first call allocates buffers, and the last call is
            checked for host syncs.

    Raises:
        ValueError: when the model is not on a GPU or not parallelized, or its dispatcher copies
            sizes to the host.

    Example:
        def forward_backward(tokens_BT, labels_BT):
            with step.micro_batch():
                loss = model(tokens_BT, labels_BT)
                loss.backward()
            return loss.detach()

        forward_backward = GraphedForwardBackward(forward_backward, model)
        for tokens_BT, labels_BT in batches:
            loss = forward_backward(tokens_BT, labels_BT)
            step.finish()
        forward_backward.close()
    """

    def __init__(
        self, forward_backward: Callable[..., Any], model: nn.Module, *, warm_up: WarmUp = 2
    ) -> None:
        check_arguments(GraphedForwardBackward.__init__, locals())
        self._state = get_moe_state(model)
        self._capacity = get_capacity(model)
        if (record := get_parallel_state(model)) is not None and record.pipeline is not None:
            raise ValueError(
                f"model ({type(model).__name__}) must have no pipeline stages for a CUDA graph, "
                "because they wait for each other: call forward_backward itself"
            )
        _check_dispatchers(self._state)
        self._device = _get_gpu_device(model)
        self._forward_backward = forward_backward
        self._model = model
        self._warm_up = warm_up
        self._num_warm_up_calls = 0
        self._inputs: Inputs = ()  # of the last warm-up call
        self._captured: _CapturedStep | None = None

    def close(self) -> None:
        """Free the graph and its memory; the next calls warm up and capture a new graph.

        Call `close` before `destroy_process_group`, which waits for graphs with collectives.
        """
        if self._captured is not None:
            torch.cuda.synchronize(self._device)  # a replay may still run
        self._num_warm_up_calls, self._inputs, self._captured = 0, (), None
        self._capacity.graph_steps = None

    def __call__(self, *inputs: Tensor) -> Any:
        """Run a step's forward and backward; return copies of the outputs, and set `.grad`.

        Args:
            inputs: tensors on any device, with the same shapes and dtypes in every call. Inputs in
                pinned memory or on the GPU are copied without a host sync, so they must not change
                before the copy.

        Raises:
            ValueError: when parameters have gradients already or inputs have other shapes; when a
                mode, hook, config or tensor address has changed since the capture, or
                `forward_backward` waits for the GPU. This wait is found in the last warm-up call,
                whose gradients are valid.
            NotImplementedError: when router choices are recorded or replayed around the call.
            RuntimeError: when the capture fails. End the process then, because FSDP modules are
                still in the state of a running step.
            ExchangeError: as in `TrainStep.finish`.
        """
        # A replay runs no Python of the model. These lines, and `_CapturedStep.replay`, do its work
        # between steps: an evaluation may have left units whole, an exchange may have failed.
        reshard_units(self._model)
        _check_no_tapes_or_gradients(self._model, self._state)
        self._capacity.raise_reported_errors()
        # If rows did not fit, `TrainStep.finish` has skipped the step on every rank, on the device.
        # The host sees that a step later, without a wait, and captures with larger buffers.
        if self._capacity.is_graph_outgrown():
            self.close()
            self._capacity.enlarge_buffers()
        if self._captured is not None:
            return self._captured.replay(inputs)
        run = self._forward_backward
        with self._capacity.enter_graph():
            device_inputs = tuple(x.to(self._device, non_blocking=True, copy=True) for x in inputs)
            if self._num_warm_up_calls < self._warm_up:
                if self._num_warm_up_calls == self._warm_up - 1:
                    outputs = _call_without_syncs(run, device_inputs)
                else:
                    outputs = run(*device_inputs)
                self._num_warm_up_calls += 1
                self._inputs = device_inputs
                return outputs
            _check_inputs(device_inputs, self._inputs)
            self._captured = _capture_step(run, self._model, self._state, device_inputs)
            self._capacity.graph_steps = SkippedSteps()
            self._inputs = ()
            return self._captured.replay(inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CapturedStep:
    """A captured CUDA graph; its inputs, outputs and gradients; and the host state it needs."""

    graph: torch.cuda.CUDAGraph
    model: nn.Module
    state: MoEState
    facts: "GraphFacts"
    inputs: Inputs
    outputs: Any
    grads: list[tuple[nn.Parameter, Tensor]]  # of parameters, which the graph writes
    num_micro_batches: dict[str, int]  # that the graph runs, by the name of the layer
    num_in_step: int  # micro-batches of a `TrainStep` that the graph runs

    def replay(self, inputs: Inputs) -> Any:
        record = get_parallel_state(self.model)
        if record is not None and record.arguments is not None:  # a replay runs no model hook
            named = {f"inputs[{place}]": x for place, x in enumerate(inputs)}
            record.arguments.compare_arguments(named, None)
        _check_inputs(inputs, self.inputs)
        self.facts.check_unchanged(self.model, self.state)
        for target, source in zip(self.inputs, inputs, strict=True):
            target.copy_(source, non_blocking=True)
        self.graph.replay()
        for param, grad in self.grads:
            param.grad = grad
        for name, count in self.num_micro_batches.items():
            self.state.layers[name].tracker.num_micro_batches += count
        progress = get_progress(self.model)
        if progress is not None:
            progress.num_done += self.num_in_step
        return tree_map_only(Tensor, torch.clone, self.outputs)


def _capture_step(
    forward_backward: Callable[..., Any], model: nn.Module, moe_state: MoEState, inputs: Inputs
) -> _CapturedStep:
    """Capture `forward_backward(*inputs)` without running it; RuntimeError if any rank fails."""
    _drop_fp8_copies(moe_state)
    trackers = {name: layer.tracker for name, layer in moe_state.layers.items()}
    for tracker in trackers.values():
        tracker.num_captured = 0
    facts = collect_facts(model, moe_state)
    progress = get_progress(model)
    before = 0 if progress is None else progress.num_done
    graph, outputs, error = _capture_graph(forward_backward, inputs)
    reason = "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
    failure = gather_first_problem(reason)
    if isinstance(error, torch.OutOfMemoryError | ExchangeError):
        raise error
    if failure:
        raise RuntimeError(
            f"forward_backward could not be captured ({failure}): it must launch the same work in "
            "every call and wait for none of it; start again without a graph"
        ) from error
    num_in_step = 0
    if progress is not None:  # the capture has computed nothing
        progress.num_done, num_in_step = before, progress.num_done - before
    reshard_units(model)  # whole and cast parameters lie in the graph's memory
    _drop_fp8_copies(moe_state)
    return _CapturedStep(
        graph=graph,
        model=model,
        state=moe_state,
        facts=facts,
        inputs=inputs,
        outputs=outputs,
        grads=[(p, p.grad) for p in model.parameters() if p.grad is not None],
        num_micro_batches={name: t.num_captured for name, t in trackers.items()},
        num_in_step=num_in_step,
    )


def _capture_graph(
    forward_backward: Callable[..., Any], inputs: Inputs
) -> tuple[torch.cuda.CUDAGraph, Any, Exception | None]:
    graph, outputs, first = torch.cuda.CUDAGraph(), None, None
    gc.collect()  # the free of a dead model may wait for the GPU, which breaks a capture
    collects = gc.isenabled()
    gc.disable()
    try:
        # Other threads (NCCL's, a checkpoint's) make calls that a capture of the whole process
        # would forbid.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            try:
                outputs = forward_backward(*inputs)
            except Exception as error:  # the end of a broken capture raises another error
                first = error
                raise
    except Exception as error:
        return graph, None, first or error
    finally:
        if collects:
            gc.enable()
    return graph, outputs, None


def _call_without_syncs(forward_backward: Callable[..., Any], inputs: Inputs) -> Any:
    """Run the function and return its outputs; ValueError on all ranks if it waits for the GPU."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            outputs = forward_backward(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    waits = [w for w in caught if SYNC_WARNING in str(w.message)]
    for other in caught:
        if other not in waits and WATCH_WARNING not in str(other.message):
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    problem = gather_first_problem(_find_capture_problem(waits, outputs))
    if problem:
        raise ValueError(problem)
    return outputs


def _find_capture_problem(sync_warnings: list[warnings.WarningMessage], outputs: Any) -> str:
    if sync_warnings:
        return (
            f"forward_backward must not wait for the GPU in a CUDA graph, but does in "
            f"{len(sync_warnings)} places, first at "
            f"{sync_warnings[0].filename}:{sync_warnings[0].lineno}: change them, or run it "
            "without a graph"
        )
    for leaf in tree_leaves(outputs):
        if leaf is not None and not isinstance(leaf, Tensor):
            return (
                f"outputs of forward_backward ({type(leaf).__name__}) must be tensors, or tuples, "
                "lists or dicts of them: a number would stay what it was at capture"
            )
        if leaf is not None and leaf.requires_grad:
            return (
                "outputs of forward_backward must not need gradients, which it has computed: "
                "detach them"
            )
    return ""


def _check_no_tapes_or_gradients(model: nn.Module, moe_state: MoEState) -> None:
    for name, layer in moe_state.layers.items():
        router = layer.get_part("router")
        if router is not None and router.tape is not None:
            raise NotImplementedError(
                f"choices of {name} must not be recorded or replayed around a CUDA graph, which "
                "would repeat those of its capture: enter replay(check=False) in forward_backward, "
                "with the ids among its inputs"
            )
    for name, param in model.named_parameters():
        if param.grad is not None:  # a graph writes gradients; it does not accumulate
            raise ValueError(
                f"gradient of {name} must be None before a step's forward and backward: call "
                "optimizer.zero_grad(set_to_none=True) after step(), and give all micro-batches "
                "to one call"
            )


def _check_inputs(inputs: Inputs, expected_inputs: Inputs) -> None:
    kinds = [(tuple(x.shape), x.dtype) for x in inputs]
    expected_kinds = [(tuple(x.shape), x.dtype) for x in expected_inputs]
    if kinds != expected_kinds:
        raise ValueError(
            f"inputs ({kinds}) must be as in the calls before ({expected_kinds}): pad them, or "
            "call forward_backward itself for this step, on every rank"
        )


def _check_dispatchers(moe_state: MoEState) -> None:
    """Raise ValueError for a layer whose exchange or experts wait for sizes on the host."""
    for name, layer in moe_state.layers.items():
        capacity = layer.config.capacity
        pads = capacity is not None and capacity.pad
        if layer.cloner is not None:
            raise ValueError(
                f"DispatchOptions.clones ({layer.cloner.options}) must be None for a CUDA graph, "
                f"because the host reads the clones of {name}: drop it"
            )
        if layer.get_part("experts").waits_on_host:
            raise ValueError(
                f"expert_backend of {name} ({layer.get_part('experts').backend!r}) must be 'auto', "
                "'triton' or 'torch' for a CUDA graph, because it reads sizes on the host"
            )
        if layer.dispatcher.waits_on_host and not pads:
            raise ValueError(
                f"dispatcher of {name} ({type(layer.dispatcher).__name__}) must be 'nvlink' or pad "
                "to a capacity for a CUDA graph, because it waits for sizes on the host"
            )
        if isinstance(layer.dispatcher, NVLinkDispatcher) and layer.dispatcher.has_row_count_sync:
            raise ValueError(
                "NVLinkOptions.row_factor ('exact') must be a number for a CUDA graph, because the "
                "host waits for sizes: set one"
            )


def _get_gpu_device(model: nn.Module) -> torch.device:
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise ValueError(
            f"device of the model ({device}) must be a GPU for a CUDA graph: call forward_backward "
            "itself"
        )
    return device


def _drop_fp8_copies(moe_state: MoEState) -> None:
    for layer in moe_state.layers.values():
        layer.get_part("experts").reader.drop_copies()


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphFacts:
    """Host values that must not change after a capture: modes, hooks, configs, tensor addresses."""

    values: list[Any]
    owners: list[Any]  # owners of addresses in `values`, so that no other object gets them
    exchanges: tuple[Any, ...]  # whose buffers the graph writes; kept alive

    def check_unchanged(self, model: nn.Module, moe_state: MoEState) -> None:
        """Raise a ValueError that names a changed value. Checking 531 parameters takes 3 ms."""
        current_facts = collect_facts(model, moe_state)
        if current_facts.values != self.values:
            pairs = zip(_list_facts(model, moe_state), self.values, strict=False)
            changed = (words for (words, value, _), captured in pairs if value != captured)
            fact, *path = next(changed, ("the modules of the model",))
            subject = f"{fact} of {'.'.join(filter(None, path)) or 'the model'}" if path else fact
            raise ValueError(
                f"{subject} must be what it was when the graph was captured: set it back, or call "
                "close(), after which the next calls warm up and capture anew"
            )
        # New exchanges may exist, but those that other ranks write to must still be there.
        if any(exchange not in current_facts.exchanges for exchange in self.exchanges):
            raise ValueError(
                "the buffers of dispatcher ('nvlink') must be those of when the graph was "
                "captured: call close() of the graph, too, when you close them"
            )


@torch.no_grad()
def collect_facts(model: nn.Module, moe_state: MoEState) -> GraphFacts:
    """Return a model's current modes, hooks, configs and tensor addresses as `GraphFacts`."""
    facts = list(_list_facts(model, moe_state))
    record = get_parallel_state(model)
    exchanges = () if record is None or record.exchanges is None else record.exchanges.all_exchanges
    return GraphFacts(
        values=[value for _, value, _ in facts],
        owners=[owner for *_, owner in facts],
        exchanges=exchanges,
    )


def _list_facts(
    model: nn.Module, moe_state: MoEState
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield (key, value, owner) of each host-side value that a captured graph relies on.

    `owner` is the object whose address is the value; None = the value is no address.
    """
    yield ("the number of micro-batches of a step",), moe_state.num_micro_batches, None
    for name, module in model.named_modules():
        config = vars(module).get("config")
        yield ("train or eval mode", name), module.training, None
        yield ("the number of hooks", name), len(list_module_hooks(module)), None
        yield ("the config", name), id(config), config
        for tensor_name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is None:
                continue
            local = get_local_tensor(tensor).detach()
            yield ("requires_grad", name, tensor_name), tensor.requires_grad, None
            yield ("the number of hooks", name, tensor_name), count_gradient_hooks(tensor), None
            yield ("the memory", name, tensor_name), local.data_ptr(), local
    for name, layer in moe_state.layers.items():
        yield ("the balance config", name), id(layer.tracker.counts), layer.tracker.counts
    yield ("the loss scale",), id(moe_state.loss_scale), moe_state.loss_scale

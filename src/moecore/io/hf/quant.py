"""Tensors of a Hugging Face directory by their unquantised names, dequantised box by box.

Legend: r, c rows and columns of a matrix, E experts, I input dim, O output dim, G = I / 32 groups.

| stored | unquantised |
| --- | --- |
| X of any float dtype | X |
| X.weight fp8 [r, c], X.weight_scale_inv [ceil(r / 128), ceil(c / 128)] | X.weight |
| X_blocks uint8 [E, O, G, 16], X_scales uint8 [E, O, G] (MXFP4) | X [E, I, O], as gpt-oss has it |
| X.weight uint8 [r * c / 2, 1], .absmax, .quant_map, .quant_state (bitsandbytes) | X.weight |

Source: the formats of DeepSeek-V3 (arXiv:2412.19437, section 3.3), the OCP microscaling
specification (MXFP4: E2M1 values, E8M0 scales), and bitsandbytes 0.50, `QuantState.as_dict`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from moecore.io.hf.files import Box, BoxReader, HFFiles
from moecore.io.hf.pieces import FileView, TensorPiece, ViewDim
from moecore.kernels.rows.four_bit import dequantise
from moecore.kernels.rows.scaling import Blocks

SCALE = "_scale_inv"
MX_GROUP = 32
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Suffixes of the tensors that describe a weight in bitsandbytes' 4 bits.
BNB_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
BNB_SCALES = (".absmax", ".quant_map")
BNB_NESTED = (".nested_absmax", ".nested_quant_map")


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor of a Hugging Face directory by its unquantised name; subclasses dequantise it."""

    suffixes: ClassVar[tuple[str, ...]] = ("",)  # of the names of the tensors in files
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the values that `read` returns
    quantized: bool = False  # whether values are dequantised, and may be loaded into any float

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the file tensors that `read` reads."""
        return tuple(self.name + suffix for suffix in self.suffixes)

    def read(self, files: BoxReader, box: Box) -> Tensor:
        """Return a box (a slice with start and stop per dim) as a new CPU tensor."""
        return files.read(self.name, box)


@dataclass(frozen=True, slots=True)
class FP8Source(TensorSource):
    """A matrix in FP8 with one scale per block of rows and columns; `read` returns fp32."""

    suffixes = ("", SCALE)
    dtype: torch.dtype = torch.float32
    quantized: bool = True
    block: tuple[int, int] = (128, 128)

    def read(self, files: BoxReader, box: Box) -> Tensor:
        """Return the dequantised fp32 values of a box (row and column slices), on the CPU."""
        sides = zip(box, self.block, strict=True)
        over = tuple(slice(s.start // b, -(-s.stop // b)) for s, b in sides)
        values_rc = files.read(self.name, box)
        scales = files.read(self.name + SCALE, over)
        return dequantize_fp8(values_rc, scales, self.block, box[0].start, box[1].start)


@dataclass(frozen=True, slots=True)
class MXFP4Source(TensorSource):
    """Stacked matrices [experts, inputs, outputs] in MXFP4; `read` returns bf16, which is exact."""

    suffixes = ("_blocks", "_scales")
    dtype: torch.dtype = torch.bfloat16
    quantized: bool = True

    def read(self, files: BoxReader, box: Box) -> Tensor:
        """Return the dequantised bf16 values of a box (expert, input and output slices) on CPU."""
        experts, inputs, outputs = box
        first, last = inputs.start // MX_GROUP, -(-inputs.stop // MX_GROUP)
        groups = (experts, outputs, slice(first, last))
        blocks_eogb = files.read(f"{self.name}_blocks", (*groups, slice(0, MX_GROUP // 2)))
        scales_eog = files.read(f"{self.name}_scales", groups)
        values_eoi = dequantize_mxfp4(blocks_eogb, scales_eog)
        start = first * MX_GROUP
        return values_eoi[..., inputs.start - start : inputs.stop - start].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class BitsAndBytesSource(TensorSource):
    """A matrix in bitsandbytes' NF4 or FP4; `read` returns fp32 values quant_map[code] * scale.

        .quant_map fp32 [16]                    values of the codes; a byte's high half is first
        .absmax [groups]                        fp32 scales, or uint8 codes of scales (nested)
        .nested_quant_map fp32 [256]            values of the scales' codes
        .nested_absmax fp32                     one scale per `nested_blocksize` scales
        .quant_state.bitsandbytes__nf4 uint8    JSON: shape, blocksize, nested_offset, ..

    A group is a run of `blocksize` values of the flat matrix. A nested scale is
    nested_quant_map[code] * nested_absmax + nested_offset. If NF4 values in groups of 64 are
    quantised again, codes and scales equal the files' codes and scales.
    """

    dtype: torch.dtype = torch.float32
    quantized: bool = True
    state_name: str = field(kw_only=True)
    state: Mapping[str, Any] = field(kw_only=True)  # the JSON of the files

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the file tensors that `read` reads, and of `.quant_state`."""
        suffixes = ("", *BNB_SCALES, *(BNB_NESTED if self._is_nested else ()))
        return (*(self.name + suffix for suffix in suffixes), self.state_name)

    @property
    def _is_nested(self) -> bool:
        """Whether the scales are quantised."""
        return "nested_offset" in self.state

    def read(self, files: BoxReader, box: Box) -> Tensor:
        """Return the dequantised fp32 values of a box (row and column slices), on the CPU."""
        # Groups are runs of the flat matrix, and may contain values of two rows.
        rows, columns = box
        size, (N, K) = int(self.state["blocksize"]), self.shape
        first, last = rows.start * K // size, -(-rows.stop * K // size)
        start, stop = first * size, min(last * size, N * K)
        code_pairs = files.read(
            self.name, (slice(start // 2, -(-stop // 2)), slice(0, 1))
        ).flatten()
        codes = torch.stack((code_pairs >> 4, code_pairs & 15), dim=-1).flatten()[: stop - start]
        quant_map = files.read(f"{self.name}.quant_map", (slice(0, 16),))
        scales = self._read_scales(files, first, last).repeat_interleave(size)[: stop - start]
        values = quant_map[codes.int()].mul_(scales)[rows.start * K - start :]
        return values[: (rows.stop - rows.start) * K].view(-1, K)[:, columns]

    def _read_scales(self, files: BoxReader, first: int, last: int) -> Tensor:
        """Return the fp32 scales of groups `first` to `last` - 1."""
        scales = files.read(f"{self.name}.absmax", (slice(first, last),))
        if not self._is_nested:
            return scales
        size = int(self.state["nested_blocksize"])
        outer = slice(first // size, -(-last // size))
        outer_scales = files.read(f"{self.name}.nested_absmax", (outer,))
        nested_map = files.read(f"{self.name}.nested_quant_map", (slice(0, 256),))
        places = torch.arange(first, last, device="cpu") // size - outer.start
        offset = float(self.state["nested_offset"])
        return nested_map[scales.int()].mul_(outer_scales[places]).add_(offset)


@dataclass(frozen=True, slots=True)
class ViewedSource(TensorSource):
    """A tensor that is a strided `view` of `origin`, another tensor of the directory."""

    origin: TensorSource = field(kw_only=True)
    view: FileView = field(kw_only=True)

    def read(self, files: BoxReader, box: Box) -> Tensor:
        """Return a box (slices) of the view, read as the smallest enclosing box of `origin`."""
        starts, dims, rest = list(self.view.starts), list[ViewDim](), list(self.view.dims)
        sizes, inner_box = list[int](), list[slice]()
        for part, n in zip(box, self.shape, strict=True):
            group = list[ViewDim]()  # the view's dims that this dim flattens
            while math.prod(dim[1] for dim in group) < n:
                group.append(rest.pop(0))
            inner = math.prod(dim[1] for dim in group[1:])
            first, last = part.start // inner, -(-part.stop // inner)
            if group:
                d, _, step = group[0]
                starts[d] += first * step
                dims += [(d, last - first, step), *group[1:]]
            sizes.append((last - first) * inner)
            inner_box.append(slice(part.start - first * inner, part.stop - first * inner))
        stops = [start + 1 for start in starts]
        for d, n, step in dims:
            stops[d] += (n - 1) * step
        spans = tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))
        values = self.origin.read(files, spans).contiguous()
        view = FileView(tuple(values.shape), (0,) * values.ndim, tuple(dims))
        return view.apply(values).reshape(sizes)[tuple(inner_box)]


def read_box(
    files: BoxReader, sources: Mapping[str, TensorSource], piece: TensorPiece, box: Box
) -> Tensor:
    """Read a box (one slice per dim) of a file tensor, dequantised, into a new CPU tensor."""
    source = sources[piece.name]
    if piece.view is not None:
        parts = (source.name, piece.shape, source.dtype, source.quantized)
        source = ViewedSource(*parts, origin=source, view=piece.view)
    return source.read(files, box)


def dequantize_fp8(
    values_rc: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    first_row: int = 0,
    first_col: int = 0,
) -> Tensor:
    """Multiply FP8 values [rows, columns] by the scales of their blocks; return fp32.

    `block` has the rows and columns of a block. `first_row` and `first_col` are the position
    of the values in the full matrix. `scales` has one scale per block that overlaps the values.
    """
    # Example, block (2, 2): values that start at row 1 have their rows 0 | 1 2 in blocks 0 | 1.
    rows = torch.arange(first_row, first_row + values_rc.shape[0], device=scales.device) // block[0]
    cols = torch.arange(first_col, first_col + values_rc.shape[1], device=scales.device) // block[1]
    rows, cols = rows - first_row // block[0], cols - first_col // block[1]
    return values_rc.float().mul_(scales.float()[rows][:, cols])


def dequantize_mxfp4(blocks_ogb: Tensor, scales_og: Tensor) -> Tensor:
    """Return the bf16 values [..., 32 * groups] of MXFP4 blocks and scales.

    `blocks_ogb`, uint8 [..., groups, 16], has two E2M1 values per byte. The 32 values of a group
    are multiplied by 2^(scale - 127); `scales_og` is uint8 [..., groups].
    """
    # Exact, or inf. Example: byte 0x91 has 0.5 (low half, 1) and then -0.5 (high half, 9).
    return dequantise(Blocks(blocks_ogb.flatten(-2), scales_og, "mxfp4"), torch.bfloat16)


def find_sources(
    files: HFFiles, quantization: Mapping[str, Any] | None
) -> tuple[dict[str, TensorSource], list[str]]:
    """Return {unquantised name: `TensorSource`} of a directory, and error texts for bad tensors."""
    entries, problems = files.tensors, list[str]()
    sources: dict[str, TensorSource] = {}
    size = (quantization or {}).get("weight_block_size") or (128, 128)
    block = tuple(size) if isinstance(size, list | tuple) else (size,)
    for name, entry in entries.items():
        if name.endswith((SCALE, "_scales")):
            values = name.removesuffix(SCALE)
            if values == name:
                values = name.removesuffix("scales") + "blocks"
            if values not in entries:
                problems.append(f"{name} has no {values}")
        elif name.endswith("_blocks"):
            problems += _find_mxfp4_problems(files, name)
            E, out_dim, groups = (*entry.shape, 0, 0, 0)[:3]
            name = name.removesuffix("_blocks")
            sources[name] = MXFP4Source(name, (E, groups * MX_GROUP, out_dim))
        elif entry.dtype in FP8:
            problems += _find_fp8_problems(files, name, block)
            sources[name] = FP8Source(name, entry.shape, block=(block[0], block[-1]))
        else:
            sources[name] = TensorSource(name, entry.shape, entry.dtype)
    problems += _join_bitsandbytes_sources(files, sources)
    return sources, problems


def _find_fp8_problems(files: HFFiles, name: str, block: tuple[Any, ...]) -> list[str]:
    """Return [error text] if an FP8 tensor does not have one scale per block, or []."""
    shape, scales = files.tensors[name].shape, files.tensors.get(name + SCALE)
    if scales is None:
        return [f"{name} (fp8) has no {name}{SCALE}"]
    if len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
        return [f"quantization_config.weight_block_size ({block}) must be two whole numbers"]
    grid = tuple(-(-n // b) for n, b in zip(shape, block, strict=False))
    if len(shape) != 2 or scales.shape != grid or not scales.dtype.is_floating_point:
        return [f"{name}{SCALE} {scales.shape} {scales.dtype} must be {grid}, a float"]
    return []


def _find_mxfp4_problems(files: HFFiles, name: str) -> list[str]:
    """Return [error text] if an MXFP4 tensor has no scales or a wrong shape or dtype, or []."""
    entry, other = files.tensors[name], name.removesuffix("blocks") + "scales"
    scales = files.tensors.get(other)
    if scales is None:
        return [f"{name} has no {other}"]
    if len(entry.shape) != 4 or entry.shape[3] * 2 != MX_GROUP or entry.dtype != torch.uint8:
        return [f"{name} {entry.shape} {entry.dtype} must be uint8 [E, O, G, {MX_GROUP // 2}]"]
    if scales.shape != entry.shape[:3] or scales.dtype != torch.uint8:
        return [f"{other} {scales.shape} {scales.dtype} must be {entry.shape[:3]}, uint8"]
    return []


def _join_bitsandbytes_sources(files: HFFiles, sources: dict[str, TensorSource]) -> list[str]:
    """Replace the `sources` of a weight's tensors by one source, in place; return error texts."""
    problems = list[str]()
    for state_name, entry in files.tensors.items():
        suffix = next((s for s in BNB_STATES if state_name.endswith(s)), None)
        if suffix is None:
            continue
        name = state_name.removesuffix(suffix)
        data = files.read(state_name, tuple(slice(0, n) for n in entry.shape))
        try:
            state = json.loads(bytes(data.flatten().tolist()))
            shape = tuple(int(n) for n in state["shape"])
            source = BitsAndBytesSource(name, shape, state_name=state_name, state=state)
            problem = _find_bitsandbytes_problem(files, source)
        except (KeyError, TypeError, ValueError, RecursionError):
            problem = f"{state_name} must be JSON with blocksize and shape"
        for other in (state_name, *(name + suffix for suffix in (*BNB_SCALES, *BNB_NESTED))):
            sources.pop(other, None)
        if problem is None:
            sources[name] = source
        else:
            problems.append(problem)
    return problems


def _find_bitsandbytes_problem(files: HFFiles, source: BitsAndBytesSource) -> str | None:
    """Return an error text if the tensors of a source do not fit its description, or None."""
    name, state, numel = source.name, source.state, math.prod(source.shape)
    num_groups = -(-numel // int(state["blocksize"]))
    shapes = {"": (-(-numel // 2), 1), ".absmax": (num_groups,), ".quant_map": (16,)}
    dtypes = {"": torch.uint8, ".absmax": torch.float32, ".quant_map": torch.float32}
    if "nested_offset" in state:
        num_outer = -(-num_groups // int(state["nested_blocksize"]))
        shapes |= {".nested_absmax": (num_outer,), ".nested_quant_map": (256,)}
        dtypes |= {".absmax": torch.uint8, **dict.fromkeys(BNB_NESTED, torch.float32)}
        float(state["nested_offset"])
    for suffix, shape in shapes.items():
        entry = files.tensors.get(name + suffix)
        if entry is None:
            return f"{name} (4 bits of bitsandbytes) has no {name}{suffix}"
        if (entry.shape, entry.dtype) != (shape, dtypes[suffix]):
            file_layout = f"{name}{suffix} {entry.shape} {entry.dtype}"
            return f"{file_layout} must be {shape} {dtypes[suffix]}"
    return None if len(source.shape) == 2 else f"{name} {source.shape} must be a matrix"

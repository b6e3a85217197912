"""Files of a teacher's log-probabilities, for `moecore finetune --distill-log-probs DIR`.

The directory has one or more .safetensors files, each with these tensors of n examples:

    vocab_size      int64 [1]
    cu_seqlens      int64 [n + 1]   the index of each example's first token, and N
    input_ids       int32 [N]       the tokens of all examples
    is_answer       bool [N]        True = the token is learned
    top_ids         int32 [M, k]    the k most probable tokens at the place of each learned token
    top_log_probs   float [M, k]    their log-probabilities, in descending order

The first token of an example has no row among the M. Training finds an example by its tokens, so
the files may have any order.

Legend: N tokens, M learned tokens, k tokens per learned token, A micro-batches.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moecore.base.failures import run_and_share_errors
from moecore.base.progress import Report, track_progress
from moecore.io.hf.files import HFFiles, read_file_header
from moecore.kernels.cross_entropy import IGNORE_INDEX
from moecore.models.distillation import TopLogProbs
from moecore.parallel.mesh import Meshes
from moecore.recipes.chat import Example
from moecore.recipes.data import BatchShape, PackedSteps, StepBatch, Steps
from moecore.recipes.examples import make_packed_steps
from moecore.recipes.files import format_option, name_option_in_errors
from moecore.recipes.hf_model import make_scored_inputs, write_export
from moecore.train.step import TrainStep

OPTION = "--distill-log-probs"
FILE_BYTES = 1 << 30  # of log-probabilities, after which the next file begins
CHUNK_ROWS = 1 << 16  # of ids that are checked at a time
DTYPES = {
    "vocab_size": (torch.int64,),
    "cu_seqlens": (torch.int64,),
    "input_ids": (torch.int32,),
    "is_answer": (torch.bool,),
    "top_ids": (torch.int32,),
    "top_log_probs": (torch.float32, torch.float16, torch.bfloat16),
}


class TeacherFiles:
    """The examples of a directory, whose log-probabilities are read when they are needed.

    ValueError on every rank for files of another format, vocabulary or a smaller k. Collective.
    """

    def __init__(self, path: Path, *, vocab_size: int, top_k: int | None) -> None:
        self.path, self._name, self._vocab_size = path, format_option(OPTION, path), vocab_size
        self._rows: dict[bytes, tuple[HFFiles, int]] = {}  # of each example: its file, first row
        with name_option_in_errors(OPTION):
            self.top_k: int = run_and_share_errors(lambda: self._open(top_k))

    def _open(self, top_k: int | None) -> int:
        """Read all but log-probabilities; return the number of columns that are read."""
        paths = sorted(self.path.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{self._name} must have .safetensors files: write them first")
        widths = {self._open_file(file) for file in paths}
        if len(widths) > 1:
            raise ValueError(f"{self._name} must have one k in all files, not {sorted(widths)}")
        (width,) = widths
        if top_k is not None and top_k > width:
            raise ValueError(
                f"--distill-top-k ({top_k}) must be <= the tokens that {self._name} has of each "
                f"learned token ({width}): lower it, or write the files with it"
            )
        return top_k or width

    def _open_file(self, file: Path) -> int:
        """Register the examples of a file, and return its k; ValueError if it is invalid."""
        name, header = format_option(OPTION, file), read_file_header(file)
        for key, dtypes in DTYPES.items():
            dtype = header[key].dtype if key in header else None
            if dtype not in dtypes:
                raise ValueError(f"{name} must have {key} of {dtypes[0]}, not {dtype}: convert it")
        shapes = {key: header[key].shape for key in DTYPES}
        num_dims = [len(shape) for shape in shapes.values()]
        if num_dims != [1, 1, 1, 1, 2, 2] or not shapes["top_ids"][1]:
            raise ValueError(f"{name} must have top_ids [M, k], k >= 1, not {shapes}: convert it")
        files = HFFiles(file.parent, header)
        vocab_size, cu_n, ids_N, is_answer_N = (
            files.read(key, (slice(0, shapes[key][0]),)) for key in list(DTYPES)[:4]
        )
        if vocab_size.tolist() != [self._vocab_size]:
            raise ValueError(
                f"{name} must have the vocab_size ({self._vocab_size}) of --model, not "
                f"{vocab_size.tolist()}: choose a teacher with the same tokenizer"
            )
        (M, k), num_learned = shapes["top_ids"], -1
        is_ascending = cu_n[:1].tolist() == [0] and bool((cu_n.diff() > 0).all())
        if is_ascending and int(cu_n[-1]) == len(ids_N) == len(is_answer_N):
            num_learned = int(is_answer_N.index_fill(0, cu_n[:-1], False).sum())
        if num_learned != M or shapes["top_log_probs"] != (M, k):
            raise ValueError(f"{name} must have the shapes of its cu_seqlens, not {shapes}")
        for start in range(0, M, CHUNK_ROWS):
            box = slice(start, min(start + CHUNK_ROWS, M)), slice(0, k)
            ids, log_probs = files.read("top_ids", box), files.read("top_log_probs", box).float()
            if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
                raise ValueError(
                    f"{name} must have top_ids >= 0 and < vocab_size ({self._vocab_size}), not "
                    f"{int(ids.min())} to {int(ids.max())}: write it again"
                )
            if not (log_probs.isfinite().all() and (log_probs.diff(dim=1) <= 0).all()):
                raise ValueError(
                    f"{name} must have finite top_log_probs in descending order: write it again"
                )
        row = 0
        for start, stop in zip(cu_n[:-1].tolist(), cu_n[1:].tolist(), strict=True):
            example = Example(ids_N[start:stop], is_answer_N[start:stop])
            self._rows[_hash_example(example)] = files, row
            row += example.num_answers
        return k

    def check(self, examples: Sequence[Example]) -> None:
        """Raise ValueError if an example is not in the files."""
        missing = [example for example in examples if _hash_example(example) not in self._rows]
        if missing:
            raise ValueError(
                f"{self._name} must have each example of --data ({len(missing)} of {len(examples)} "
                f"are missing, the first of {len(missing[0].tokens_T)} tokens): write it with the "
                "same data, tokenizer, template and --seq-len"
            )

    def read(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """Return ids, int32, and log-probabilities, fp32 [M, k], of the learned tokens in order."""
        ids = [torch.empty(0, self.top_k, dtype=torch.int32, device="cpu")]
        log_probs = [torch.empty(0, self.top_k, dtype=torch.float32, device="cpu")]
        for example in examples:
            files, row = self._rows[_hash_example(example)]
            box = slice(row, row + example.num_answers), slice(0, self.top_k)
            ids.append(files.read("top_ids", box))
            log_probs.append(files.read("top_log_probs", box).float())
        return torch.cat(ids), torch.cat(log_probs)


def _hash_example(example: Example) -> bytes:
    """Return the SHA-256 of an example's tokens, and of which of them are learned."""
    digest = hashlib.sha256(example.tokens_T.contiguous().numpy().data)
    digest.update(example.is_answer_T[1:].contiguous().numpy().data)
    return digest.digest()


def make_distillation_steps(
    examples: Sequence[Example],
    shape: BatchShape,
    *,
    files: TeacherFiles,
    seed: int | None,
    data_rank: int,
    packs: bool,
) -> Steps[StepBatch]:
    """Return this data rank's packed steps; extras are ids and log-probabilities [A, M, k].

    M is the number of labels of the micro-batch with the most labels, plus 1.
    """
    steps = make_packed_steps(examples, shape, seed=seed, data_rank=data_rank, packs=packs)

    def collate(example_idxs: list[int]) -> StepBatch:
        batch = steps.build_batch(example_idxs)
        counts = (batch.labels_ABT != IGNORE_INDEX).sum((1, 2)).tolist()
        values = files.read([examples[i] for i in example_idxs])
        extras = tuple(
            pad_sequence([F.pad(part, (0, 0, 0, 1)) for part in value.split(counts)], True)
            for value in values
        )
        return replace(batch, extras=extras)

    return Steps(steps.sampler, collate)


def write_teacher_files(
    teacher: Any,
    meshes: Meshes,
    examples: Sequence[Example],
    steps: PackedSteps,
    target: Path,
    *,
    top_k: int,
    vocab_size: int,
) -> None:
    """Write the directory `target` with the `top_k` log-probabilities of a teacher. Collective.

    `steps` reads `examples` in one pass of micro-batches.
    """
    step, group = TrainStep(teacher), meshes.micro_batch_group
    pending: list[tuple[Example, Tensor, Tensor]] = []
    num_files = 0

    def flush(draft: Path) -> None:
        nonlocal num_files
        from safetensors.torch import save_file

        examples, ids, log_probs = zip(*pending, strict=True)
        lengths = [0, *(len(example.tokens_T) for example in examples)]
        tensors = {
            "vocab_size": torch.tensor([vocab_size], dtype=torch.int64, device="cpu"),
            "cu_seqlens": torch.tensor(lengths, dtype=torch.int64, device="cpu").cumsum(0),
            "input_ids": torch.cat([example.tokens_T for example in examples]),
            "is_answer": torch.cat([example.is_answer_T for example in examples]),
            "top_ids": torch.cat(ids),
            "top_log_probs": torch.cat(log_probs),
        }
        save_file(tensors, draft / f"log-probs-{meshes.data_rank:05d}-{num_files:05d}.safetensors")
        num_files += 1
        pending.clear()

    def write(draft: Path, _report: Report) -> None:
        draft.mkdir(parents=True, exist_ok=True)
        for idxs in track_progress(steps.sampler, "scoring", unit="batches", as_lines=True):
            batch = steps.build_batch(idxs)
            parts = [part[0].to(meshes.device) for part in batch.list_tensors()]
            scores = TopLogProbs(parts[1], top_k=top_k, heads=[])
            step.compute_losses([make_scored_inputs(scores, *parts)])
            if not scores.rows or (group is not None and group.rank() > 0):
                continue  # another rank of the same examples writes
            has_label_BT = batch.labels_ABT[0] != IGNORE_INDEX
            counts = [examples[i].num_answers for i in idxs]
            ids, log_probs = (x_BTk.cpu()[has_label_BT].split(counts) for x_BTk in scores.rows)
            ids = [part.int() for part in ids]
            pending.extend(zip([examples[i] for i in idxs], ids, log_probs, strict=True))
            if sum(part.nbytes for _, _, part in pending) >= FILE_BYTES:
                flush(draft)
        # Rank 0 publishes the directory when all ranks have written their last files.
        run_and_share_errors(lambda: flush(draft) if pending else None)

    write_export(target, write, lambda _draft: None)

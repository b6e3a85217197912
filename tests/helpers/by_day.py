"""Cases of dear tests that `make test` runs; `make nightly` runs all of them.

A file has tests by name, "*" for those that are not named, and of each the cases that run by day:
whole ids, or one parametrization's part of them. A capability keeps at least one case by day, which
compares numbers with one process or with a reference.
"""

from __future__ import annotations

from typing import Any

import pytest

Cases = dict[str, tuple[str, ...]]
BY_DAY: dict[str, Cases] = {
    "test_parity.py": {
        "test_equals_one_process": (
            "8r-dp_shard8-ep4-edp_shard2-sigmoid-hierarchical-mean-accumulate_2-domains_of_2-clones_2",
            "8r-dp_replicate8-dp_shard1-edp_replicate4-edp_shard1-ep2-softmax-alltoall-mean-frozen",
            "6r-dp_shard2-tp3-ep3-edp_shard2-expert-choice-allgather-mean",
            "6r-dp_replicate2-dp_shard1-tp3-ep2-etp3-edp_shard1-biases-alltoall-mean",
            "6r-dp_shard3-tp2-edp_replicate3-edp_shard1-ep2-softmax-alltoall-sum-sliced-recompute-accumulate_2",
            "8r-dp_shard2-cp4-ep8-edp_shard1-latent-capacity-hierarchical-mean-packed-domains_of_4-p2p",
            "6r-dp_shard1-cp3-tp2-ep3-edp_shard2-top-1-alltoall-mean-a2a",
            "6r-dp_shard2-cp3-ep6-edp_shard1-biases-alltoall-mean-p2p",
        ),
        "test_rounding_is_at_most_twice_as_wrong_as_one_process": (
            "8r-dp_shard2-cp4-ep8-edp_shard1-balanced-alltoall-mean-fp8-a2a+p2p",
            "8r-dp_shard8-ep4-etp2-edp_shard1-balanced-alltoall-mean-bf16",
        ),
    },
    "parallel/pipeline/test_parity.py": {
        "test_pipeline_is_one_process": (
            "4r-pp2-dp_shard2-ep2-edp_shard1-sigmoid-alltoall-mean-accumulate_2-gpipe-None",
            "4r-pp2-dp_shard2-ep2-edp_shard1-gated-shared-alltoall-mean-accumulate_3-interleaved-Et|t|tt|L",
            "8r-pp2-dp_shard2-cp2-ep4-edp_shard1-softmax-alltoall-mean-packed-accumulate_3-p2p-1f1b-None",
            "6r-pp2-dp_shard1-tp3-ep3-edp_shard1-softmax-alltoall-mean-recompute-accumulate_4-zbv-Et|tt|t|L",
            "6r-pp2-dp_shard3-ep3-edp_shard1-softmax-alltoall-mean-accumulate_2-clones_1-dualpipe-v-None",
            "4r-dp_shard4-ep2-edp_shard2-sigmoid-alltoall-mean-accumulate_4-overlapped-None",
        ),
    },
    "parallel/pipeline/test_offload.py": {"*": ("interleaved", "pairs")},
    "parallel/fsdp/test_accumulate.py": {
        "*": ("whole experts, gathered once", "two blocks together", "replicated"),
    },
    "parallel/fsdp/test_fp8_gather.py": {
        "test_bytes_are_those_of_one_rank": ("tp, ep", "hybrid"),
        "test_losses_are_those_of_bf16_gathers": ("tp, ep",),
        "test_when_units_are_gathered_changes_no_bit": ("kept", "regions"),
        "test_a_late_backward_raises": ("tp, ep",),
    },
    "parallel/fsdp/test_quantised_gather.py": {
        "test_bits_are_those_of_wide_gathers": ("delayed, cut", "nvfp4, cut", "nvfp4, adapted"),
    },
    "parallel/fsdp/test_requires_grad.py": {"*": ("all freed", "LoRA", "FP8")},
    "parallel/fsdp/test_skipped.py": {
        "*": (
            "freed",
            "together",
            "whole",
            "experts elsewhere, bf16, in pairs",
            "experts elsewhere, two levels, tokens as FP8",
            "ernie4_5_vl_moe",
        ),
    },
    "parallel/fsdp/test_unused.py": {
        "*": (
            "branches",
            "branches, replicas",
            "branches, experts elsewhere, in pairs",
            "extra loss, experts elsewhere",
            "detached",
            "no_grad",
            "constant, gathered once",
            "no loss",
            "twice",
            "reads the first value, experts elsewhere",
            "dropped",
            "recomputed, experts elsewhere",
            "skipped, reentrant",
        ),
    },
    "parallel/fsdp/test_deferred.py": {
        "*": (
            "optim_grads_params, ep 2",
            "tp",
            "fp8 gathers, tp",
            "reentrant checkpoints",
            "regions",
        ),
    },
    "parallel/fsdp/test_head.py": {
        "*": ("far ahead", "gathered once", "tied", "mtp, accumulated", "mtp, own loss"),
    },
    "parallel/fsdp/test_in_flight.py": {
        "*": (
            "freed-the last one first-False",
            "staying-forwards first-True",
            "staying, but for experts-one forward, one backward-True",
            "freed, in two parts-parts in turns-True",
            "staying, in two parts-parts one by one-True",
        ),
    },
    "parallel/fsdp/test_several_modules.py": {
        "*": (
            "routers-recomputed, saving products",
            "routers-two forwards without the last",
            "blocks-all recomputed",
            "blocks-two backwards",
            "blocks-a block alone",
            "gathered-all reentrant",
            "gathered-inner loss after an evaluation",
            "gathered-failed on one rank",
            "no prefetch-two forwards",
        ),
    },
    "moe/test_wire.py": {
        "test_has_the_bits_of_tokens_that_were_rounded": (
            "ep2-edp3-uneven",
            "ep2-edp3-padded capacity",
            "ep3-etp2-dropped",
            "ep3-etp2-blockwise, amax",
            "ep3-etp2-nvfp4",
            "3 x 2-padding",
            "3 x 2-whole layer again",
            "2 x 3, stores-a rank without tokens",
            "2 x 3, stores-blockwise",
            "3 x 2, etp-latent",
            "3 x 2, etp-bf16",
        ),
    },
    "moe/test_pairs.py": {
        "test_pairs_have_the_bits_of_one_after_the_other": (
            "staying",
            "freed",
            "two levels",
            "tokens as FP8",
            "blocks computed again",
        ),
        "*": ("staying", "blocks computed again"),
    },
    "moe/test_hierarchical.py": {"*": ("2 x 2, etp", "3 x 2")},
    "moe/test_experts_fp8_ranks.py": {
        "test_equals_one_process": (
            "ep3-etp2-nvlink",
            "ep3-edp2-allgather",
            "ep6-hierarchical-fp8",
        ),
        "test_clones_of_hot_experts_change_no_row": ("ep6-alltoall-fp8",),
    },
    "models/test_context_parallel.py": {
        "test_equals_one_process": (
            "latents gathered over tp",
            "latents, ring",
            "grouped, heads",
            "grouped, both",
            "window, ring",
            "sparse",
            "linear over tp",
            "hybrid over tp",
        ),
    },
    "models/test_dynamic_context.py": {
        "test_equals_one_process": ("documents one by one", "grouped over tp, ring", "latent"),
    },
    "models/test_mtp_ranks.py": {"*": ("ep4 over tp2, sum", "hsdp, etp2", "detached")},
    "models/test_mtp.py": {
        "test_losses_and_gradients_equal_the_plain_computation": (
            "latent, 2-None",
            "grouped, tied, dense, 2-200",
            "windows, sinks, biases, 1-None",
            "linear, gates, 1-200",
            "latent, repeated-None",
            "latent, 2, detached-200",
        ),
    },
    "train/graphs/test_graphed_blocks.py": {
        "*": ("plain", "computed again", "FP8", "stages", "pairs"),
    },
    "train/optim/test_muon_ranks.py": {
        "test_ranks_equal_one_process": ("resumed-tp-model-dim", "resumed-etp-strided"),
    },
    "train/optim/test_width.py": {"test_changes_stay_flat_with_the_width": ("adamw", "original")},
    "io/hf/test_ranks.py": {
        "*": ("native-tp2-ep2-replicate2", "mixtral-ep2-edp2", "gpt-oss-ep2-etp2", "ep2-etp2"),
    },
    "io/hf/test_stream.py": {
        "test_a_stream_has_the_bits_of_the_files": ("ep2-etp2", "tp2-ep2"),
    },
    "io/checkpoint/test_layouts.py": {
        "test_every_layout_loads_what_another_saved": (
            "native-to-two-tp2-etp2-to-two-ep2",
            "native-to-ep2-etp2-to-two-tp2-etp2",
            "native-to-tp2-ep2-replicate2-to-edp2-etp2",
            "native-to-plain-to-replicate2-ep2",
            "concatenated-to-etp4-to-ep2-etp2",
            "concatenated-to-one-to-edp2-etp2",
        ),
    },
    "precision/test_emulated_ranks.py": {
        "*": ("tp and etp-nvfp4", "cp and ep-mxfp8", "pp and ep-nvfp4"),
    },
    "rl/test_engine_ranks.py": {
        "test_numbers_are_those_of_one_process": ("dp3-tp2-ep3", "pp3-cp2-ep2", "hf-dp2-cp3-ep2"),
    },
    "rl/test_replay_ranks.py": {"*": ("shared-tp2-ep4", "expert-choice-tp2-ep4")},
    "families/transformers/test_lora_ranks.py": {
        "test_training_equals_stock_peft": ("etp", "tp", "gpt-oss", "down-alone"),
    },
}


def is_by_day(item: pytest.Item) -> bool:
    """Whether `make test` runs a case; those of other tests and files run always."""
    tests = BY_DAY.get(str(item.path.relative_to(item.config.rootpath)).removeprefix("tests/"))
    if tests is None or not isinstance(item, pytest.Function):
        return True
    callspec: Any = getattr(item, "callspec", None)
    name = item.originalname
    if callspec is None:
        return tests.get(name) != ()
    cases = tests.get(name, tests.get("*"))
    return cases is None or not {callspec.id, *callspec._idlist}.isdisjoint(cases)

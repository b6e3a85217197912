"""Cases of dear tests that `make test` runs; `make nightly` runs all of them.

A file has tests by name, "*" for those that are not named, and of each the cases that run by day:
whole ids, or the beginning of one parametrization's part of them, with "; " between them. Nothing
is left out of a test without such a case. A capability keeps at least one case by day, which
compares numbers with one process or with a reference.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

Cases = dict[str, str]
BY_DAY: dict[str, Cases] = {
    "test_parity.py": {
        "test_equals_one_process": (
            "8r-dp_shard8-ep4-edp_shard2-sigmoid-hierarchical-mean-accumulate_2-domains_of_2"
            "-clones_2; "
            "8r-dp_replicate8-dp_shard1-edp_replicate4-edp_shard1-ep2-softmax-alltoall-mean"
            "-frozen; "
            "6r-dp_shard2-tp3-ep3-edp_shard2-expert-choice-allgather-mean; "
            "6r-dp_replicate2-dp_shard1-tp3-ep2-etp3-edp_shard1-biases-alltoall-mean; "
            "6r-dp_shard3-tp2-edp_replicate3-edp_shard1-ep2-softmax-alltoall-sum-sliced"
            "-recompute-accumulate_2; "
            "8r-dp_shard2-cp4-ep8-edp_shard1-latent-capacity-hierarchical-mean-packed"
            "-domains_of_4-p2p; "
            "6r-dp_shard1-cp3-tp2-ep3-edp_shard2-top-1-alltoall-mean-a2a"
        ),
        "test_rounding_is_at_most_twice_as_wrong_as_one_process": (
            "8r-dp_shard2-cp4-ep8-edp_shard1-balanced-alltoall-mean-fp8-a2a+p2p; "
            "8r-dp_shard8-ep4-etp2-edp_shard1-balanced-alltoall-mean-bf16"
        ),
    },
    "parallel/pipeline/test_parity.py": {
        "test_pipeline_is_one_process": (
            "4r-pp2-dp_shard2-ep2-edp_shard1-gated-shared-alltoall-mean-accumulate_3-interleaved"
            "-Et|t|tt|L; "
            "8r-pp2-dp_shard2-cp2-ep4-edp_shard1-softmax-alltoall-mean-packed-accumulate_3-p2p"
            "-1f1b-None; "
            "6r-pp2-dp_shard1-tp3-ep3-edp_shard1-softmax-alltoall-mean-recompute-accumulate_4"
            "-zbv-Et|tt|t|L; "
            "6r-pp2-dp_shard3-ep3-edp_shard1-softmax-alltoall-mean-accumulate_2-clones_1"
            "-dualpipe-v-None; "
            "4r-dp_shard4-ep2-edp_shard2-sigmoid-alltoall-mean-accumulate_4-overlapped-None"
        ),
    },
    "parallel/pipeline/test_offload.py": {"*": "interleaved; pairs"},
    "parallel/fsdp/test_accumulate.py": {"*": "two blocks together; replicated"},
    "parallel/fsdp/test_fp8_gather.py": {
        "test_bytes_are_those_of_one_rank": "tp, ep; hybrid",
        "test_when_units_are_gathered_changes_no_bit": "kept; regions",
        "test_a_late_backward_raises": "tp, ep",
    },
    "parallel/fsdp/test_quantised_gather.py": {
        "test_bits_are_those_of_wide_gathers": "delayed, cut; nvfp4, cut; nvfp4, adapted",
    },
    "parallel/fsdp/test_unit.py": {"*": "plain; together; gathered once"},
    "parallel/fsdp/test_requires_grad.py": {"*": "all freed; LoRA; FP8"},
    "parallel/fsdp/test_skipped.py": {
        "*": (
            "freed; together; whole; experts elsewhere, bf16, in pairs; "
            "experts elsewhere, two levels, tokens as FP8; ernie4_5_vl_moe"
        ),
    },
    "parallel/fsdp/test_unused.py": {
        "*": (
            "branches; branches, replicas; branches, experts elsewhere, in pairs; "
            "extra loss, experts elsewhere; detached; no_grad; constant, gathered once; no loss; "
            "twice; reads the first value, experts elsewhere; dropped; "
            "recomputed, experts elsewhere; skipped, reentrant"
        ),
    },
    "parallel/fsdp/test_deferred.py": {
        "*": "optim_grads_params, ep 2; tp; fp8 gathers, tp; reentrant checkpoints; regions",
    },
    "parallel/fsdp/test_head.py": {
        "*": "far ahead; gathered once; tied; mtp, accumulated; mtp, own loss",
    },
    "parallel/fsdp/test_several_modules.py": {
        "*": (
            "routers-recomputed, saving products; routers-two forwards without the last; "
            "blocks-all recomputed; gathered-all reentrant; gathered-failed on one rank; "
            "no prefetch-two forwards"
        ),
    },
    "moe/test_dispatchers.py": {
        "*": (
            "alltoall-ep3-etp2; alltoall-ep3-edp2; allgather-ep3-etp2; nvlink-ep3-etp2; "
            "nccl_ep-ep3-edp2; domains of 2-ep3-etp2; domains of 3, stores-ep6"
        ),
    },
    "moe/test_wire.py": {
        "test_has_the_bits_of_tokens_that_were_rounded": (
            "ep2-edp3-uneven; ep2-edp3-padded capacity; ep3-etp2-dropped; "
            "ep3-etp2-blockwise, amax; ep3-etp2-nvfp4; 3 x 2-padding; 3 x 2-whole layer again; "
            "2 x 3, stores-a rank without tokens; 2 x 3, stores-blockwise; 3 x 2, etp-latent; "
            "3 x 2, etp-bf16"
        ),
    },
    "moe/test_pairs.py": {
        "test_pairs_have_the_bits_of_one_after_the_other": (
            "staying; freed; two levels; tokens as FP8; blocks computed again"
        ),
        "*": "staying; blocks computed again",
    },
    "moe/test_experts_fp8_ranks.py": {
        "test_equals_one_process": "ep3-etp2-nvlink; ep3-edp2-allgather; ep6-hierarchical-fp8",
        "test_clones_of_hot_experts_change_no_row": "ep6-alltoall-fp8",
    },
    "models/test_context_parallel.py": {
        "test_equals_one_process": (
            "latents gathered over tp; latents, ring; grouped, heads; grouped, both; "
            "window, ring; sparse; linear over tp; hybrid over tp"
        ),
    },
    "models/test_dynamic_context.py": {"test_equals_one_process": "grouped over tp, ring; latent"},
    "models/test_mtp_ranks.py": {"*": "ep4 over tp2, sum; hsdp, etp2; detached"},
    "models/test_mtp.py": {
        "test_losses_and_gradients_equal_the_plain_computation": (
            "latent, 2; grouped, tied, dense, 2; windows, sinks, biases, 1; linear, gates, 1; "
            "latent, repeated; latent, 2, detached"
        ),
    },
    "train/memory/test_param_offload.py": {"*": "ep 2, edp 2; replicated; on meta"},
    "train/test_rerun.py": {"*": "both; tokens and rows"},
    "train/test_expert_moves.py": {
        "test_the_run_is_that_without_moves": "ep=2, edp_shard=2, parts; bf16; Muon",
    },
    "train/graphs/test_graphed_blocks.py": {"*": "plain; FP8; stages; pairs"},
    "train/optim/test_muon_ranks.py": {
        "test_ranks_equal_one_process": "resumed-tp-model-dim; resumed-etp-strided",
    },
    "train/optim/test_width.py": {"test_changes_stay_flat_with_the_width": "adamw; original"},
    "io/hf/test_ranks.py": {
        "test_all_layouts_write_the_same_directory": "tp2-ep2-replicate2",
        "*": (
            "native-fsdp; native-tp2-ep2-replicate2; mixtral-ep2-edp2; mixtral-fsdp; "
            "gpt-oss-ep2-etp2"
        ),
    },
    "parallel/test_arguments.py": {"*": "tp; dynamic cp; stages; transformers cp"},
    "parallel/model/test_plan.py": {"test_2048_ranks_of_deepseek_v3": ""},
    "integrations/test_transformers_trainer_ranks.py": {
        "test_equals_stock_trainer_under_ddp": "tokens of all ranks; own balance loss",
        "test_equals_trl_under_ddp": "sft; grpo",
    },
    "integrations/test_torchtitan_ranks.py": {
        "*": "qwen3 tp; deepseek_v3 ep; stock to ep; ep to stock",
    },
    "io/hf/test_stream.py": {"test_a_stream_has_the_bits_of_the_files": "tp2-ep2"},
    "io/checkpoint/test_layouts.py": {
        "test_every_layout_loads_what_another_saved": (
            "native-to-two-tp2-etp2-to-two-ep2; native-to-ep2-etp2-to-two-tp2-etp2; "
            "native-to-tp2-ep2-replicate2-to-edp2-etp2; native-to-plain-to-replicate2-ep2; "
            "concatenated-to-etp4-to-ep2-etp2; concatenated-to-one-to-edp2-etp2"
        ),
    },
    "precision/test_emulated_ranks.py": {"*": "tp and etp-nvfp4; cp and ep-mxfp8; pp and ep-nvfp4"},
    "rl/test_engine_ranks.py": {
        "test_numbers_are_those_of_one_process": "dp3-tp2-ep3; pp3-cp2-ep2; hf-dp2-cp3-ep2",
    },
    "attention/test_context_parallel.py": {
        "test_equals_one_process": (
            "allgather, window; allgather, sinks; a2a, window, sinks; p2p, sinks; p2p, window; "
            "a2a+p2p, window, sinks"
        ),
    },
    "rl/test_dynamic_context.py": {
        "test_numbers_are_those_of_one_cp": "dp4-ep2; pp2-dp2-ep2; hf-dp4-ep2",
    },
    "rl/test_engine_options.py": {"*": "fp16; replay+fp16+offload; dynamic+replay+offload"},
    "rl/test_replay_ranks.py": {"*": "shared-tp2-ep4; expert-choice-tp2-ep4"},
    "families/transformers/test_lora_ranks.py": {
        "test_training_equals_stock_peft": "etp; tp-mlps; gpt-oss",
    },
    "planning/test_attention_kinds.py": {
        "test_few_layers_stand_for_all": "three linear, one full; sparse, two nodes",
        "test_ranks_of_a_pipeline": "model1",
    },
    "planning/test_dry_run.py": {
        "test_a_module_of_prediction_counts_as_often_as_it_runs": "",
        "test_pages_of_rows_are_planned_for_all_layers": "",
        "test_worlds_of_the_same_meshes_one_after_the_other": "",
    },
    "planning/test_gpus.py": {
        "test_a_time_that_is_not_modelled_is_no_number": "gb200-186-mxfp8; rtx5090-32-tensorwise",
    },
    "planning/test_host_memory.py": {"test_a_row_is_the_plan_of_the_command": "mxfp4"},
    "planning/test_memory.py": {
        "test_ranks_hold_what_is_planned": "sharded; replicas; stages; sparse attention",
        "test_many_micro_batches_hold_what_a_few_do": (
            "1f1b-numbers1; overlapped-numbers4; zbv-numbers5"
        ),
        "test_kinds_are_positive_and_add_up": (
            "tiny-deepseek-v3-Et*5|t*3mL-1f1b-optim_grads_params; "
            "tiny-deepseek-v3-Et*6|t|t|mL-overlapped-optim"
        ),
    },
    "planning/test_recipes.py": {
        "test_a_recipe_fits_where_it_ran": (
            "deepseek-v3-h100-1024-pp4; deepseek-v3-gb300-256; qwen3-235b-gb200-256"
        ),
        "test_a_recipe_takes_as_long_as_it_did": "qwen3-235b-h100-256",
    },
    "planning/test_records.py": {
        "*": (
            "2 GPUs, qwen3, pp 2; qwen3, 4 rows; qwen3, FC1 again; qwen3, experts offloaded; "
            "qwen3, blockwise FP8; olmoe, levers; mixtral, 2 rows; deepseek, projections again"
        ),
    },
    "planning/test_search.py": {
        "test_the_fastest_order_and_levers_are_found": "",
        "test_a_gpu_of_ones_own_and_its_host_memory": "",
        "test_what_is_estimated_to_be_fast_is_planned_first": "",
        "test_levers_that_are_not_needed_are_dropped": "",
        "test_all_levers_need_less_memory_than_none": "",
        "test_rows_that_no_folding_divides_name_other_rows": "",
    },
    "planning/test_time_plan.py": {
        "test_few_layers_stand_for_all": "over peers' memory; deepseek, two nodes",
        "test_peaks_of_few_layers_stand_for_all": "MoE layers again",
        "test_ranks_of_a_pipeline": "overlapped",
        "test_the_command": "",
    },
    "planning/test_transformers.py": {
        "test_few_layers_stand_for_all": "jamba",
        "test_a_family_is_dry_run": "gemma4; nemotron_h; zaya",
    },
    "families/transformers/test_families.py": {
        "test_a_search_plans_what_degrees_plan": "minimax",
        "test_the_page_has_what_is_planned": "minimax; granitemoe; gemma4",
    },
    "families/transformers/test_tensor_parallel.py": {
        "test_over_tp": (
            "memory; checkpoints; fused; heads in one linear; groups of two ranks; "
            "linear attention written in place; experts written in place; "
            "fewer key heads in one linear; frozen; padded; scores; deferred"
        ),
    },
    "families/transformers/test_hf_context.py": {
        "*": (
            "qwen3, ring, packed; qwen3, long or short frequencies, rows; mixtral, window, rows; "
            "gpt-oss, heads, packed; deepseek, tp, padded; gated delta, packed; "
            "kimi delta, tp, packed; state space, tp, packed; sparse, packed; "
            "sparse, sinks, tp, packed; compressed, packed; short convolution, packed; "
            "chunks and temperatures, packed; lightning, tp, packed; "
            "text of qwen3_vl_moe, packed; own routers, a cp for each group, tp, padded; "
            "tampered positions"
        ),
    },
    "families/transformers/test_hf_ranks.py": {
        "test_equals_one_process": (
            "qwen2-moe/tp2-ep4; olmoe/tp2-ep4; deepseek-v3/tp4-ep2; gpt-oss/tp2-ep4; "
            "mixtral/ep2-edp2/sum"
        ),
    },
    "families/transformers/test_log_probs.py": {"test_logits_of_all_tokens_never_exist": "False"},
    "families/transformers/test_hyper_connections.py": {
        "test_autocast_and_compilers_get_the_class_own_code": "autocast",
    },
    "kernels/test_compile.py": {
        "test_microscaled_operands": "90-mxfp8-True; 100-nvfp4-True",
        "test_products_of_blocks": "100-mxfp8; 100-nvfp4; 120-mxfp8",
    },
    "kernels/linear_attention/test_over_ranks.py": {"*": "by channel"},
    "kernels/linear_attention/test_chain.py": {
        "test_kernels_over_pieces_are_at_most_twice_as_wrong_as_plain_pytorch": (
            "cpu-one tile-delta; cpu-one tile-no rates; cpu-two tiles-by channel"
        ),
        "test_transitions_of_kernels": "by channel; no rates",
        "test_a_chain_of_whole_documents_changes_no_bit": "delta",
    },
    "kernels/rows/test_microscaled.py": {"test_rows_of_experts": "mxfp8; nvfp4; fp32 scales"},
    "kernels/exchange/test_exchange.py": {
        "test_kernels_equal_references": (
            "uneven; etp; all experts are columns, few chosen; three ranks, odd columns; "
            "several chunks; everything dropped; no tokens"
        ),
    },
    "kernels/rows/test_cast.py": {"test_whole_rows": "e4m3"},
    "recipes/test_sdc.py": {
        "test_a_report_names_the_faulty_rank": (
            "two groups of experts; tensor parallel; fine-tuning"
        ),
    },
    "recipes/test_elastic.py": {"test_a_host_leaves_and_returns": "2"},
}


def beyond_the_table(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return cases of tests in the table that it does not name; of a test without any, none."""
    found: set[pytest.Item] = set()
    tests: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function):
            file = str(item.path.relative_to(item.config.rootpath)).removeprefix("tests/")
            tests[file, item.originalname].append(item)
    for (file, name), cases in tests.items():
        by_day = BY_DAY.get(file, {}).get(name, BY_DAY.get(file, {}).get("*"))
        others = [case for case in cases if not _is_named(case, by_day or "")]
        if by_day is not None and (by_day == "" or len(others) < len(cases)):
            found |= set(others)
    return found


def _is_named(case: pytest.Function, names: str) -> bool:
    callspec: Any = getattr(case, "callspec", None)
    ids = [callspec.id, *callspec._idlist] if callspec is not None else []
    found = [name for name in names.split("; ") if name]
    return any(i == name or i.startswith(f"{name}-") for i in ids for name in found)

"""A first script: shards a transformers model over the ranks that run it, and trains three steps.

    python examples/first.py                              one process, on a GPU if there is one
    torchrun --nproc-per-node 2 examples/first.py         two ranks share the experts

README.md quotes the code without its last line. Replace the model by your model and `tokens` by
your data. Every rank reads its own part of the data.
docs/guide.md continues from here: degrees, hosts, weights, memory, metrics and checkpoints.
"""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moecore import FSDPOptions, TrainStep, parallelize_moe
from moecore.train import AdamW

sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16)
experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
config = Qwen3MoeConfig(num_hidden_layers=2, vocab_size=999, **sizes, **experts)

torch.manual_seed(0)  # every rank builds the same weights
model = Qwen3MoeForCausalLM(config)
model = parallelize_moe(model, fsdp=FSDPOptions(param_dtype=torch.bfloat16))
step = TrainStep(model, AdamW(model.parameters(), lr=1e-4), max_norm=1.0)
rank = torch.distributed.get_rank()
torch.manual_seed(1 + rank)  # each rank draws its own tokens
for _ in range(3):
    tokens = torch.randint(0, 999, (2, 64), device=model.device)  # replace with your data
    step.forward_backward([{"input_ids": tokens, "labels": tokens}])  # a list of micro-batches
    done = step.finish()  # clips gradients, steps the optimizer, clears gradients
    if rank == 0:
        print(done.norm, done.metrics.compute_load_max_over_mean())

torch.distributed.destroy_process_group()

"""A first script: shards a transformers model over the ranks that run it, and trains three steps.

    python examples/first.py                              one process, on a GPU if there is one
    torchrun --nproc-per-node 2 examples/first.py         two ranks share the experts

README.md quotes the code, all but its end. Replace the model by yours and `tokens` by your data:
each data rank reads rows of its own, number `meshes.data_rank` of `meshes.data_ranks`.
docs/guide.md goes on from here: degrees, hosts, weights, memory, metrics and checkpoints.
"""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moecore import FSDPOptions, ParallelConfig, TrainStep, build_meshes, parallelize_moe
from moecore.train import AdamW

torch.manual_seed(0)  # the same weights on every rank
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=2, hidden_size=256, vocab_size=999))
meshes = build_meshes(ParallelConfig(ep=-1, edp_shard=1))  # -1 = what is left: all ranks
model = parallelize_moe(model, meshes, fsdp=FSDPOptions(param_dtype=torch.bfloat16))
step = TrainStep(model, AdamW(model.parameters(), lr=1e-4), max_norm=1.0)
torch.manual_seed(1 + meshes.data_rank)  # other data on every data rank
for _ in range(3):
    tokens = torch.randint(0, 999, (2, 64), device=meshes.device_type)  # your data
    step.forward_backward([{"input_ids": tokens, "labels": tokens}])  # its micro-batches
    done = step.finish()  # clips, steps, moves expert biases; a nan skips the step on every rank
    if meshes.data_rank == 0:
        print(done.norm, done.metrics.load_max_over_mean())  # gradient norm, load by layer

torch.distributed.destroy_process_group()

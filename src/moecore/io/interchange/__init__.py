"""Checkpoints of other trainers: torch.distributed.checkpoint (DCP), plain or by Megatron-Core."""

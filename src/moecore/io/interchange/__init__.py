"""Checkpoints of other trainers: torch.distributed.checkpoint (DCP), plain or of Megatron-Core."""

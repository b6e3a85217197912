"""Exchanges of rows between GPUs, by stores into peers' memory."""

"""Exchanges of rows and of cloned weights between GPUs, by stores into peers' memory."""

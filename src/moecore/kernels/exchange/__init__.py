"""What the exchange between GPUs runs: operations, their kernels, and the protocol of slots."""

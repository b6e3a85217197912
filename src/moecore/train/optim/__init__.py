"""Optimizers: AdamW in one launch or in part on the host, Muon for matrices, state off the GPU."""

"""Optimizers: AdamW in one launch or partly on the host, Muon for matrices, offload of state."""

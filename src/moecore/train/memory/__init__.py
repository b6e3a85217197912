"""Memory of saved activations: recomputation, offload to the host, and storage in pages."""

"""What a forward keeps for backward: computed again, in host memory, in pages."""

"""torchtitan 0.2."""

"""torchtitan 0.3."""

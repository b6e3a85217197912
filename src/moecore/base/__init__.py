"""Option records, field checks, torch's private names, saved-tensor packers, and CUDA streams."""

__version__ = "0.2.0"

"""The ground: records of options, field checks, private names of torch, saved tensors, streams."""

__version__ = "0.2.0"

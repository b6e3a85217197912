"""The ground: records of options, field checks, private names of torch, saved tensors, streams."""

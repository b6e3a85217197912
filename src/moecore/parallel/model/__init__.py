"""The arguments, checks, sharding plan, phases and stored state of `parallelize_moe`."""

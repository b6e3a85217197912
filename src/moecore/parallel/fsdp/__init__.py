"""FSDP: the sharding plan as plain data, and the units that shard, all-gather and reduce."""

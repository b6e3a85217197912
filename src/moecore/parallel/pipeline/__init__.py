"""Pipeline parallelism: which stage has which layers, and which rank runs what and when."""

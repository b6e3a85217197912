"""Pipeline parallelism: layouts of stages, schedules, and their execution."""

"""The record of a parallelized model, its request, checks, plan and phases."""

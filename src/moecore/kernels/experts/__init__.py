"""The computation of one rank's experts as one differentiable operation."""

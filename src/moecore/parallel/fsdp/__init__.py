"""Who owns which part of a model: the plan as plain data, and the units that carry it out."""

"""Router logits, scores, choices, weights, counts and balance statistics."""

"""The mathematics of training: pure functions on tensors, one small file a family.

Shapes: B rows, R response positions. ``response_mask`` is 1 where the policy sampled the token; whatever stands at the
other positions (NaN, inf, 1e9) changes neither a value nor a gradient. Computation is in float32 (float64 for float64
inputs). ``docs/algorithms.md`` lists every algorithm with its keys and its paper.
"""

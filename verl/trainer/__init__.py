"""Trainers: dataflow tables, the loop that runs them, and the entry points."""

"""Models: loading and saving Hugging Face models, packed forward passes, fused log-probs, value heads."""

"""Using a trained model: a loaded model with its engine, answers in a batch, a chat, an OpenAI-compatible server.

Importing this package loads no torch.
"""

"""Rollouts in vLLM: colocated in a process of its own, or in a server that runs already.

- ``versions.py``  which vLLM is installed, and what that says
- ``engine.py``    VLLMEngine: the process of ``verl.rollout.remote``, for vLLM
- ``adapter.py``   the only module that calls vLLM; ``receiver.py``: mixed into its workers, takes the weights
- ``server.py``    VLLMServerEngine: the same interface over HTTP
"""

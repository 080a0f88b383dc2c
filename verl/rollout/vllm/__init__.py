"""Rollouts in vLLM: colocated in a process of its own, or in a server that runs already.

- ``settings.py``  what the engine is told
- ``versions.py``  which vLLM is installed, and what that says
- ``engine.py``    VLLMEngine: the rollout interface over the process
- ``client.py``    the process seen from the trainer; ``host.py``: what runs in it
- ``adapter.py``   the only module that calls vLLM; ``receiver.py``: mixed into its workers, takes the weights
- ``weights.py``   the trainer's weights as other processes can read them
- ``probe.py``     log-probs of vLLM against the trainer's, after each update
- ``server.py``    VLLMServerEngine: the same interface over HTTP
"""

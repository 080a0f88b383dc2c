"""What the engines that work outside the trainer's process share; nothing here knows a particular one.

- ``settings.py``   what such an engine is told
- ``engine.py``     RemoteRequests and ProcessEngine: the rollout interface over a process
- ``client.py``     the process seen from the trainer; ``host.py``: what runs in it, over an engine's adapter
- ``weights.py``    the trainer's weights as other processes can read them; ``receiving.py``: how these open them
- ``probe.py``      log-probs of the engine against the trainer's, after each update
"""

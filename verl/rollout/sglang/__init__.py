"""Rollouts in SGLang, through its Engine, in a process of its own on the trainer's device.

- ``versions.py``  which SGLang is installed, and what that says
- ``engine.py``    SGLangEngine: the process of ``verl.rollout.remote``, for SGLang
- ``adapter.py``   the only module that calls SGLang; ``receiver.py``: called by its schedulers, takes the weights
"""

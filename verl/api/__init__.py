"""The Python-first face: thin over the trainer and its dataflow, with no loop of its own.

- ``rl_trainer.py``       RLTrainer; ``settings.py``: its parameters as configuration keys
- ``ray_trainer.py``      RayPPOTrainer: a config dict and ``fit()``
- ``hybrid_dataflow.py``  HybridDataflow (public as ``verl.dataflow.HybridDataflow``): the training graph to look at,
  change and run
- ``wrap.py``             wrap_for_rl: reinforcement learning for a Hugging Face model object
- ``reward_models.py``    a reward model as a reward function
- ``divergence.py``       the KL divergence after the update, as a node
"""

"""A tiny run that can be killed: python trainer_resume_script.py MODEL FOLDER ALGORITHM STEPS KILL.

KILL is ``none``, ``step:N`` (kill -9 in the middle of step N's update) or ``save:N`` (in the middle of writing
checkpoint N).
"""

import os
import signal
import sys
from pathlib import Path

from trainer_helpers import make_trainer

from verl.workers.actor import Actor


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def main(model, folder, algorithm, steps, when):
    import torch

    torch.set_num_threads(1)
    trainer = make_trainer(
        Path(model),
        Path(folder),
        algorithm=algorithm,
        validation=True,
        trainer__total_training_steps=int(steps),
        trainer__save_freq=2,
        trainer__test_freq=3,
        trainer__save_final=True,
        data__train_batch_size=4,
        data__gen_batch_size=3,
        actor_rollout_ref__rollout__n=4,
    )
    kind, _, number = when.partition(":")
    if kind == "step":
        real = Actor._loss

        def loss(self, micro, mini):
            if trainer.global_steps + 1 == int(number):
                kill()
            return real(self, micro, mini)

        Actor._loss = loss
    if kind == "save":
        real_save = Actor.save_pretrained

        def save(self, path):
            real_save(self, path)
            if trainer.global_steps == int(number):
                kill()

        save._verl_registration = real_save._verl_registration
        Actor.save_pretrained = save
    trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])

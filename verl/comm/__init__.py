"""How the ranks of one multi-controller program talk to each other.

Engines are written against :class:`Comm` and do not know whether a rank is alone, a thread or a process.
Importing this package does not import torch.

- ``base.py``       Comm, its errors, and SoloComm, the only rank there is
- ``threads.py``    ThreadComm, ranks that are threads
- ``processes.py``  TorchDistComm, ranks that are processes of a torch.distributed group
"""

from verl.comm.base import Comm, CommAbortedError, CommError, SoloComm
from verl.comm.processes import TorchDistComm, init_process_group_from, open_store
from verl.comm.threads import Meeting, ThreadComm

__all__ = [
    "Comm",
    "CommAbortedError",
    "CommError",
    "Meeting",
    "SoloComm",
    "ThreadComm",
    "TorchDistComm",
    "init_process_group_from",
    "open_store",
]

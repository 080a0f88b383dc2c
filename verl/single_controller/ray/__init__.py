"""Worker groups on a Ray cluster. Importing this does not import Ray; making a pool or a group does.

- ``cluster.py``  starting Ray here, or joining a cluster
- ``pool.py``     places for ranks, and whether the cluster has them
- ``host.py``     the process of one rank
- ``hosts.py``    the processes of a pool: calling them, waiting for them
- ``group.py``    RayWorkerGroup, one role in these processes
- ``faults.py``   dead and stalled ranks, full memory
- ``wire.py``     messages
"""

from verl.single_controller.ray.cluster import Cluster, ClusterSettings, import_ray
from verl.single_controller.ray.group import RayWorkerGroup
from verl.single_controller.ray.host import HostSettings
from verl.single_controller.ray.pool import RayResourcePool, check_room

__all__ = [
    "Cluster",
    "ClusterSettings",
    "HostSettings",
    "RayResourcePool",
    "RayWorkerGroup",
    "check_room",
    "import_ray",
]

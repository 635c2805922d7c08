"""A node's scheduling in virtual time: real admission control before the real engine runners, over scripted devices.

Only what OpenVINO would do is scripted: how long a run or a step takes, and how long an answer gets. A caller is a
generator that yields `Request`s and the seconds until its next one; it is sent the outcome of each.
"""

from tests.unit.worker_node.scheduling.virtual.sequences import SequenceWorld
from tests.unit.worker_node.scheduling.virtual.texts import TextWorld
from tests.unit.worker_node.scheduling.virtual.world import Request, Run, World

__all__ = ["Request", "Run", "SequenceWorld", "TextWorld", "World"]

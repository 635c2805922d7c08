"""Test doubles for services that use this package: a fleet of scripted nodes, and a scripted cloud, on loopback.

    from backend_client.testing import FakeFleet, status

    with FakeFleet(2) as fleet:
        fleet[0].script(status(503, "engine_unavailable"))
        with fleet.client() as client:
            client.embed("text")
        fleet.assert_sent("/embeddings", texts=["text"])

Vectors depend on the text alone, so order and identity can be checked (`fake_vector`). For pytest there are fixtures:
`pytest_plugins = ["backend_client.testing.plugin"]`, then `def test_it(fake_fleet, fake_cloud): …`.
"""

# May import the clients and what is below them. Begin reading with `node.FakeNode`, the script; `fleet` serves it.

from backend_client.testing.fleet import FakeCloud, FakeFleet
from backend_client.testing.node import FakeNode, Sent, Step, cut, drop, fake_vector, hang, status

__all__ = ["FakeCloud", "FakeFleet", "FakeNode", "Sent", "Step", "cut", "drop", "fake_vector", "hang", "status"]

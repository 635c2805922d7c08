"""The node's fetching of remote images: which settings it follows, and what is counted."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from worker_node.core.errors import NodeError
from worker_node.node import Node
from worker_node.settings import NodeSettings
from worker_node.tasks.generate.api.remote_images.fetching import ImageFetcher
from worker_node.tasks.generate.serving.pictures import picture_decoder


class RemoteImageMetrics:
    """Metrics of remote images, in the node's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.images = Counter(
            "npu_node_remote_images",
            "Images that requests named by URL; the outcome is fetched or the code of the error",
            ("outcome",),
            registry=registry,
        )
        self.bytes = Counter("npu_node_remote_image_bytes", "Bytes of the images that were fetched", registry=registry)


def fetch_remote_images(node: Node) -> None:
    """Have the node fetch the remote images of requests, as its settings allow at the time."""
    pictures, fetcher = node.services.parts.of(picture_decoder), ImageFetcher()
    metrics = node.telemetry.own(RemoteImageMetrics)

    async def fetch(url: str, where: str, most: int, deadline: float) -> bytes:
        try:
            content = await fetcher.fetch(url, where, most, deadline)
        except NodeError as error:
            metrics.images.labels(error.code).inc()
            raise
        metrics.images.labels("fetched").inc()
        metrics.bytes.inc(len(content))
        return content

    def follow(settings: NodeSettings) -> None:
        fetcher.follow(settings)
        pictures.most_fetched = settings.max_image_body_bytes

    pictures.fetch = fetch
    follow(node.settings)
    node.followers.append(follow)

"""Metrics of the images in chats."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from worker_node.core.types import Picture
from worker_node.observability.metrics import Tally


class PictureMetrics:
    """The task's own metrics of images, in the node's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._images = Tally(
            "npu_node_images",
            "Images of chats by where they came from; the outcome is decoded or the code of the error",
            ("model", "source", "outcome"),
            registry,
        )
        self._bytes = Tally(
            "npu_node_image_bytes", "Bytes of the image files that were decoded", ("model", "source"), registry
        )

    def count(self, model: str, picture: Picture, size: int, refusal: str | None) -> None:
        """Count an image whose file has `size` bytes, or that was refused with this code."""
        source = "inline" if picture.url is None else "remote"
        self._images.add(1, model, source, refusal or "decoded")
        if refusal is None:
            self._bytes.add(size, model, source)

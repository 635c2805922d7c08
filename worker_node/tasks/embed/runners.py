"""The embedding engines: token ids in, pooled and normalised vectors out.

The model's graph does the whole work (`models/conversion/bert.py` builds it).
"""

from __future__ import annotations

from worker_node.encoders.dynamic import DynamicEncoder
from worker_node.encoders.static import StaticEncoder
from worker_node.tasks.embed.dynamic_options import EmbeddingOptions
from worker_node.tasks.embed.messages import Embedded, EmbedJob
from worker_node.tasks.embed.static_options import StaticOptions


class EmbeddingRunner(DynamicEncoder):
    """On CPU and GPU."""

    jobs = EmbedJob
    options = EmbeddingOptions
    result = Embedded
    output = "embedding"


class StaticEmbeddingRunner(StaticEncoder):
    """On the NPU."""

    jobs = EmbedJob
    options = StaticOptions
    result = Embedded
    output = "embedding"

"""How vision-language models are built, planned and admitted."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from worker_node.core.errors import ConfigurationError
from worker_node.core.types import Device
from worker_node.engines.cpu_share import CpuRole
from worker_node.models.directory import sampling_defaults
from worker_node.models.manifest import InstalledModel
from worker_node.scheduling.admission import AdmissionLimits
from worker_node.scheduling.routing import Feature
from worker_node.scheduling.wait_estimate import Capacity
from worker_node.serving.task import EnginePlan, Footprint, ModelParts, ServedTask, Shapes
from worker_node.settings import ModelSettings
from worker_node.settings.declaration import EngineOptions
from worker_node.tasks.generate.serving.model import GenerationModel
from worker_node.tasks.generate.serving.tokenization import ChatTokenizer
from worker_node.tasks.vision.options import VisionNpuOptions
from worker_node.tasks.vision.serving.canary import vision_canary
from worker_node.tasks.vision.serving.rules import picture_rules

# Resident bytes for each byte of weights, as those of the generation engines.
_WEIGHTS = 2.5
_MAX_OUTSTANDING = 64


class _VisionChat(ServedTask):
    cpu_role = CpuRole.FIRST

    def build(self, parts: ModelParts) -> GenerationModel:
        if find_spec("PIL") is None:
            raise ConfigurationError(
                f"{parts.installed.id}: Pillow, which decodes images, is missing: pip install 'npu-node[vision]'"
            )
        installed = parts.installed
        chat = ChatTokenizer(installed.path, installed.context_limit)
        rules = picture_rules(installed.path)
        greedy = parts.settings.sampling_defaults == "greedy"
        return GenerationModel(
            installed,
            parts.place(lambda _limit: parts.guard(vision_canary(chat, rules))),
            chat,
            sampling_defaults=None if greedy else sampling_defaults(installed.path),
            pictures=rules,
            aliases=parts.wanted.aliases,
            idle_unload_s=parts.wanted.idle_unload_s,
        )

    def admission(self, options: EngineOptions) -> AdmissionLimits:  # noqa: ARG002
        """Units are requests, of which one runs at a time."""
        return AdmissionLimits(_MAX_OUTSTANDING, capacity=Capacity(sequences=1))

    def static_shapes(
        self,
        installed: InstalledModel,
        wanted: ModelSettings,
        values: dict[str, Any],
        *,
        emulated: bool,  # noqa: ARG002
    ) -> Shapes:
        limit, defaults = installed.context_limit, VisionNpuOptions()
        prompt = values.get("max_prompt_len") or min(installed.max_prompt_len or defaults.max_prompt_len, limit)
        response = values.get("min_response_len", defaults.min_response_len)
        if prompt > limit:
            raise wanted.error("max_prompt_len", f"max_prompt_len is {prompt}, the model's context {limit} tokens")
        values["max_prompt_len"] = prompt
        return Shapes((prompt, response), prompt, min(prompt + response, limit))

    def footprint(self, _installed: InstalledModel, _plan: EnginePlan) -> Footprint:
        return Footprint(_WEIGHTS)

    def lacks(self, options: EngineOptions) -> frozenset[Feature]:  # noqa: ARG002
        return frozenset({"n", "logprobs"})

    def parts(self, options: EngineOptions) -> Mapping[str, Device]:
        if isinstance(options, VisionNpuOptions):
            return {"language": Device.NPU, "vision": Device.CPU}
        return {}


VISION_CHAT = _VisionChat()

"""Every setting of a node: defaults, then a TOML file, then `NPU_NODE_*` in the environment, then flags.

It may import `core`, `models` and the declarations of engines' options. Begin with `reading.py`; `node.py` and
`model.py` declare the settings, docs/settings_reference.py documents them.
"""

from worker_node.settings.model import ModelSettings, PlacementSettings
from worker_node.settings.node import EMBEDDED_MODELS, NodeSettings, default_compile_cache, is_loopback
from worker_node.settings.reading import InvalidSettings, SettingProblem, SettingsSource, parse_settings

__all__ = [
    "EMBEDDED_MODELS",
    "InvalidSettings",
    "ModelSettings",
    "NodeSettings",
    "PlacementSettings",
    "SettingProblem",
    "SettingsSource",
    "default_compile_cache",
    "is_loopback",
    "parse_settings",
]

"""The kind of model that this task serves."""

VISION = "vision"

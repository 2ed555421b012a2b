"""Profiles: how an agent id is run. Names are in `profiles` and `templates`."""

from .profiles import Profiles
from .templates import CommandTemplate, read_templates

__all__ = ["CommandTemplate", "Profiles", "read_templates"]
